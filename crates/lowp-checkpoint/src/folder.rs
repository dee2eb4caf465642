//! Folders of checkpoints: their names, which is the latest, and which are kept.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::CheckpointError;
use crate::index::INDEX;

/// The file that names the latest checkpoint of a folder.
const LATEST: &str = "latest";

/// The folder of the checkpoint of `step` in `folder`.
pub fn folder_of(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:08}"))
}

/// The folder in which the checkpoint of `step` is written.
pub(crate) fn unfinished(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!(".step-{step:08}.unfinished"))
}

/// Whether `folder` is one checkpoint.
pub fn is_checkpoint(folder: &Path) -> bool {
    folder.join(INDEX).is_file()
}

/// The latest checkpoint of `folder`, which may be a checkpoint itself.
///
/// # Errors
/// There is none, or the file that names it cannot be read.
pub fn latest(folder: &Path) -> Result<PathBuf, CheckpointError> {
    if is_checkpoint(folder) {
        return Ok(folder.to_owned());
    }
    let none = |why: &str| CheckpointError::NoCheckpoint {
        path: folder.to_owned(),
        why: why.to_owned(),
    };
    let path = folder.join(LATEST);
    if !path.is_file() {
        return Err(none("it holds no checkpoint"));
    }
    let name = fs::read_to_string(&path).map_err(CheckpointError::io(&path, "read"))?;
    let name = name.trim();
    if step_of(name).is_none() {
        return Err(none("its file `latest` names no checkpoint"));
    }
    let found = folder.join(name);
    match is_checkpoint(&found) {
        true => Ok(found),
        false => Err(none(&format!("its latest checkpoint {name} is not there"))),
    }
}

/// The step in the name of a checkpoint's folder.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    let plain = digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten()
}

/// Gives the finished folder of `step` its name, makes it the latest, and removes all but the `keep` latest steps up to it.
pub(crate) fn publish(
    folder: &Path,
    step: u64,
    keep: Option<usize>,
) -> Result<(), CheckpointError> {
    let (from, to) = (unfinished(folder, step), folder_of(folder, step));
    sync(&from)?;
    if to.exists() {
        // Of the same step, by a run that was resumed before it.
        let before = folder.join(format!(".step-{step:08}.replaced"));
        remove(&before)?;
        fs::rename(&to, &before).map_err(CheckpointError::io(&to, "replace"))?;
        fs::rename(&from, &to).map_err(CheckpointError::io(&to, "create"))?;
        remove(&before)?;
    } else {
        fs::rename(&from, &to).map_err(CheckpointError::io(&to, "create"))?;
    }
    sync(folder)?;
    let (name, path) = (to.file_name().unwrap_or_default(), folder.join(LATEST));
    let next = folder.join(".latest.unfinished");
    fs::write(&next, format!("{}\n", name.display()))
        .map_err(CheckpointError::io(&next, "write"))?;
    sync(&next)?;
    fs::rename(&next, &path).map_err(CheckpointError::io(&path, "replace"))?;
    sync(folder)?;
    match keep {
        Some(keep) => thin_out(folder, step, keep),
        None => Ok(()),
    }
}

/// Removes the checkpoints of `folder` up to `step` but for the `keep` latest of them.
fn thin_out(folder: &Path, step: u64, keep: usize) -> Result<(), CheckpointError> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder).map_err(CheckpointError::io(folder, "list"))? {
        let entry = entry.map_err(CheckpointError::io(folder, "list"))?;
        steps.extend(entry.file_name().to_str().and_then(step_of));
    }
    steps.retain(|found| *found <= step);
    steps.sort_unstable();
    let old = steps.len().saturating_sub(keep);
    steps[..old]
        .iter()
        .try_for_each(|old| remove(&folder_of(folder, *old)))
}

/// Removes a folder, if it is there.
pub(crate) fn remove(folder: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(CheckpointError::io(folder, "remove")(error))
        }
        _ => Ok(()),
    }
}

/// Waits until a file or folder is on the disk.
pub(crate) fn sync(path: &Path) -> Result<(), CheckpointError> {
    let open = File::open(path);
    open.and_then(|file| file.sync_all())
        .map_err(CheckpointError::io(path, "bring to the disk"))
}

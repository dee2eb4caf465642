//! Folders of checkpoints: their names, which is the latest, and which are kept.

use std::fs::{self, File, TryLockError};
use std::io::{self, Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::CheckpointError;
use crate::index::INDEX;
use crate::sync::sync_folder;
use crate::unfinished::UNFINISHED;

/// The file that names the latest checkpoint of a folder.
const LATEST: &str = "latest";
/// The file that the run which saves to a folder has locked.
const LOCK: &str = ".lock";

/// What nobody has written to for so long is no run's any more, where nothing else tells: a checkpoint is written in minutes.
const OLD: Duration = Duration::from_secs(48 * 3600);

/// The folder of the checkpoint of `step` in `folder`.
pub fn folder_of(folder: &Path, step: u64) -> PathBuf {
    folder.join(name_of(step))
}

fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

/// The folder in which the checkpoint `id` of `step` is written: no two runs have one together, also where nothing can be locked.
pub(crate) fn unfinished(folder: &Path, step: u64, id: &str) -> PathBuf {
    folder.join(format!(".{}.{id}.unfinished", name_of(step)))
}

/// In place of an identifier, of a checkpoint that is being removed: no more of it counts.
const REMOVED: &str = "removed";

/// The step in the name of a folder that [`unfinished`] gives.
fn unfinished_step(name: &str) -> Option<u64> {
    let of_step = name.strip_prefix('.')?.strip_suffix(".unfinished")?;
    // Older versions have no identifier there.
    step_of(of_step.split_once('.').map_or(of_step, |(step, _)| step))
}

/// Whether `name` is one of a checkpoint that is being removed.
fn is_removed(name: &str) -> bool {
    let named = unfinished_step(name).and_then(|_| name.strip_suffix(".unfinished"));
    named.is_some_and(|name| name.ends_with(REMOVED))
}

/// The step in the name of a folder that [`replaced`] gives.
fn replaced_step(name: &str) -> Option<u64> {
    step_of(name.strip_prefix('.')?.strip_suffix(".replaced")?)
}

/// The file of the checkpoint `id` that is about to be [`LATEST`].
fn next_latest(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!(".{LATEST}.{id}.unfinished"))
}

/// Whether `name` is one that [`next_latest`] gives, or an older version.
fn is_next_latest(name: &str) -> bool {
    let named = name
        .strip_prefix('.')
        .and_then(|name| name.strip_prefix(LATEST));
    named.is_some_and(|rest| rest.starts_with('.') && rest.ends_with(".unfinished"))
}

/// What the name of a file begins with, before a number, that is made beside other people's to see whether one can be.
const PROBE: &str = ".lowp-probe-";
/// The same in a folder of checkpoints, where all ranks of a run look for it.
const SHARED_PROBE: &str = ".probe-";

/// The file `id` that all ranks of a run look for.
pub(crate) fn shared_probe(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!("{SHARED_PROBE}{id}"))
}

/// The name that the checkpoint of `step` has while another one of this step takes its place.
fn replaced(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!(".{}.replaced", name_of(step)))
}

/// Whether `folder` is one checkpoint.
pub fn is_checkpoint(folder: &Path) -> bool {
    folder.join(INDEX).is_file()
}

/// Whether `folder` is a checkpoint or a folder of such by its names, so that what is missing or damaged in it is an error of a checkpoint.
pub fn is_of_checkpoints(folder: &Path) -> bool {
    let is_step = folder.file_name().and_then(|name| name.to_str());
    let named = is_checkpoint(folder) || folder.join(LATEST).exists();
    folder.is_dir()
        && (named
            || is_step.is_some_and(|name| step_of(name).is_some())
            || steps(folder).is_ok_and(|steps| !steps.is_empty()))
}

/// The steps whose checkpoints `folder` has, in order.
///
/// # Errors
/// The folder cannot be listed, other than because it is not there.
pub fn steps(folder: &Path) -> Result<Vec<u64>, CheckpointError> {
    if !is_there(folder)? {
        return Ok(Vec::new());
    }
    let mut steps: Vec<u64> = names(folder)?
        .iter()
        .filter_map(|name| step_of(name))
        .collect();
    steps.sort_unstable();
    Ok(steps)
}

/// The latest checkpoint of `folder`, which may be a checkpoint itself.
///
/// # Errors
/// There is none, or the file that names it cannot be read.
pub fn latest(folder: &Path) -> Result<PathBuf, CheckpointError> {
    if is_there(&folder.join(INDEX))? {
        return Ok(folder.to_owned());
    }
    let none = |why: &str| CheckpointError::NoCheckpoint {
        path: folder.to_owned(),
        why: why.to_owned(),
    };
    let path = folder.join(LATEST);
    let named = match fs::metadata(&path) {
        Ok(found) => found,
        // What stopped before the first name was written left a whole checkpoint: it got its own name last.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            for step in steps(folder)?.into_iter().rev() {
                let place = folder_of(folder, step);
                if is_there(&place.join(INDEX))? {
                    return Ok(place);
                }
            }
            return Err(none("it holds no checkpoint with its file `index.json`"));
        }
        Err(error) => return Err(CheckpointError::io(&path, "read")(error)),
    };
    // A name is short.
    if !named.is_file() || named.len() > 64 {
        return Err(none("its file `latest` names no checkpoint"));
    }
    let name = fs::read(&path).map_err(CheckpointError::io(&path, "read"))?;
    let name = String::from_utf8_lossy(&name);
    let name = name.trim();
    let Some(step) = step_of(name) else {
        return Err(none("its file `latest` names no checkpoint"));
    };
    let found = of_step(folder, step)?;
    found.ok_or_else(|| none(&format!("its latest checkpoint {name} is not there")))
}

/// The checkpoint of `step` in `folder`, where it is being replaced under its other name.
pub(crate) fn of_step(folder: &Path, step: u64) -> Result<Option<PathBuf>, CheckpointError> {
    for place in [folder_of(folder, step), replaced(folder, step)] {
        if is_there(&place.join(INDEX))? {
            return Ok(Some(place));
        }
    }
    Ok(None)
}

/// Whether `path` is there. If it cannot be determined, as where a network file system does not answer, it is an error.
fn is_there(path: &Path) -> Result<bool, CheckpointError> {
    match fs::metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(CheckpointError::io(path, "look for")(error)),
    }
}

/// Whether a run could save to `folder` now, as far as one process can tell: of its path what is there is a folder that takes files,
/// and no other run has locked it. Nothing is left, nor by one that was killed meanwhile: the next call removes that.
///
/// # Errors
/// Why not.
pub fn check_writable(folder: &Path) -> Result<(), CheckpointError> {
    if let Ok(lock) = File::open(folder.join(LOCK))
        && matches!(lock.try_lock(), Err(TryLockError::WouldBlock))
    {
        let folder = folder.to_owned();
        return Err(CheckpointError::InUse { folder });
    }
    for file in [LOCK, LATEST].map(|name| folder.join(name)) {
        if file.is_dir() {
            let why = Error::other("a folder has its name; move it away");
            return Err(CheckpointError::io(&file, "write")(why));
        }
    }
    let here = Path::new(".");
    let there = folder
        .ancestors()
        .map(|path| match path.as_os_str().is_empty() {
            true => here,
            false => path,
        })
        .find(|path| match fs::symlink_metadata(path) {
            Err(error) => error.kind() != ErrorKind::NotFound,
            Ok(_) => true,
        });
    let there = there.unwrap_or(here);
    match fs::metadata(there) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => {
            let why = Error::from(ErrorKind::NotADirectory);
            return Err(CheckpointError::io(there, "create a folder in")(why));
        }
        Err(error) => return Err(CheckpointError::io(there, "create")(error)),
    }
    let left = |name: &&String| {
        let number = name.strip_prefix(PROBE);
        number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    for name in names(there).unwrap_or_default().iter().filter(left) {
        // Whoever made it knows by now that it could be made.
        remove_probe(&there.join(name));
    }
    let probe = there.join(format!("{PROBE}{}", std::process::id()));
    File::create(&probe).map_err(CheckpointError::io(there, "create files in this folder"))?;
    match fs::remove_file(&probe) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(CheckpointError::io(&probe, "remove")(error))
        }
        _ => Ok(()),
    }
}

fn remove_probe(path: &Path) {
    let empty = fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && found.len() == 0);
    if empty {
        // What cannot be removed does no harm.
        drop(fs::remove_file(path));
    }
}

/// Creates `folder`, and locks it for the run that holds the file; `None` on a file system without locks.
///
/// # Errors
/// Another run has locked it, or it cannot be created.
pub fn lock(folder: &Path) -> Result<Option<File>, CheckpointError> {
    create(folder).map_err(CheckpointError::io(folder, "create"))?;
    let path = folder.join(LOCK);
    let lock = File::create(&path).map_err(CheckpointError::io(&path, "create"))?;
    match lock.try_lock() {
        Err(TryLockError::WouldBlock) => {
            let folder = folder.to_owned();
            Err(CheckpointError::InUse { folder })
        }
        Err(TryLockError::Error(_)) => Ok(None),
        Ok(()) => Ok(Some(lock)),
    }
}

/// Creates `folder` and those above it that are not there, and brings their names to the disk.
fn create(folder: &Path) -> io::Result<()> {
    let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let missing = folder.ancestors().take_while(is_missing);
    let parents = missing.filter_map(Path::parent).map(Path::to_owned);
    let parents: Vec<PathBuf> = parents.collect();
    fs::create_dir_all(folder)?;
    for parent in parents {
        let here = parent.as_os_str().is_empty();
        // One that may not be opened may have names all the same.
        drop(sync_folder(if here { Path::new(".") } else { &parent }));
    }
    Ok(())
}

/// The step of the checkpoint whose folder has this name, also while another one takes its place.
pub(crate) fn step_in(name: &str) -> Option<u64> {
    step_of(name).or_else(|| replaced_step(name))
}

fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (name == name_of(step)).then_some(step)
}

pub(crate) fn names(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(CheckpointError::io(folder, "list"))? {
        let entry = entry.map_err(CheckpointError::io(folder, "list"))?;
        names.extend(entry.file_name().into_string());
    }
    Ok(names)
}

/// Puts away what runs that were stopped left: what they did not finish, and what they were about to replace. Where this run is not
/// `alone` another may be at work, and what it left is known by its age. What cannot be removed does no harm.
pub(crate) fn tidy(folder: &Path, alone: bool) -> Result<(), CheckpointError> {
    let left = |path: &Path| alone || is_old(path);
    for name in names(folder)? {
        let path = folder.join(&name);
        if let Some(step) = replaced_step(&name) {
            let to = folder_of(folder, step);
            if alone && !to.exists() {
                match names(&path).is_ok_and(|names| names.iter().all(|name| is_of_nfs(name))) {
                    true => drop(remove(&path)),
                    false => fs::rename(&path, &to).map_err(CheckpointError::io(&to, "create"))?,
                }
            }
        } else if unfinished_step(&name).is_some() && left(&path) {
            drop(remove(&path));
        } else if is_next_latest(&name) && left(&path) {
            drop(fs::remove_file(&path));
        } else if (name.starts_with(PROBE) || name.starts_with(SHARED_PROBE)) && left(&path) {
            remove_probe(&path);
        }
    }
    if alone {
        drop(remove_replaced(folder));
    }
    Ok(())
}

/// Whether nobody has written to `path` for long, nor, if it is a folder, to anything in it.
fn is_old(path: &Path) -> bool {
    let old = |path: &Path| {
        let modified = fs::symlink_metadata(path).and_then(|found| found.modified());
        modified.is_ok_and(|then| then + OLD < SystemTime::now())
    };
    let within = names(path).unwrap_or_default();
    old(path) && within.iter().all(|name| old(&path.join(name)))
}

/// Gives the finished folder `from` of the checkpoint `id` of `step` its name, and makes it the latest; a checkpoint of this step that
/// was there is under its hidden name then ([`remove_replaced`]). Another run may do the same where nothing can be locked. After an
/// error all is as it was.
pub(crate) fn publish(
    folder: &Path,
    from: &Path,
    id: &str,
    step: u64,
) -> Result<(), CheckpointError> {
    let to = folder_of(folder, step);
    sync(from)?;
    let before = replaced(folder, step);
    let replaces = to.exists();
    if replaces && !was_checkpoint(&to) {
        let why = "it is no checkpoint and stands where one is to be saved; move it away";
        return Err(CheckpointError::io(&to, "replace")(std::io::Error::other(
            why,
        )));
    }
    if replaces {
        // Of the same step, by a run that was resumed before it. `latest` may name it, and finds it under either name.
        if remove(&before).is_err() {
            let aside = unfinished(folder, step, &format!("{id}.{REMOVED}"));
            fs::rename(&before, &aside).map_err(CheckpointError::io(&before, "remove"))?;
        }
        fs::rename(&to, &before).map_err(CheckpointError::io(&to, "replace"))?;
    }
    let named = fs::rename(from, &to).map_err(CheckpointError::io(&to, "create"));
    // What else goes wrong below is no worse than the error that is returned.
    let latest = named.and_then(|()| {
        let latest = make_latest(folder, id, step);
        latest.inspect_err(|_| drop(fs::rename(&to, from)))
    });
    if latest.is_err() && replaces {
        // Nothing of another run is lost: a checkpoint that stands there meanwhile stays.
        drop(fs::rename(&before, &to));
    }
    latest
}

fn make_latest(folder: &Path, id: &str, step: u64) -> Result<(), CheckpointError> {
    sync(folder)?;
    let (next, path) = (next_latest(folder, id), folder.join(LATEST));
    let made = put(&next, format!("{}\n", name_of(step)).as_bytes())
        .and_then(|()| fs::rename(&next, &path).map_err(CheckpointError::io(&path, "replace")));
    made.inspect_err(|_| drop(fs::remove_file(&next)))
}

/// Makes the checkpoint of `step` the latest, if it is the last one and the file that names the latest is damaged or names none that is there.
pub(crate) fn mend_latest(folder: &Path, id: &str, step: u64) -> Result<(), CheckpointError> {
    match latest(folder) {
        Err(error) if error.is_damage() && steps(folder)?.last() == Some(&step) => {
            make_latest(folder, id, step)
        }
        _ => Ok(()),
    }
}

/// Removes checkpoints that others of their steps have replaced, and those that are being removed. One that stays, of which the errors are, is tried again
/// after the next one is saved.
pub(crate) fn remove_replaced(folder: &Path) -> Vec<CheckpointError> {
    let names = names(folder).unwrap_or_default();
    let is_due = |name: &&String| {
        is_removed(name) || replaced_step(name).is_some_and(|step| folder_of(folder, step).exists())
    };
    let due = names.iter().filter(is_due);
    due.filter_map(|name| remove(&folder.join(name)).err())
        .collect()
}

/// Removes the checkpoints of `steps` in `folder`, which are in order, but for the `keep` last that are whole, and what is newer. One that cannot be removed,
/// because somebody reads it for example, and of which the errors are, is tried again after the next one, or by the next run under its hidden name.
pub(crate) fn thin_out(
    folder: &Path,
    mut steps: Vec<u64>,
    keep: usize,
    is_whole: impl Fn(&Path) -> bool,
) -> Vec<CheckpointError> {
    let place = |step: u64| folder_of(folder, step);
    let whole = steps
        .iter()
        .copied()
        .filter(|&step| is_checkpoint(&place(step)) && is_whole(&place(step)));
    let Some(first) = whole.rev().nth(keep.saturating_sub(1)) else {
        return Vec::new();
    };
    steps.retain(|&step| step < first && (is_checkpoint(&place(step)) || is_rest(&place(step))));
    let removed = steps.into_iter().map(|old| {
        let (from, hidden) = (place(old), unfinished(folder, old, REMOVED));
        // What is left of one that was stopped here before.
        let named = remove(&hidden).is_ok() && UNFINISHED.rename(&from, &hidden).is_ok();
        match named {
            true => UNFINISHED.remove(&hidden),
            false => remove(&from),
        }
    });
    removed.filter_map(Result::err).collect()
}

/// Whether `folder` is a checkpoint, or what damage left of one: whatever has the name of its index, or files of ranks alone.
fn was_checkpoint(folder: &Path) -> bool {
    fs::symlink_metadata(folder.join(INDEX)).is_ok() || is_rest(folder)
}

/// Whether `folder` has files of ranks alone: the index is removed first.
fn is_rest(folder: &Path) -> bool {
    let of_rank = |name: &String| {
        name.starts_with("rank-") && name.ends_with(".safetensors") || is_of_nfs(name)
    };
    names(folder).is_ok_and(|names| names.iter().all(of_rank))
}

/// Whether NFS gave this name to a file that was removed while a process of this machine had it open. The file and its folder stay until the
/// process closes it.
fn is_of_nfs(name: &str) -> bool {
    name.starts_with(".nfs")
}

/// Removes `folder`. A rank may create its file meanwhile: then the folder is not empty, and is removed again.
pub(crate) fn remove(folder: &Path) -> Result<(), CheckpointError> {
    #[cfg(test)]
    use tests::remove_dir_all;

    #[cfg(not(test))]
    use fs::remove_dir_all;

    const TRIES: usize = 100;
    for left in (0..TRIES).rev() {
        match remove_dir_all(folder) {
            Ok(()) => break,
            Err(error) if error.kind() == ErrorKind::NotFound => break,
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty && left > 0 => {}
            Err(error) => return Err(CheckpointError::io(folder, "remove")(error)),
        }
    }
    Ok(())
}

/// Writes a file and waits until it is on the disk.
pub(crate) fn put(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    fs::write(path, bytes).map_err(CheckpointError::write(path, bytes.len() as u64))?;
    synced(path, |path| File::open(path)?.sync_all())
}

/// Waits until the names in a folder are on the disk.
pub(crate) fn sync(folder: &Path) -> Result<(), CheckpointError> {
    synced(folder, sync_folder)
}

/// Has `sync` bring a file or folder to the disk.
fn synced(path: &Path, sync: fn(&Path) -> io::Result<()>) -> Result<(), CheckpointError> {
    #[cfg(test)]
    let sync = |path: &Path| tests::unless_refused().and_then(|()| sync(path));
    sync(path).map_err(CheckpointError::io(path, "bring to the disk"))
}

#[cfg(test)]
#[path = "folder/tests.rs"]
pub(crate) mod tests;

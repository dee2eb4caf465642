//! [`Temporary`]: a hidden folder beside an output, which is written there and then renamed into place.
//!
//! It goes away with its value, when the process is told to end, and, after a kill that no process can answer, on the
//! next run for the same output. Reasons: docs/decisions/0007-temporaries.md.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of the output's name that its temporary repeats; file systems allow 255 in all.
const MAX_NAME: usize = 128;
/// Between the output's name and the number of the process.
const INFIX: &str = ".lowp-";
const SUFFIX: &str = ".tmp";

/// The temporaries of this process. Whoever creates or removes one holds the lock, so that none appears behind the back
/// of a signal.
static LIVE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn live() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A hidden folder that exists while this value does.
#[derive(Debug)]
pub(crate) struct Temporary {
    path: PathBuf,
    /// Locked: tells other processes that this folder is in use.
    _lock: Option<File>,
}

impl Temporary {
    /// Makes a folder beside `output`, and removes those that killed processes left there.
    ///
    /// # Errors
    /// `output` has no file name, or its folder is missing or cannot be written.
    pub(crate) fn beside(output: &Path) -> io::Result<Self> {
        #[cfg(unix)]
        crate::signals::listen(remove_all)?;
        let name = output
            .file_name()
            .ok_or_else(|| io::Error::other("it is no file name"))?;
        let prefix = prefix(&name.to_string_lossy());
        let folder = output.parent().unwrap_or(Path::new(""));
        sweep(folder, &prefix);
        let mut attempt = 0u32;
        loop {
            let process = std::process::id();
            let path = folder.join(format!("{prefix}{process}-{attempt}{SUFFIX}"));
            attempt += 1;
            let mut live = live();
            match fs::create_dir(&path) {
                Ok(()) => live.insert(path.clone()),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            };
            drop(live);
            let lock = lock(&path);
            let made = Self { path, _lock: lock };
            // Before it was locked, the sweep of another process may have taken it for a leftover.
            if made.path.is_dir() {
                return Ok(made);
            }
        }
    }

    /// Gives `draft`, which is this folder or a file in it, the name `path`. Once the process is being told to end it
    /// does not: this waits for that end, so that nothing is removed under its new name.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub(crate) fn publish(&self, draft: &Path, path: &Path) -> io::Result<()> {
        let mut live = live();
        fs::rename(draft, path)?;
        if draft == self.path {
            live.remove(&self.path);
        }
        Ok(())
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let mut live = live();
        remove(&self.path);
        live.remove(&self.path);
    }
}

/// Removes every temporary of this process, and keeps new ones from being made until the returned value goes.
#[cfg(unix)]
fn remove_all() -> impl Sized {
    let live = live();
    live.iter().for_each(|path| remove(path));
    live
}

/// Removes a folder that another thread may still be writing to.
fn remove(path: &Path) {
    for _ in 0..100 {
        match fs::remove_dir_all(path) {
            // A file was created in it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            // Whatever else is wrong, the error that led here is the one worth reporting.
            _ => return,
        }
    }
}

/// What the temporaries of the output called `name` begin with.
fn prefix(name: &str) -> String {
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!(".{}{INFIX}", &name[..end])
}

/// Removes the temporaries in `folder` that no process holds any more. What cannot be removed stays; it does no harm.
fn sweep(folder: &Path, prefix: &str) {
    let here = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    for entry in fs::read_dir(here).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|name| is_temporary(name, prefix));
        if ours && entry.file_type().is_ok_and(|kind| kind.is_dir()) && is_abandoned(&entry.path())
        {
            remove(&entry.path());
        }
    }
}

/// Whether [`Temporary::beside`] makes such names: prefix, two numbers, suffix.
fn is_temporary(name: &str, prefix: &str) -> bool {
    let numbers = name
        .strip_prefix(prefix)
        .and_then(|rest| rest.strip_suffix(SUFFIX))
        .and_then(|rest| rest.split_once('-'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    numbers.is_some_and(|(process, attempt)| is_number(process) && is_number(attempt))
}

/// Whether the folder can be locked, so that its process is gone. A process number alone would not tell: it may be of
/// another container or machine that shares the disk. Where the file system has no locks, nothing is abandoned.
#[cfg(unix)]
fn is_abandoned(path: &Path) -> bool {
    File::open(path).is_ok_and(|folder| folder.try_lock().is_ok())
}

#[cfg(not(unix))]
fn is_abandoned(_path: &Path) -> bool {
    false
}

/// Locks the folder, where the system can.
#[cfg(unix)]
fn lock(path: &Path) -> Option<File> {
    let folder = File::open(path).ok()?;
    folder.lock().ok()?;
    Some(folder)
}

#[cfg(not(unix))]
fn lock(_path: &Path) -> Option<File> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder").flatten();
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn goes_away_with_everything_in_it() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let made = Temporary::beside(&dir.path().join("q"))?;
        fs::write(made.path().join("file"), "half")?;
        assert_eq!(names(dir.path()).len(), 1);
        drop(made);
        assert!(names(dir.path()).is_empty());
        Ok(())
    }

    #[cfg(unix)]
    #[test]
    fn the_next_one_removes_leftovers_and_nothing_else() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let held = Temporary::beside(&dir.path().join("q"))?;
        let kept = [
            ".q.lowp-1-0.tmp.d",
            ".q.lowp-.tmp",
            ".q.lowp-1.tmp",
            ".q.lowp-x-0.tmp",
            ".q.tmp",
            ".r.lowp-1-0.tmp",
            "q.lowp-1-0.tmp",
        ];
        for name in kept {
            fs::create_dir(dir.path().join(name))?;
        }
        // A file is not what a run leaves.
        fs::write(dir.path().join(".q.lowp-2-0.tmp"), "")?;
        let stale = dir.path().join(".q.lowp-1-0.tmp");
        fs::create_dir(&stale)?;
        fs::write(stale.join("file"), "half")?;
        let before = names(dir.path());
        drop(Temporary::beside(&dir.path().join("q"))?);
        let mut expected = before;
        expected.retain(|name| name != ".q.lowp-1-0.tmp");
        assert_eq!(names(dir.path()), expected);
        assert!(held.path().is_dir());
        Ok(())
    }

    #[test]
    fn names_as_long_as_a_file_system_allows() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        for name in [
            "n".repeat(255),
            "\u{e9}".repeat(127),
            format!("a{}", "\u{e9}".repeat(127)),
        ] {
            let made = Temporary::beside(&dir.path().join(&name))?;
            assert!(made.path().is_dir());
        }
        Ok(())
    }

    #[test]
    fn a_path_without_a_name_is_an_error() {
        assert!(Temporary::beside(Path::new("..")).is_err());
        assert!(Temporary::beside(Path::new("/")).is_err());
    }
}

//! [`Temporary`]: a hidden folder next to an output, which is written there and then renamed into place.
//!
//! It goes away with its value, when the process is asked to end, and, after a kill that no process can answer, on the
//! next run for the same output. Reasons: docs/decisions/0007-temporaries.md.

use crate::limits;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes of the output's name that its temporary repeats; file systems allow 255 in all.
const MAX_NAME: usize = 128;
/// Between the output's name and the number of the process.
const INFIX: &str = ".lowp-";
const SUFFIX: &str = ".tmp";

/// The temporaries of this process, each with the open folder that is locked: this tells other processes that it is in use.
/// Whoever creates or removes one holds this mutex, so that none appears while a signal is answered.
static LIVE: Mutex<BTreeMap<PathBuf, Option<File>>> = Mutex::new(BTreeMap::new());

/// Numbers of folders: no name is taken twice by one process, so that nobody removes what was made under it later.
static ATTEMPTS: AtomicU32 = AtomicU32::new(0);

fn live() -> MutexGuard<'static, BTreeMap<PathBuf, Option<File>>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A hidden folder that exists while this value does.
#[derive(Debug)]
pub(crate) struct Temporary {
    path: PathBuf,
}

impl Temporary {
    /// Makes a folder next to `output`, and removes those that killed processes left there.
    pub(crate) fn next_to(output: &Path) -> io::Result<Self> {
        let name = output
            .file_name()
            .ok_or_else(|| io::Error::other("it is no file name"))?;
        let prefix = prefix(&name.to_string_lossy());
        let folder = output.parent().unwrap_or(Path::new(""));
        sweep(folder, &prefix);
        loop {
            let process = std::process::id();
            let attempt = ATTEMPTS.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!("{prefix}{process}-{attempt}{SUFFIX}"));
            if let Some(made) = Self::at(path)? {
                return Ok(made);
            }
        }
    }

    /// Makes and locks the folder `path`; `None` where the name is taken, or another process took the folder for a leftover before it
    /// was locked.
    fn at(path: PathBuf) -> io::Result<Option<Self>> {
        let mut live = live();
        match fs::create_dir(&path) {
            Ok(()) => live.insert(path.clone(), None),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(error) => return Err(error),
        };
        drop(live);
        // What fails from here on takes the folder with it.
        let made = Self { path };
        give_owner(&made.path)?;
        let lock = match lock(&made.path) {
            Ok(Some(lock)) if is_at(&lock, &made.path) => Some(lock),
            Ok(None) if made.path.is_dir() => None,
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            // Another process locked it first, and removed it. What is there now is not ours.
            _ => {
                self::live().remove(&made.path);
                return Ok(None);
            }
        };
        self::live().insert(made.path.clone(), lock);
        Ok(Some(made))
    }

    /// Gives `draft`, which is this folder or a file in it, the name `path`. Once the process was asked to end it
    /// does not: this waits for that end, so that nothing is removed under its new name.
    pub(crate) fn publish(&self, draft: &Path, path: &Path) -> io::Result<()> {
        let mut live = live();
        fs::rename(draft, path).map_err(|error| match error.kind() {
            io::ErrorKind::DirectoryNotEmpty => io::Error::other(
                "another run wrote this folder meanwhile, which stays as it is; give another name or empty it",
            ),
            _ => error,
        })?;
        if draft == self.path {
            live.remove(&self.path);
        }
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let mut live = live();
        if let Some(lock) = live.remove(&self.path) {
            remove(&self.path, lock);
        }
    }
}

/// Removes every temporary of this process, and keeps new ones from being made until the returned value goes. For a program that a signal
/// is about to end.
pub fn remove_all() -> impl Sized {
    let mut live = live();
    live.iter_mut()
        .for_each(|(path, lock)| remove(path, lock.take()));
    live
}

/// Removes a folder of this process that another thread may still be writing to. Where descriptors are used up, that of the lock is the
/// one that it takes; what another process removes meanwhile need not be removed.
fn remove(path: &Path, lock: Option<File>) {
    // An empty folder takes none.
    if fs::remove_dir(path).is_err() {
        drop(lock);
        remove_filled(path);
    }
}

fn remove_filled(path: &Path) {
    for _ in 0..100 {
        match fs::remove_dir_all(path) {
            // A file was created in it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            // Another thread took the descriptor.
            Err(error) if limits::is_descriptors(&error) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            // Whatever else is wrong, the error that led here is the one worth reporting.
            _ => return,
        }
    }
}

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
        if ours && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            // Locked while it is removed: its owner may be about to lock it.
            if let Some(_lock) = abandoned(&entry.path()) {
                remove_filled(&entry.path());
            }
        }
    }
}

/// Whether [`Temporary::next_to`] makes such names: prefix, two numbers, suffix.
fn is_temporary(name: &str, prefix: &str) -> bool {
    let numbers = name
        .strip_prefix(prefix)
        .and_then(|rest| rest.strip_suffix(SUFFIX))
        .and_then(|rest| rest.split_once('-'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    numbers.is_some_and(|(process, attempt)| is_number(process) && is_number(attempt))
}

/// The folder with its lock, where that can be had, so that its process is gone. A process number alone would not tell: it may be of
/// another container or machine that shares the disk. Where the file system has no locks, nothing is abandoned.
fn abandoned(path: &Path) -> Option<File> {
    // Of Unix alone: elsewhere a folder cannot be opened.
    let folder = File::open(path).ok()?;
    folder.try_lock().ok()?;
    // Its owner may have given it its name meanwhile, and ended.
    is_at(&folder, path).then_some(folder)
}

fn lock(path: &Path) -> io::Result<Option<File>> {
    if !cfg!(unix) {
        return Ok(None);
    }
    let folder = File::open(path)?;
    loop {
        match folder.lock() {
            Ok(()) => return Ok(Some(folder)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Ok(None),
        }
    }
}

/// Whether `path` is the folder that is open as `folder`.
#[cfg(unix)]
fn is_at(folder: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |data: fs::Metadata| (data.dev(), data.ino());
    match (folder.metadata(), fs::symlink_metadata(path)) {
        (Ok(open), Ok(there)) => id(open) == id(there),
        _ => false,
    }
}

#[cfg(not(unix))]
fn is_at(_folder: &File, path: &Path) -> bool {
    path.is_dir()
}

/// Lets the owner of the folder use it, whatever the umask takes.
fn give_owner(path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // Whoever locks one that is not there finds out.
        let mode = fs::symlink_metadata(path).map_or(0o700, |data| data.permissions().mode());
        if mode & 0o700 != 0o700 {
            fs::set_permissions(path, fs::Permissions::from_mode(mode | 0o700))?;
        }
    }
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
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
        let made = Temporary::next_to(&dir.path().join("q"))?;
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
        let held = Temporary::next_to(&dir.path().join("q"))?;
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
        drop(Temporary::next_to(&dir.path().join("q"))?);
        let mut expected = before;
        expected.retain(|name| name != ".q.lowp-1-0.tmp");
        assert_eq!(names(dir.path()), expected);
        assert!(held.path().is_dir());
        Ok(())
    }

    /// What is left and what is in use stay apart while many threads make, sweep and remove folders of one output at a time.
    #[test]
    fn no_run_removes_what_another_one_has() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let output = dir.path().join("q");
        let run = || -> io::Result<()> {
            for _ in 0..200 {
                let made = Temporary::next_to(&output)?;
                fs::write(made.path().join("draft"), "whole")?;
                made.publish(&made.path().join("draft"), &output)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
            let ended = threads.into_iter().map(|thread| thread.join());
            ended
                .map(|ended| ended.expect("no panic"))
                .collect::<io::Result<Vec<()>>>()
        })?;
        assert_eq!(names(dir.path()), ["q"]);
        Ok(())
    }

    /// A folder that is locked by who removes it is not used, and another one is made.
    #[cfg(unix)]
    #[test]
    fn a_folder_that_goes_before_it_is_locked_is_made_again() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let stale = dir.path().join(".q.lowp-1-0.tmp");
        fs::create_dir(&stale)?;
        let sweeper = abandoned(&stale).expect("no process has it");
        // As its owner would between making and using it.
        let owner = std::thread::spawn({
            let stale = stale.clone();
            move || lock(&stale).map(|lock| lock.is_some_and(|lock| is_at(&lock, &stale)))
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        remove_filled(&stale);
        drop(sweeper);
        let ours = owner.join().expect("no panic");
        assert!(!ours.is_ok_and(|ours| ours));
        // One that got its name is not removed by who listed it before.
        fs::create_dir(&stale)?;
        let listed = File::open(&stale)?;
        fs::rename(&stale, dir.path().join("q"))?;
        assert!(!is_at(&listed, &stale));
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
            let made = Temporary::next_to(&dir.path().join(&name))?;
            assert!(made.path().is_dir());
        }
        Ok(())
    }

    #[test]
    fn a_path_without_a_name_is_an_error() {
        assert!(Temporary::next_to(Path::new("..")).is_err());
        assert!(Temporary::next_to(Path::new("/")).is_err());
    }
}

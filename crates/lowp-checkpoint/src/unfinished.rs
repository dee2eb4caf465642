//! The checkpoints that this process is writing or removing. A program can remove them before a signal ends it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::CheckpointError;
use crate::folder::remove;

/// Those of this process.
pub(crate) static UNFINISHED: Unfinished = Unfinished(Mutex::new(BTreeSet::new()));

/// The folders of such checkpoints. Whoever makes, publishes or renames one holds this mutex, so that none is removed under its final name.
#[derive(Debug)]
pub(crate) struct Unfinished(Mutex<BTreeSet<PathBuf>>);

impl Unfinished {
    fn all(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `folder`, for a checkpoint that is to be written.
    pub(crate) fn create(&self, folder: &Path) -> io::Result<()> {
        let mut all = self.all();
        fs::create_dir(folder)?;
        all.insert(folder.to_owned());
        Ok(())
    }

    /// Has `publish` give `folder` another name. Once [`remove_unfinished`] was called this waits for the end of the process.
    pub(crate) fn publish<E>(
        &self,
        folder: &Path,
        publish: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let mut all = self.all();
        publish()?;
        all.remove(folder);
        Ok(())
    }

    /// Leaves `folder` to the next run.
    pub(crate) fn leave(&self, folder: &Path) {
        self.all().remove(folder);
    }

    /// Gives the checkpoint `from`, which is to be removed, the name `to`.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut all = self.all();
        fs::rename(from, to)?;
        all.insert(to.to_owned());
        Ok(())
    }

    /// Removes `folder`. What cannot be removed is left to the next run.
    pub(crate) fn remove(&self, folder: &Path) -> Result<(), CheckpointError> {
        let removed = remove(folder);
        self.leave(folder);
        removed
    }

    /// Removes all of them, and keeps others from being begun or finished until the returned value is dropped.
    fn remove_all(&self) -> impl Sized {
        let all = self.all();
        all.iter().for_each(|folder| drop(remove(folder)));
        all
    }
}

/// Removes the checkpoints that this process is writing or removing, and keeps others from being begun or finished until the returned value is
/// dropped. For a program that a signal is about to end.
pub fn remove_unfinished() -> impl Sized {
    UNFINISHED.remove_all()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// A set of its own, in a folder with the checkpoints `names`, each of one file.
    fn begun(names: &[&str]) -> (tempfile::TempDir, Unfinished, Vec<PathBuf>) {
        let folder = tempfile::tempdir().expect("a folder");
        let unfinished = Unfinished(Mutex::default());
        let paths: Vec<PathBuf> = names.iter().map(|name| folder.path().join(name)).collect();
        for path in &paths {
            unfinished.create(path).expect("a folder");
            fs::write(path.join("rank-00000.safetensors"), "").expect("a file");
        }
        (folder, unfinished, paths)
    }

    #[test]
    fn only_what_is_unfinished_is_removed() {
        let (folder, unfinished, paths) = begun(&["written", "published", "refused", "left"]);
        let [written, published, refused, left] = &paths[..] else {
            panic!("four folders")
        };
        let (last, hidden) = (folder.path().join("last"), folder.path().join("hidden"));
        unfinished
            .publish(published, || fs::rename(published, &last))
            .expect("another name");
        assert_eq!(unfinished.publish(refused, || Err(1)), Err(1));
        unfinished.leave(left);
        // An older checkpoint, which is being removed.
        let old = folder.path().join("old");
        fs::create_dir(&old).expect("a folder");
        unfinished.rename(&old, &hidden).expect("another name");
        let all = || -> Vec<PathBuf> { unfinished.all().iter().cloned().collect() };
        assert_eq!(all(), [&hidden, refused, written].map(Clone::clone));
        drop(unfinished.remove_all());
        for (path, stays) in [
            (written, false),
            (refused, false),
            (&hidden, false),
            (left, true),
            (&last, true),
        ] {
            assert_eq!(path.exists(), stays, "{}", path.display());
        }
    }

    /// Somebody else may have removed one, and a signal may come twice.
    #[test]
    fn what_is_gone_is_no_hindrance() {
        let (_folder, unfinished, paths) = begun(&["a", "b", "c"]);
        fs::remove_dir_all(&paths[0]).expect("a folder");
        for _ in 0..2 {
            assert!(unfinished.remove(&paths[1]).is_ok());
        }
        assert!(!paths[1].exists() && paths[2].exists());
        for _ in 0..2 {
            drop(unfinished.remove_all());
            assert!(!paths[2].exists());
        }
        // A folder that cannot be made or renamed is not among them.
        let below = paths[0].join("below");
        assert!(unfinished.create(&below).is_err());
        assert!(unfinished.rename(&below, &paths[1]).is_err());
        let all = unfinished.all();
        assert!(!all.contains(&below) && !all.contains(&paths[1]));
    }

    /// Nothing is begun or published between the removal and the end of the process.
    #[test]
    fn a_removal_keeps_others_from_beginning() {
        let (folder, unfinished, _) = begun(&["a"]);
        let later = folder.path().join("later");
        let (made, is_made) = mpsc::channel();
        thread::scope(|scope| {
            let no_others = unfinished.remove_all();
            scope.spawn(|| {
                let created = unfinished.create(&later);
                made.send(created.is_ok())
            });
            let early = is_made.recv_timeout(Duration::from_millis(50));
            assert!(early.is_err() && !later.exists());
            drop(no_others);
            assert!(is_made.recv().expect("an end"));
        });
    }
}

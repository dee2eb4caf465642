//! The checkpoints that this process is writing or removing. A program can remove them before a signal ends it.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Their folders. Whoever makes, publishes or renames one holds this mutex, so that none is removed under its final name.
static IN_FLIGHT: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn all() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    IN_FLIGHT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes `folder`, for an unfinished checkpoint.
pub(crate) fn create(folder: &Path) -> io::Result<()> {
    let mut all = all();
    fs::create_dir(folder)?;
    all.insert(folder.to_owned());
    Ok(())
}

/// Has `publish` give `folder` another name. Once [`remove_unfinished`] was called this waits for the end of the process.
pub(crate) fn publish<E>(folder: &Path, publish: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    let mut all = all();
    publish()?;
    all.remove(folder);
    Ok(())
}

/// Leaves `folder` to the next run.
pub(crate) fn leave(folder: &Path) {
    all().remove(folder);
}

/// Gives the checkpoint `from`, which is to be removed, the name `to`.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    let mut all = all();
    fs::rename(from, to)?;
    all.insert(to.to_owned());
    Ok(())
}

/// Removes `folder`. What cannot be removed is left to the next run.
pub(crate) fn remove(folder: &Path) {
    remove_folder(folder);
    leave(folder);
}

/// Removes the checkpoints that this process is writing or removing, and keeps others from being begun or finished until the returned value is
/// dropped. For a program that a signal is about to end.
pub fn remove_unfinished() -> impl Sized {
    let all = all();
    all.iter().for_each(|folder| remove_folder(folder));
    all
}

/// A rank may create its file meanwhile: then the folder is not empty, and is removed again.
fn remove_folder(folder: &Path) {
    for _ in 0..100 {
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
            _ => return,
        }
    }
}

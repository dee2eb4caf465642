//! Output paths: known to be writable before work begins, and whole or absent after it.

use super::refuse::refuse;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// A file that will appear under its name when it is complete.
#[derive(Debug)]
pub(super) struct FileTarget {
    path: PathBuf,
    temporary: PathBuf,
}

impl FileTarget {
    /// Takes `path` as the output of a command that reads `inputs`.
    ///
    /// # Errors
    /// It cannot be written, or it is an input.
    pub(super) fn new<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        let refused = |why: &dyn std::fmt::Display| {
            refuse(format!("-o: cannot write {}: {why}", path.display()))
        };
        let file = resolve(path).map_err(|e| refused(&e))?;
        if inputs
            .into_iter()
            .any(|input| fs::canonicalize(input).is_ok_and(|input| input == file))
        {
            return Err(refused(&"it is the input; give another name"));
        }
        if fs::metadata(&file).is_ok_and(|data| !data.is_file()) {
            return Err(refused(
                &"it exists and is no regular file; give another name",
            ));
        }
        let temporary = beside(&file).ok_or_else(|| refused(&"it is no file name"))?;
        File::create(&temporary)
            .and_then(|_| fs::remove_file(&temporary))
            .map_err(|e| refused(&e))?;
        Ok(Self {
            path: file,
            temporary,
        })
    }

    /// Lets `write` fill a file under a temporary name, then gives it its own.
    ///
    /// # Errors
    /// Whatever `write` returns, or the system refuses; nothing is left behind then.
    pub(super) fn fill(self, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let Self { path, temporary } = self;
        let filled = fill_file(&temporary, write).and_then(|()| {
            fs::rename(&temporary, &path)
                .and_then(|()| sync_folder(&path))
                .with_context(|| format!("cannot write {}", path.display()))
        });
        if filled.is_err() {
            // The first error is the one worth reporting.
            let _ = fs::remove_file(&temporary);
        }
        filled
    }
}

/// A folder that will appear under its name when all of its files are complete.
#[derive(Debug)]
pub(super) struct FolderTarget {
    path: PathBuf,
    temporary: PathBuf,
}

impl FolderTarget {
    /// Takes `path`, which must be absent or an empty folder.
    ///
    /// # Errors
    /// It cannot be written, or holds something.
    pub(super) fn new(path: &Path) -> Result<Self> {
        let refused = |why: &dyn std::fmt::Display| {
            refuse(format!("-o: cannot write {}: {why}", path.display()))
        };
        let folder = resolve(path).map_err(|e| refused(&e))?;
        match fs::read_dir(&folder).map(|entries| entries.count()) {
            Ok(0) => {}
            Ok(_) => {
                return Err(refused(
                    &"the folder is not empty; give another name or empty it",
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(refused(&error)),
        }
        let temporary = beside(&folder).ok_or_else(|| refused(&"it is no folder name"))?;
        fs::create_dir(&temporary)
            .and_then(|()| fs::remove_dir(&temporary))
            .map_err(|e| refused(&e))?;
        Ok(Self {
            path: folder,
            temporary,
        })
    }

    /// Lets `write` fill a folder under a temporary name, then gives it its own.
    ///
    /// # Errors
    /// Whatever `write` returns, or the system refuses; nothing is left behind then.
    pub(super) fn fill(self, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let Self { path, temporary } = self;
        let cannot = || format!("cannot write {}", path.display());
        let filled = fs::create_dir(&temporary)
            .with_context(cannot)
            .and_then(|()| write(&temporary))
            .and_then(|()| {
                sync_folder(&temporary.join("file"))
                    .and_then(|()| fs::rename(&temporary, &path))
                    .and_then(|()| sync_folder(&path))
                    .with_context(cannot)
            });
        if filled.is_err() {
            let _ = fs::remove_dir_all(&temporary);
        }
        filled
    }
}

/// Creates the file at `path`, lets `write` replace it, and makes sure that it is on the disk.
///
/// # Errors
/// Whatever `write` returns, or the system refuses.
pub(super) fn fill_file(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    // A file made the plain way has the permissions that the user wants for new files.
    let permissions = File::create(path)
        .and_then(|file| file.metadata())
        .with_context(cannot)?
        .permissions();
    write(path)?;
    let file = File::open(path).with_context(cannot)?;
    file.set_permissions(permissions)
        .and_then(|()| file.sync_all())
        .with_context(cannot)
}

/// The path behind links; its parent must exist.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let name = path
                .file_name()
                .ok_or_else(|| io::Error::other("it is no file name"))?;
            let parent = path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty());
            Ok(fs::canonicalize(parent.unwrap_or(Path::new(".")))?.join(name))
        }
        other => other,
    }
}

/// A hidden name in the same folder.
fn beside(path: &Path) -> Option<PathBuf> {
    let mut name = OsString::from(".");
    name.push(path.file_name()?);
    name.push(format!(".{}.tmp", std::process::id()));
    Some(path.with_file_name(name))
}

/// Makes the names in the folder of `path` durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if cfg!(unix) => File::open(parent)?.sync_all(),
        _ => Ok(()),
    }
}

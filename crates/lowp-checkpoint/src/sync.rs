//! Names that a power loss leaves.

use std::fs::File;
use std::io::{ErrorKind, Result};
use std::path::Path;

/// Waits until the names in `folder` are on the disk.
///
/// # Errors
/// The folder cannot be opened, or the disk fails. A file system that cannot sync a folder, as some of networks, is no error.
pub fn sync_folder(folder: &Path) -> Result<()> {
    // Elsewhere a folder cannot be opened.
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(folder)?.sync_all() {
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
        done => done,
    }
}

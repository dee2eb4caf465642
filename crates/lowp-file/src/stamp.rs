//! [`Stamp`]: what tells that a file was written to while it was read.

use crate::error::FileError;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::SystemTime;

/// The length of an open file and when it was written to last. A file that takes its name is another one, and changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) length: u64,
    /// `None` where the file system does not tell.
    modified: Option<SystemTime>,
}

impl Stamp {
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let data = file.metadata()?;
        Ok(Self {
            length: data.len(),
            modified: data.modified().ok(),
        })
    }
}

/// The error of an input whose bytes are those before and those after a change.
pub(crate) fn changed(path: &Path) -> FileError {
    FileError::in_file(
        path,
        "it was changed while it was read; wait until no program writes the file, and run the command again",
    )
}

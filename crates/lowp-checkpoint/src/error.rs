//! [`CheckpointError`]: what is wrong with a checkpoint, with the file and the remedy.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use lowp_comm::CommError;
use thiserror::Error;

use crate::Block;

/// What is wrong.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// Ranks failed, or differ in what they save.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A file or folder cannot be read or written.
    #[error("{}: cannot {what}: {why}{}", .path.display(), remedy(.why))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Why not.
        why: io::Error,
    },
    /// A file for which there is no room, or that cannot be written for another reason.
    #[error(
        "{}: cannot write the file: {why}; {there} of its {bytes} bytes were written{}", .path.display(), remedy(.why)
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// Bytes that it was to have.
        bytes: u64,
        /// Bytes that it got.
        there: u64,
        /// Why not all.
        why: io::Error,
    },
    /// A text of a checkpoint that would be too long to be read again.
    #[error(
        "{}: {what} of {pieces} pieces of tensors would have {bytes} bytes, and at most {most} can be read; save \
         fewer tensors, or put some together", .path.display()
    )]
    TooLong {
        /// The file.
        path: PathBuf,
        /// What of it.
        what: &'static str,
        /// Pieces that it tells of.
        pieces: usize,
        /// Its bytes.
        bytes: u64,
        /// Most bytes that are read.
        most: u64,
    },
    /// A rank could not write its part.
    #[error(
        "the checkpoint of step {step} was not saved: rank {rank}: {why}; earlier checkpoints are unchanged"
    )]
    NotSaved {
        /// The step.
        step: u64,
        /// The rank.
        rank: usize,
        /// Its error.
        why: String,
    },
    /// A checkpoint that is saved, and may be lost with the power.
    #[error(
        "the checkpoint of step {step} was saved and is the latest, but a power loss may destroy it: {why}; earlier checkpoints are unchanged"
    )]
    NotOnDisk {
        /// The step.
        step: u64,
        /// What cannot be brought to the disk.
        why: String,
    },
    /// Pieces or notes that no checkpoint can have, or a block that no tensor has.
    #[error("{0}")]
    Invalid(String),
    /// The bytes of a piece did not arrive from the device.
    #[error("'{name}' cannot be read: {why}")]
    NoBytes {
        /// The tensor.
        name: String,
        /// Why not.
        why: String,
    },
    /// A checkpoint of another version, or of another model than the one that reads it.
    #[error("{}: {why}", .path.display())]
    Other {
        /// The checkpoint.
        path: PathBuf,
        /// What is different.
        why: String,
    },
    /// Another rank failed before anything was saved.
    #[error("rank {rank}: {why}")]
    OtherRank {
        /// The rank.
        rank: usize,
        /// Its error.
        why: String,
    },
    /// Another run writes to the folder.
    #[error("{}: another run writes to this folder; wait until it ends, or give another folder", .folder.display())]
    InUse {
        /// The folder.
        folder: PathBuf,
    },
    /// No checkpoint where one is looked for.
    #[error("{}: {why}; give a folder to which training saved, or a folder step-N in it", .path.display())]
    NoCheckpoint {
        /// The folder.
        path: PathBuf,
        /// What is missing.
        why: String,
    },
    /// A file does not hold what the index says.
    #[error("{}: {why}; the checkpoint is damaged, or its files are from several checkpoints: use another one", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The next save begins while one is on its way.
    #[error(
        "the checkpoint of step {step} is still being written; call `poll` until it is done, or `finish`"
    )]
    Unfinished {
        /// The step.
        step: u64,
    },
}

impl CheckpointError {
    /// Names what was tried with `path`.
    pub(crate) fn io(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |why| Self::Io { path, what, why }
    }

    /// Says how much of the `bytes` bytes of the file `path` are there.
    pub(crate) fn write(path: &Path, bytes: u64) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |why| {
            let there = fs::metadata(&path).map_or(0, |found| found.len());
            Self::Write {
                path,
                bytes,
                there,
                why,
            }
        }
    }

    pub(crate) fn no_block(name: &str, full: [usize; 2], block: Block) -> Self {
        Self::Invalid(format!(
            "tensor '{name}' of shape {full:?} has no block {block:?}"
        ))
    }

    /// Whether a checkpoint is not whole, and not that it is of another version or cannot be read now.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } | Self::NoCheckpoint { .. } => true,
            Self::Io { why, .. } => why.kind() == ErrorKind::NotFound,
            _ => false,
        }
    }

    pub(crate) fn other(path: &Path, why: String) -> Self {
        let path = path.to_owned();
        Self::Other { path, why }
    }

    /// A file that is not what the index says.
    pub(crate) fn damaged(path: &Path, why: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            why: why.into(),
        }
    }
}

fn remedy(why: &io::Error) -> &'static str {
    match why.kind() {
        ErrorKind::FileTooLarge => {
            "; allow larger files (ulimit -f), or save to another file system"
        }
        ErrorKind::StorageFull => "; make room there, keep fewer checkpoints, or save elsewhere",
        ErrorKind::QuotaExceeded => {
            "; make room within the quota, keep fewer checkpoints, or save elsewhere"
        }
        ErrorKind::PermissionDenied => "; change its permissions, or give another folder",
        ErrorKind::ReadOnlyFilesystem => "; give a folder of another file system",
        _ => "",
    }
}

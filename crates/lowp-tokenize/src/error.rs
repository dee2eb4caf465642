//! [`TokenizeError`]: what can be wrong with texts and their tokenizer.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use lowp_train::TrainError;
use thiserror::Error;

/// What is wrong.
#[derive(Debug, Error)]
pub enum TokenizeError {
    /// A file that cannot be read.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A line that is no document.
    #[error("{}, line {line}: {why}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Its number, from 1.
        line: u64,
        /// Why.
        why: String,
    },
    /// The tokens cannot be written.
    #[error(transparent)]
    Write(#[from] TrainError),
}

impl TokenizeError {
    pub(crate) fn file(path: &Path, why: impl Display) -> Self {
        Self::File {
            path: path.to_owned(),
            why: why.to_string(),
        }
    }
}

//! Errors of the input: exit code 2, nothing written.

use crate::usage::UsageError;
use std::fmt::Display;
use std::path::Path;

/// An input that cannot be taken; the message says what is wrong and how to mend it.
pub(super) fn input_error(message: impl Into<String>) -> anyhow::Error {
    UsageError::new(message).into()
}

/// The same, with the file that is to blame in front.
pub(super) fn file_error(path: &Path, why: impl Display) -> anyhow::Error {
    input_error(format!("{}: {why}", path.display()))
}

/// The error of an output that cannot be.
pub(super) fn output_error(path: &Path, why: impl Display) -> anyhow::Error {
    input_error(format!("-o: cannot write {}: {why}", path.display()))
}

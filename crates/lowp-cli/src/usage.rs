//! Errors of the command line, told apart from failures of the work by exit code 2.

use std::fmt;

/// Arguments that parse but cannot work: found before any work begins.
#[derive(Debug)]
pub(crate) struct UsageError(String);

impl UsageError {
    /// An error whose message says what is wrong and what would be right.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

impl From<lowp_format::FormatError> for UsageError {
    fn from(error: lowp_format::FormatError) -> Self {
        Self(error.to_string())
    }
}

/// 2 for bad arguments, as clap does, 1 for everything else.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<UsageError>() { 2 } else { 1 }
}

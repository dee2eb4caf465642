//! [`FileError`]: what can be wrong with a file, an argument or the work.

pub use crate::remedy::Remedy;
use crate::text::shown;
use lowp_comm::CommError;
use lowp_format::FormatError;
use lowp_kernels::KernelError;
use lowp_shard::ShardError;
use std::error::Error as _;
use std::fmt::Display;
use std::io;
use std::path::Path;
use thiserror::Error;

/// What this crate returns.
pub type Result<T, E = FileError> = std::result::Result<T, E>;

/// What is wrong with a [`Setup`](crate::Setup).
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum SetupError {
    /// A delayed scale for a recipe that has none.
    #[error("{recipe} has no delayed scale; leave it out, or choose a recipe with delayed scaling")]
    NoDelayedScale {
        /// The recipe.
        recipe: &'static str,
    },
    /// A delayed scale that values cannot be encoded and decoded with.
    #[error("{scale:e} is not a valid scale; give a positive finite number from 3e-39 to 3.4e38")]
    NotAScale {
        /// The number.
        scale: f32,
    },
}

/// What is wrong. Messages name the file and the tensor, and say what would be right.
#[derive(Debug, Error)]
pub enum FileError {
    /// An input or an argument that cannot be taken. Nothing was written.
    #[error("{0}")]
    Input(String),
    /// An input that cannot be taken, and what to do about it. Nothing was written.
    #[error("{what}; {remedy}")]
    Mend {
        /// What is wrong.
        what: String,
        /// What to do.
        remedy: Remedy,
    },
    /// A setup that no cast has. Nothing was written.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// An output that cannot be written at that path. Nothing was written.
    #[error("{0}")]
    Output(String),
    /// Two models are not the same; the message names the first difference.
    #[error("{0}")]
    Differ(String),
    /// Work on something with a name failed.
    #[error("{what}: {}", whole(.why))]
    In {
        /// The tensor, or what was tried.
        what: String,
        /// Why it failed.
        why: Box<FileError>,
    },
    /// The system refused to read or write.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A text that is no JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A shape or a recipe that does not fit.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The backend failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Ranks failed.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// Something is missing that was there before: a defect of this crate, or of another implementation of its traits.
    #[error("{0}")]
    Missing(String),
}

impl From<CommError> for FileError {
    fn from(error: CommError) -> Self {
        ShardError::from(error).into()
    }
}

impl FileError {
    /// An input that cannot be taken, with the file that is to blame in front.
    pub(crate) fn in_file(path: &Path, why: impl Display) -> Self {
        input_error(format!("{}: {why}", path.display()))
    }

    /// Whether the input, an argument or the output path is to blame, and nothing was written; otherwise the work failed.
    pub fn is_input(&self) -> bool {
        match self {
            Self::Input(_) | Self::Mend { .. } | Self::Setup(_) | Self::Output(_) => true,
            Self::In { why, .. } => why.is_input(),
            _ => false,
        }
    }
}

/// An error with all that caused it.
fn whole(error: &FileError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// An input that cannot be taken; the message says what is wrong and how to mend it.
pub(crate) fn input_error(message: impl Into<String>) -> FileError {
    FileError::Input(message.into())
}

/// A tensor that cannot be taken.
pub(crate) fn of_tensor(name: &str, why: impl Display) -> FileError {
    input_error(format!("'{}': {why}", shown(name)))
}

/// [`FileError::in_file`] of what `format!` would make of the arguments after the path.
macro_rules! file_error {
    ($path:expr, $($message:tt)+) => {
        $crate::error::FileError::in_file($path, format_args!($($message)+))
    };
}
pub(crate) use file_error;

/// An input that cannot be taken, and what to do about it.
pub(crate) fn mend(what: impl Into<String>, remedy: Remedy) -> FileError {
    let what = what.into();
    FileError::Mend { what, remedy }
}

/// The same, with the file that is to blame in front.
pub(crate) fn mend_file(path: &Path, what: impl Display, remedy: Remedy) -> FileError {
    mend(format!("{}: {what}", path.display()), remedy)
}

/// Says what was tried when something failed, or what is missing.
pub(crate) trait Context<T> {
    fn context(self, what: impl Into<String>) -> Result<T>
    where
        Self: Sized,
    {
        self.with_context(|| what)
    }

    fn with_context<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T>;
}

impl<T, E: Into<FileError>> Context<T> for Result<T, E> {
    fn with_context<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|why| FileError::In {
            what: what().into(),
            why: Box::new(why.into()),
        })
    }
}

impl<T> Context<T> for Option<T> {
    fn with_context<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.ok_or_else(|| FileError::Missing(what().into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_says_what_was_tried_and_all_causes() {
        let failed: Result<(), _> = Err(input_error("it is empty"));
        let error = failed.context("'w'").context("cannot write q").unwrap_err();
        assert_eq!(error.to_string(), "cannot write q: 'w': it is empty");
        assert!(error.is_input() && error.source().is_none());
        let error = Err::<(), _>(io::Error::other("full"))
            .context("'w'")
            .unwrap_err();
        assert_eq!(error.to_string(), "'w': full");
        assert!(!error.is_input());
    }
}

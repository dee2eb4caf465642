//! Errors of the command line: exit code 2 distinguishes them from failures of the work.

use crate::output;
use lowp_file::FileError;
use lowp_file::patterns::PatternError;
use std::fmt;
use std::io::{ErrorKind, Write, stdout};
use std::process::ExitCode;

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

/// An error of the command line or an input; the message says what is wrong and how to mend it.
pub(crate) fn input_error(message: impl Into<String>) -> anyhow::Error {
    UsageError::new(message).into()
}

/// The option that says which tensors share one amax.
pub(crate) const AMAX_GROUP: &str = "--amax-group";

/// The error of patterns that `option` gave.
pub(crate) fn of_patterns(option: &str) -> impl Fn(PatternError) -> UsageError {
    move |error| {
        UsageError::new(match error {
            PatternError::Syntax(why) => format!("{option}: {why}"),
            error => format!("{option} {error}"),
        })
    }
}

/// 2 for bad arguments, as clap does, 1 for everything else.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    let of_input = error.downcast_ref().is_some_and(FileError::is_input);
    if error.is::<UsageError>() || of_input {
        2
    } else {
        1
    }
}

/// Prints what clap has to say, help and version included, and returns its exit code.
pub(crate) fn explain(error: &clap::Error) -> ExitCode {
    let plain = error.to_string();
    let (lines, first) = (
        plain.lines().skip(1),
        plain.lines().next().unwrap_or_default(),
    );
    if error.use_stderr() && output::message(first) != first {
        // The message repeats an argument that is long, or that commands a terminal.
        output::note(first);
        lines.for_each(output::note);
    } else {
        // In color where there is a terminal.
        let printed = error.print().and_then(|()| stdout().flush());
        if let (Err(failed), false) = (printed, error.use_stderr())
            && failed.kind() != ErrorKind::BrokenPipe
        {
            output::note(&format!("error: cannot write to standard output: {failed}"));
            return ExitCode::FAILURE;
        }
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

//! Text on standard output. A reader that stops early, such as `head`, is no failure.

use anyhow::{Context, Result};
use std::io::{ErrorKind, Write, stdout};

/// Prints `text` as it is.
///
/// # Errors
/// If standard output cannot be written for another reason than that its reader is gone.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

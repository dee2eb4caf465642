//! Text for people: on standard output and standard error.
//!
//! A reader that stops early, such as `head`, is no failure; neither is a standard error that cannot be written.

use anyhow::{Context, Result};
use serde::Serialize;
use std::io::{ErrorKind, Write, stderr, stdout};

pub(crate) use lowp_file::text::{message, reason, shown};

pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

/// `value` as a document of JSON. Numbers that are not finite have no form there and become null.
pub(crate) fn json(value: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// Writes one line to standard error. Where that is closed or full there is nobody to tell, and the work goes on.
pub(crate) fn note(line: &str) {
    // One write, so that lines of several processes do not mix.
    let _ = stderr().write_all(format!("{}\n", message(line)).as_bytes());
}

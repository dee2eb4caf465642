//! Text for people. A reader that stops early, such as `head`, is no failure.

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

/// `text` with its control characters spelled out: names in a file are somebody else's, and must neither end a line nor
/// command a terminal.
pub(crate) fn harmless(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::harmless;

    #[test]
    fn control_characters_are_spelled_out() {
        assert_eq!(harmless("a/\u{fc} '\"\\"), "a/\u{fc} '\"\\");
        assert_eq!(harmless("\n\u{1b}[2J\u{9b}"), "\\n\\u{1b}[2J\\u{9b}");
    }
}

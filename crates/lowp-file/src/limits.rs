//! What can be done where the system refuses something for a limit.

use std::fs::File;
use std::io::{self, ErrorKind};

/// Whether no more files can be open at a time, in this process or in the system.
#[cfg(unix)]
pub(crate) fn is_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

#[cfg(not(unix))]
pub(crate) fn is_descriptors(_error: &io::Error) -> bool {
    false
}

/// `error` with the remedy where files are open as many as may be: each rank of a world has its own.
pub(crate) fn hinted(error: io::Error) -> io::Error {
    match is_descriptors(&error) {
        true => io::Error::other(format!("{error}; allow more of them (ulimit -n)")),
        false => error,
    }
}

/// `error` of a write to `file`, with the bytes that are there and the remedy where there is no room for more.
pub(crate) fn no_room(error: io::Error, file: &File) -> io::Error {
    let bytes = file.metadata().map_or(0, |file| file.len());
    remedied(error, &format!(", with {bytes} bytes of it there"))
}

/// `error` of a write, whose text says how to make room where there is none.
pub fn with_remedy(error: io::Error) -> io::Error {
    remedied(error, "")
}

/// `error`, `more` of what is known of it, and the remedy.
fn remedied(error: io::Error, more: &str) -> io::Error {
    let remedy = match error.kind() {
        ErrorKind::FileTooLarge => {
            "allow larger files (ulimit -f), or write to another file system"
        }
        ErrorKind::StorageFull => "make room there, or write elsewhere",
        ErrorKind::QuotaExceeded => "make room within the quota, or write elsewhere",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}{more}; {remedy}"))
}

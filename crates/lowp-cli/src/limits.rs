//! What can be done where the system refuses something for a limit.

use std::io;

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

/// The error of threads that the system does not start.
pub(crate) fn no_thread(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!(
            "{what} could not be started: {error}; raise the limit of processes (ulimit -u), or end others"
        ),
    )
}

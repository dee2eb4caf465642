//! [`Progress`]: how far the work is, for whoever shows it.

use std::fmt;

/// Takes the progress of work. It is counted in bytes that are read to be cast and bytes that are written, so that a pass which writes
/// little does not look like one that takes weeks. `()` shows nothing.
pub trait Progress: fmt::Debug + Sync {
    /// Work of `bytes` bytes begins.
    fn begin(&self, bytes: usize);

    /// `bytes` more are done. Threads call it at the same time.
    fn add(&self, bytes: usize);
}

impl Progress for () {
    fn begin(&self, _: usize) {}

    fn add(&self, _: usize) {}
}

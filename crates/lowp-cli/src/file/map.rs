//! Read-only memory maps of parts of input files.

use memmap2::{Mmap, MmapOptions};
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};

/// Bytes of a file, mapped while this value lives.
#[derive(Debug)]
pub(super) struct Bytes(Option<Mmap>);

impl Bytes {
    /// Maps `place` of `file` for reading.
    ///
    /// # Errors
    /// The system cannot map it.
    pub(super) fn map(file: &File, place: &Range<usize>) -> io::Result<Self> {
        // An empty range cannot be mapped, and needs no map.
        if place.is_empty() {
            return Ok(Self(None));
        }
        let mut options = MmapOptions::new();
        options.offset(place.start as u64).len(place.len());
        // SAFETY: the map is read-only and only handed out as shared slices. It would show changes that another process
        // makes to the file in place meanwhile; docs/decisions/0005-files.md asks that inputs stay as they are while a
        // command runs. Programs that replace model files by renaming, as this one does, comply.
        let map = unsafe { options.map(file) }?;
        Ok(Self(Some(map)))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

//! Bytes of parts of input files: memory maps of long parts, copies of short ones.

#![expect(unsafe_code, reason = "maps input files")]

use crate::process;
use lowp_kernels::{CpuBuffer, Element};
use memmap2::{Mmap, MmapOptions};
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};

/// Parts up to this many bytes are copied: a map of each of 100,000 small tensors takes longer than all else.
const COPIED: usize = 64 << 10;

/// Bytes of a file, in memory while this value lives.
#[derive(Debug)]
pub(crate) enum Bytes {
    Copied(Vec<u8>),
    Mapped(Mmap),
}

impl Bytes {
    pub(crate) fn of(file: &File, range: &Range<usize>) -> io::Result<Self> {
        // An empty range cannot be mapped, and needs no map.
        if range.is_empty() {
            return Ok(Self::Copied(Vec::new()));
        }
        #[cfg(unix)]
        if range.len() <= COPIED {
            use std::os::unix::fs::FileExt;
            let mut bytes = vec![0; range.len()];
            file.read_exact_at(&mut bytes, range.start as u64)?;
            return Ok(Self::Copied(bytes));
        }
        (process::hooks().before_map)();
        let mut options = MmapOptions::new();
        options.offset(range.start as u64).len(range.len());
        // SAFETY: the map is read-only and only handed out as shared slices. It would show changes that another process
        // makes to the file in place meanwhile; docs/decisions/0005-files.md asks that inputs stay as they are while a
        // command runs, which then fails (`stamp`, [`crate::process::Hooks::before_map`]). Programs that replace model files by renaming, as this one does,
        // comply.
        let map = unsafe { options.map(file) }?;
        Ok(Self::Mapped(map))
    }
}

/// The values of `range` of `file` where they lie, for kernels of the CPU: every thread brings pages into the map as it comes to them, and no
/// byte is copied. `None` where they are few, not aligned, not in the order of this machine, or cannot be mapped; they can be read then.
pub(crate) fn values<T: Element>(file: &File, range: &Range<usize>) -> Option<CpuBuffer<T>> {
    let size = size_of::<T>();
    let whole = range.start.is_multiple_of(size) && range.len().is_multiple_of(size);
    if range.len() <= COPIED || !whole || cfg!(target_endian = "big") {
        return None;
    }
    (process::hooks().before_map)();
    let mut options = MmapOptions::new();
    options.offset(range.start as u64).len(range.len());
    // Nobody writes, so that no memory is set aside for it.
    options.no_reserve_swap();
    // SAFETY: a private map, whose writes, of which there are none, would stay with it. That the file stays as it is
    // while a command runs is asked for, as above.
    let mut map = unsafe { options.map_copy(file) }.ok()?;
    #[cfg(unix)]
    // What the system makes of the advice does not matter.
    drop(map.advise(memmap2::Advice::WillNeed));
    let (pointer, len) = (map.as_mut_ptr().cast::<T>(), range.len() / size);
    // SAFETY: the map is `len` values long, valid for reads and writes, and the buffer owns it. Any bytes are values of
    // an element. Nobody else has the map.
    unsafe { CpuBuffer::from_raw(pointer, len, map) }.ok()
}

/// Reads parts of a file one after the other into one buffer, whose pages the system gives once and not for every part.
#[derive(Debug)]
pub(crate) struct Reader<'f> {
    file: &'f File,
    buffer: Vec<u8>,
}

impl<'f> Reader<'f> {
    pub(crate) fn new(file: &'f File) -> Self {
        Self {
            file,
            buffer: Vec::new(),
        }
    }

    #[cfg(unix)]
    pub(crate) fn bytes(&mut self, range: &Range<usize>) -> io::Result<&[u8]> {
        use std::os::unix::fs::FileExt;
        if self.buffer.len() < range.len() {
            self.buffer.resize(range.len(), 0);
        }
        let buffer = &mut self.buffer[..range.len()];
        self.file.read_exact_at(buffer, range.start as u64)?;
        Ok(buffer)
    }

    #[cfg(not(unix))]
    pub(crate) fn bytes(&mut self, range: &Range<usize>) -> io::Result<&[u8]> {
        self.buffer = Bytes::of(self.file, range)?.to_vec();
        Ok(&self.buffer)
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Copied(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

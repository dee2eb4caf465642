//! [`Out`]: f32 that kernels write once, past the caches where they are more than those hold.
//!
//! An ordinary store reads its cache line first, so that writing costs twice its bytes.

#![expect(
    unsafe_code,
    reason = "stores past the caches, fenced before anybody reads"
)]

use super::{LANES, Lanes, Line};

/// What kernels write to.
pub(crate) struct Out<'a>(&'a mut [f32]);

impl<'a> Out<'a> {
    /// Lends `values` to kernels that write all of them.
    pub(crate) fn new(values: &'a mut [f32]) -> Self {
        Self(values)
    }

    /// Writes `x` from index `at` on; with `STREAM`, past the caches if it fills a line of them.
    #[inline(always)]
    pub(crate) fn put<const STREAM: bool, L: Lanes>(&mut self, lanes: L, at: usize, x: L::F) {
        let (line, _) = self.0[at..].split_at_mut(LANES);
        let Some(line) = line.first_chunk_mut::<LANES>() else {
            return;
        };
        if STREAM && line.as_ptr().addr().is_multiple_of(size_of::<Line>()) {
            // SAFETY: the line is aligned, and borrowed until `self` is dropped, which fences.
            unsafe { lanes.stream(x, line) };
        } else {
            lanes.store(x, line);
        }
    }

    /// Writes the first `len` lanes of `x` from index `at` on.
    #[inline(always)]
    pub(crate) fn put_some<L: Lanes>(&mut self, lanes: L, at: usize, len: usize, x: L::F) {
        let mut line = [0.0; LANES];
        lanes.store(x, &mut line);
        self.0[at..at + len].copy_from_slice(&line[..len]);
    }
}

impl Drop for Out<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: every x86-64 processor has the instruction.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

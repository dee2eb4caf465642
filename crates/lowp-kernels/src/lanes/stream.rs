//! [`Out`]: values that kernels write once, past the caches where they are more than those hold.
//!
//! An ordinary store reads its cache line first, so that writing costs twice its bytes.

#![expect(
    unsafe_code,
    reason = "stores past the caches, fenced before anybody reads"
)]

use half::bf16;

use super::{LANES, Lanes, Line};
use crate::rounding::bf16_bits;

/// How a dtype stores vectors of f32.
pub(crate) trait Stored: Copy + Default + Send + Sync {
    /// Whether a vector fills a line of the caches.
    const STREAMS: bool = false;
    /// Stores `x`; with `STREAM`, past the caches if it fills a line of them.
    ///
    /// # Safety
    /// With `STREAM` nobody reads the line before a fence.
    unsafe fn store<const STREAM: bool, L: Lanes>(lanes: L, x: L::F, line: &mut [Self; LANES]);
}

impl Stored for f32 {
    const STREAMS: bool = true;
    #[inline(always)]
    unsafe fn store<const STREAM: bool, L: Lanes>(lanes: L, x: L::F, line: &mut [f32; LANES]) {
        if STREAM && line.as_ptr().addr().is_multiple_of(size_of::<Line>()) {
            // SAFETY: the line is aligned; the caller's promise.
            unsafe { lanes.stream(x, line) };
        } else {
            lanes.store(x, line);
        }
    }
}

/// Rounded to nearest even. A vector is half a line, so that none goes past the caches.
impl Stored for bf16 {
    #[inline(always)]
    unsafe fn store<const STREAM: bool, L: Lanes>(lanes: L, x: L::F, line: &mut [bf16; LANES]) {
        let mut wide = [0.0; LANES];
        lanes.store(x, &mut wide);
        *line = wide.map(|x| bf16::from_bits(bf16_bits(x)));
    }
}

/// What kernels write to.
pub(crate) struct Out<'a, T>(&'a mut [T]);

impl<'a, T: Stored> Out<'a, T> {
    /// Lends `values` to kernels that write all of them.
    pub(crate) fn new(values: &'a mut [T]) -> Self {
        Self(values)
    }

    /// Writes `x` from index `at` on; with `STREAM`, past the caches if it fills a line of them.
    #[inline(always)]
    pub(crate) fn put<const STREAM: bool, L: Lanes>(&mut self, lanes: L, at: usize, x: L::F) {
        let (line, _) = self.0[at..].split_at_mut(LANES);
        if let Some(line) = line.first_chunk_mut::<LANES>() {
            // SAFETY: borrowed until `self` is dropped, which fences.
            unsafe { T::store::<STREAM, L>(lanes, x, line) };
        }
    }

    /// Writes the first `len` lanes of `x` from index `at` on.
    #[inline(always)]
    pub(crate) fn put_some<L: Lanes>(&mut self, lanes: L, at: usize, len: usize, x: L::F) {
        let mut line = [T::default(); LANES];
        // SAFETY: not past the caches.
        unsafe { T::store::<false, L>(lanes, x, &mut line) };
        self.0[at..at + len].copy_from_slice(&line[..len]);
    }
}

impl<T> Drop for Out<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: every x86-64 processor has the instruction. Miri has not, and runs the portable lanes, whose stores need none.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

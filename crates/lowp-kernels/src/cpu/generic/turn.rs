//! Transposing dense matrices of unpacked codes.

use crate::cpu::isa::Kernel;

/// An unpacked code that matrices are made of.
pub(crate) trait Turnable: Copy + Default + Send + Sync + 'static {
    /// `to[c][r] = from[r][c]`, rows of both sides `strides` apart, for the top left `full[0] x full[1]` elements; the rest is left to
    /// the caller.
    fn turn_blocks(from: &[Self], strides: [usize; 2], full: [usize; 2], to: &mut [Self]);
    /// `full` is a multiple of this.
    const SIDES: [usize; 2];
}

/// Transposes `rows x cols` codes of `from`, whose rows are `stride` apart, into `to`, dense.
pub(crate) struct Turn<'a, T> {
    pub(crate) from: &'a [T],
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) to: &'a mut [T],
}

impl<T: Turnable> Kernel for Turn<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Self {
            from,
            stride,
            rows,
            cols,
            to,
        } = self;
        let full = [
            rows / T::SIDES[0] * T::SIDES[0],
            cols / T::SIDES[1] * T::SIDES[1],
        ];
        T::turn_blocks(from, [stride, rows], full, to);
        for col in 0..cols {
            let first = if col < full[1] { full[0] } else { 0 };
            for row in first..rows {
                to[col * rows + row] = from[row * stride + col];
            }
        }
    }
}

/// Lanes of 8 bytes that are turned together.
const LANES: usize = 8;

impl Turnable for u8 {
    const SIDES: [usize; 2] = [8, 8 * LANES];

    /// 8x8 bytes at a time: eight rows are eight 64-bit words, whose halves, quarters and bytes are
    /// exchanged between words. Eight such blocks lie side by side, so every step is one vector
    /// operation.
    #[inline(always)]
    fn turn_blocks(from: &[u8], [stride, rows]: [usize; 2], full: [usize; 2], to: &mut [u8]) {
        for row in (0..full[0]).step_by(8) {
            for col in (0..full[1]).step_by(8 * LANES) {
                let mut words = [[0u64; LANES]; 8];
                for (r, words) in words.iter_mut().enumerate() {
                    let line = &from[(row + r) * stride + col..][..8 * LANES];
                    for (word, bytes) in words.iter_mut().zip(line.as_chunks::<8>().0) {
                        *word = u64::from_le_bytes(*bytes);
                    }
                }
                exchange::<4>(&mut words, 0x0000_0000_FFFF_FFFF);
                exchange::<2>(&mut words, 0x0000_FFFF_0000_FFFF);
                exchange::<1>(&mut words, 0x00FF_00FF_00FF_00FF);
                for (c, words) in words.iter().enumerate() {
                    for (lane, word) in words.iter().enumerate() {
                        let at = (col + 8 * lane + c) * rows + row;
                        to[at..at + 8].copy_from_slice(&word.to_le_bytes());
                    }
                }
            }
        }
    }
}

/// Exchanges the high parts of word `i` with the low parts of word `i + STEP`; `low` covers the
/// low parts, of `8 * STEP` bits.
#[inline(always)]
fn exchange<const STEP: usize>(words: &mut [[u64; LANES]; 8], low: u64) {
    for i in 0..8 {
        if i & STEP != 0 {
            continue;
        }
        for lane in 0..LANES {
            let (a, b) = (words[i][lane], words[i + STEP][lane]);
            words[i][lane] = (a & low) | ((b & low) << (8 * STEP));
            words[i + STEP][lane] = ((a >> (8 * STEP)) & low) | (b & !low);
        }
    }
}

macro_rules! turn_simply {
    ($($Word:ty),*) => {$(
        impl Turnable for $Word {
            const SIDES: [usize; 2] = [16, 16];

            #[inline(always)]
            fn turn_blocks(
                from: &[$Word],
                [stride, rows]: [usize; 2],
                full: [usize; 2],
                to: &mut [$Word],
            ) {
                for col in (0..full[1]).step_by(16) {
                    for row in (0..full[0]).step_by(16) {
                        for c in col..col + 16 {
                            let line = &mut to[c * rows + row..][..16];
                            for (r, word) in line.iter_mut().enumerate() {
                                *word = from[(row + r) * stride + c];
                            }
                        }
                    }
                }
            }
        }
    )*};
}
turn_simply!(u16, u32);

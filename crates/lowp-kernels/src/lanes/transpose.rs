//! Transposing dense matrices of unpacked codes.

use super::{Kernel, LANES, Lanes};

/// An unpacked code that matrices are made of.
pub(crate) trait Transpose: Copy + Default + Send + Sync + 'static {
    /// `to[c][r] = from[r][c]` for a square of [`LANES`] codes; rows are `stride` and `to_stride` apart.
    fn transpose_square<L: Lanes>(
        lanes: L,
        from: &[Self],
        stride: usize,
        to: &mut [Self],
        to_stride: usize,
    );
}

/// Transposes `rows x cols` codes of `from`, whose rows are `stride` apart, into `to`, dense.
pub(crate) struct TransposeDense<'a, T> {
    pub(crate) from: &'a [T],
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) to: &'a mut [T],
}

impl<T: Transpose> Kernel for TransposeDense<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self {
            from,
            stride,
            rows,
            cols,
            to,
        } = self;
        let full = [rows / LANES * LANES, cols / LANES * LANES];
        for col in (0..full[1]).step_by(LANES) {
            for row in (0..full[0]).step_by(LANES) {
                let from = &from[row * stride + col..];
                T::transpose_square(lanes, from, stride, &mut to[col * rows + row..], rows);
            }
        }
        for col in 0..cols {
            let first = if col < full[1] { full[0] } else { 0 };
            for row in first..rows {
                to[col * rows + row] = from[row * stride + col];
            }
        }
    }
}

impl Transpose for u8 {
    #[inline(always)]
    fn transpose_square<L: Lanes>(
        lanes: L,
        from: &[u8],
        stride: usize,
        to: &mut [u8],
        to_stride: usize,
    ) {
        let mut rows = [&[0; LANES]; LANES];
        for (i, row) in rows.iter_mut().enumerate() {
            if let Some(line) = from[i * stride..].first_chunk() {
                *row = line;
            }
        }
        let columns = lanes.transpose_bytes(rows);
        for (i, column) in columns.into_iter().enumerate() {
            if let Some(line) = to[i * to_stride..].first_chunk_mut() {
                lanes.store_bytes(column, line);
            }
        }
    }
}

macro_rules! entry_by_entry {
    ($($Word:ty),*) => {$(
        impl Transpose for $Word {
            #[inline(always)]
            fn transpose_square<L: Lanes>(
                _: L,
                from: &[$Word],
                stride: usize,
                to: &mut [$Word],
                to_stride: usize,
            ) {
                for c in 0..LANES {
                    let line = &mut to[c * to_stride..][..LANES];
                    for (r, word) in line.iter_mut().enumerate() {
                        *word = from[r * stride + c];
                    }
                }
            }
        }
    )*};
}
entry_by_entry!(u16, u32);

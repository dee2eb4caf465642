//! Dense f32 matrix products over strided views of host memory.
//!
//! Every element of a product is one sum over the inner dimension in a fixed order, so the result does not depend on
//! the number of threads.

#![expect(unsafe_code, reason = "the gemm crate takes pointers and strides")]

use gemm::Parallelism;

/// A read-only matrix view: `rows x cols` values inside `data`, element `(i, j)` at `offset + i*row_stride + j*col_stride`.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a> {
    data: &'a [f32],
    offset: usize,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> MatRef<'a> {
    /// A dense row-major matrix.
    ///
    /// # Panics
    /// If `data` holds fewer than `rows * cols` values.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, 0, rows, cols, cols)
    }

    /// A row-major window of a wider matrix whose rows are `row_stride` values apart.
    ///
    /// # Panics
    /// If the window reaches beyond `data`.
    pub fn strided(
        data: &'a [f32],
        offset: usize,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Self {
        assert_window(data.len(), offset, rows, cols, row_stride);
        Self {
            data,
            offset,
            rows,
            cols,
            row_stride,
            col_stride: 1,
        }
    }

    /// The transposed view; no data moves.
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// A writable row-major window: the destination of [`matmul`].
#[derive(Debug)]
pub struct MatMut<'a> {
    data: &'a mut [f32],
    offset: usize,
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a> MatMut<'a> {
    /// A dense row-major matrix.
    ///
    /// # Panics
    /// If `data` holds fewer than `rows * cols` values.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, 0, rows, cols, cols)
    }

    /// A row-major window of a wider matrix whose rows are `row_stride` values apart.
    ///
    /// # Panics
    /// If the window reaches beyond `data`, or its rows overlap.
    pub fn strided(
        data: &'a mut [f32],
        offset: usize,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Self {
        assert_window(data.len(), offset, rows, cols, row_stride);
        assert!(
            rows <= 1 || row_stride >= cols,
            "rows of a destination must not overlap: stride {row_stride} for {cols} columns"
        );
        Self {
            data,
            offset,
            rows,
            cols,
            row_stride,
        }
    }
}

fn assert_window(len: usize, offset: usize, rows: usize, cols: usize, row_stride: usize) {
    // Of a window without values, too: a product may begin at its offset.
    let end = match [rows, cols] {
        [0, _] | [_, 0] => Some(offset),
        [rows, cols] => (rows - 1)
            .checked_mul(row_stride)
            .and_then(|x| x.checked_add(offset))
            .and_then(|x| x.checked_add(cols)),
    };
    assert!(
        isize::try_from(row_stride).is_ok() && end.is_some_and(|end| end <= len),
        "a {rows}x{cols} window at {offset} with row stride {row_stride} needs more than the {len} values there are"
    );
}

/// `dst = alpha * a * b`, or `dst += alpha * a * b` with `accumulate`, on at most `threads` threads.
///
/// # Panics
/// If the shapes do not agree.
pub fn matmul(
    dst: MatMut<'_>,
    accumulate: bool,
    alpha: f32,
    a: MatRef<'_>,
    b: MatRef<'_>,
    threads: usize,
) {
    assert_eq!(a.cols, b.rows, "inner dimensions differ");
    assert_eq!(dst.rows, a.rows, "destination rows differ");
    assert_eq!(dst.cols, b.cols, "destination columns differ");
    if dst.rows == 0 || dst.cols == 0 {
        return;
    }
    let parallelism = if threads > 1 {
        Parallelism::Rayon(threads)
    } else {
        Parallelism::None
    };
    // SAFETY: all three views were checked to lie inside their slices when they were made; `dst` is borrowed
    // mutably, so it overlaps neither operand, and its rows do not overlap each other; strides fit an isize.
    unsafe {
        gemm::gemm(
            dst.rows,
            dst.cols,
            a.cols,
            dst.data.as_mut_ptr().add(dst.offset),
            1,
            dst.row_stride.cast_signed(),
            accumulate,
            a.data.as_ptr().add(a.offset),
            a.col_stride.cast_signed(),
            a.row_stride.cast_signed(),
            b.data.as_ptr().add(b.offset),
            b.col_stride.cast_signed(),
            b.row_stride.cast_signed(),
            1.0,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// `a * b` as a new dense row-major vector.
pub fn product(a: MatRef<'_>, b: MatRef<'_>, threads: usize) -> Vec<f32> {
    let (rows, cols) = (a.rows, b.cols);
    let mut out = vec![0.0; rows * cols];
    matmul(MatMut::new(&mut out, rows, cols), false, 1.0, a, b, threads);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(a: &[f32], b: &[f32], m: usize, k: usize, n: usize) -> Vec<f32> {
        let mut out = vec![0.0; m * n];
        for i in 0..m {
            for j in 0..n {
                out[i * n + j] = (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
            }
        }
        out
    }

    #[test]
    fn equals_the_definition_for_every_transposition() {
        let (m, k, n) = (7, 5, 9);
        let a: Vec<f32> = (0..m * k).map(|i| (i % 11) as f32 - 5.0).collect();
        let b: Vec<f32> = (0..k * n).map(|i| (i % 7) as f32 - 3.0).collect();
        let expected = naive(&a, &b, m, k, n);
        assert_eq!(
            product(MatRef::new(&a, m, k), MatRef::new(&b, k, n), 1),
            expected
        );
        let mut at = vec![0.0; m * k];
        for i in 0..m {
            for l in 0..k {
                at[l * m + i] = a[i * k + l];
            }
        }
        assert_eq!(
            product(MatRef::new(&at, k, m).t(), MatRef::new(&b, k, n), 2),
            expected
        );
    }

    #[test]
    fn writes_only_its_window() {
        let a = [1.0, 2.0, 3.0, 4.0];
        let mut out = vec![9.0; 8];
        let window = MatMut::strided(&mut out, 1, 2, 2, 4);
        matmul(
            window,
            false,
            2.0,
            MatRef::new(&a, 2, 2),
            MatRef::new(&[1.0, 0.0, 0.0, 1.0], 2, 2),
            1,
        );
        assert_eq!(out, [9.0, 2.0, 4.0, 9.0, 9.0, 6.0, 8.0, 9.0]);
    }
}

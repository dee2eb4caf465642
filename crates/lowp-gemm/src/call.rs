//! [`Call`]: the arguments of cuBLASLt for a product.

use crate::desc::{Dtype, GemmDesc, OperandDesc, ScaleMode};

/// The arguments of cuBLASLt for a product. Its matrices are column-major, ours are row-major: its columns are our rows, and the operands
/// change sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// A, our right operand, and B, our left one.
    pub operands: [CallOperand; 2],
    /// C and D: the result.
    pub result: Matrix,
}

/// An operand as cuBLASLt reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallOperand {
    /// Where its entries lie.
    pub matrix: Matrix,
    /// Whether the matrix is transposed before it is multiplied.
    pub transposed: bool,
    /// What its scales belong to.
    pub scale: ScaleMode,
}

/// A column-major matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// The dtype of its entries.
    pub dtype: Dtype,
    /// Length of a column.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Entries from a column to the next.
    pub ld: usize,
    /// Number of matrices.
    pub batch: usize,
    /// Entries from a matrix to the next.
    pub stride: usize,
}

impl GemmDesc {
    /// The arguments of cuBLASLt for this product.
    pub const fn call(&self) -> Call {
        let Self {
            rows,
            cols,
            k,
            left,
            right,
            out,
            out_stride,
            batch,
            ..
        } = *self;
        Call {
            operands: [
                // A row-major [cols, k] is a column-major [k, cols], which is transposed to [cols, k].
                operand(right, [k, cols], batch, right.k_inner),
                operand(left, [k, rows], batch, !left.k_inner),
            ],
            result: matrix(out, [cols, rows], batch, out_stride),
        }
    }
}

const fn operand(
    of: OperandDesc,
    [k, outer]: [usize; 2],
    batch: usize,
    transposed: bool,
) -> CallOperand {
    let sides = match of.k_inner {
        true => [k, outer],
        false => [outer, k],
    };
    CallOperand {
        matrix: matrix(of.dtype, sides, batch, of.stride),
        transposed,
        scale: of.scale,
    }
}

const fn matrix(dtype: Dtype, [inner, outer]: [usize; 2], batch: usize, stride: usize) -> Matrix {
    Matrix {
        dtype,
        rows: inner,
        cols: outer,
        ld: inner,
        batch,
        stride,
    }
}

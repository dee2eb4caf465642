//! The random Hadamard transform of the weight-gradient operands (docs/numerics.md 15).

/// Rows of a group that is transformed.
pub const HADAMARD_ROWS: usize = 16;

/// Bit `i` is set where the sign of row `i` is negative.
pub const HADAMARD_SIGNS: u16 = 0xD7E8;

/// Transforms one column of a group of 16 rows: `x^T diag(signs) H16 / 4` with `H[i][j] = (-1)^popcount(i & j)`, summed
/// in binary32 in butterflies of distance 1, 2, 4 and 8, and not yet rounded to bfloat16.
///
/// The transform is orthogonal, so a product that contracts two transformed operands along their rows keeps its value; it
/// spreads an outlier over 16 values.
#[inline(always)]
pub fn hadamard16(values: &mut [f32; HADAMARD_ROWS]) {
    for (i, value) in values.iter_mut().enumerate() {
        let quarter = if HADAMARD_SIGNS >> i & 1 == 1 {
            -0.25
        } else {
            0.25
        };
        *value *= quarter;
    }
    for half in [1, 2, 4, 8] {
        for i in (0..HADAMARD_ROWS).filter(|i| i & half == 0) {
            let (a, b) = (values[i], values[i + half]);
            values[i] = a + b;
            values[i + half] = a - b;
        }
    }
}

/// Transforms whole groups of 16 rows of a row-major matrix of `cols` columns, and rounds every value to bfloat16. Rows
/// after the last whole group are only rounded.
pub fn hadamard_rows(values: &mut [f32], cols: usize) {
    rotate_rows(values, cols);
    for value in values {
        *value = half::bf16::from_f32(*value).to_f32();
    }
}

/// As [`hadamard_rows`], without the rounding: for an operand that is not quantized.
pub fn rotate_rows(values: &mut [f32], cols: usize) {
    if cols == 0 {
        return;
    }
    for group in values.chunks_exact_mut(HADAMARD_ROWS * cols) {
        for col in 0..cols {
            let mut column: [f32; HADAMARD_ROWS] = std::array::from_fn(|i| group[i * cols + col]);
            hadamard16(&mut column);
            for (i, value) in column.into_iter().enumerate() {
                group[i * cols + col] = value;
            }
        }
    }
}

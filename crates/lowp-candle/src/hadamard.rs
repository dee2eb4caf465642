//! The random Hadamard transform of the weight-gradient operands (docs/numerics.md 15).

use half::bf16;

/// Rows per transform.
const GROUP: usize = 16;

/// Signs of the diagonal: + + + - + - - - - - - + - + - -.
const SIGNS: [f32; GROUP] = [
    1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0,
];

/// Multiplies each group of 16 rows of a row-major `[rows, cols]` matrix by
/// `diag(signs) * Hadamard16 / 4` (Sylvester order) along the rows, and rounds to bfloat16.
///
/// The transform is orthogonal, so a product that contracts two transformed operands along their
/// rows keeps its value; it spreads an outlier over 16 values. Rows after the last whole group are
/// only rounded. Sums are binary32 butterflies.
pub fn hadamard_rows(data: &[f32], cols: usize) -> Vec<f32> {
    let mut out = rotate_rows(data, cols);
    out.iter_mut()
        .for_each(|v| *v = bf16::from_f32(*v).to_f32());
    out
}

/// The same without the rounding, for an operand that is not quantized.
pub fn rotate_rows(data: &[f32], cols: usize) -> Vec<f32> {
    let mut out = data.to_vec();
    if cols == 0 {
        return out;
    }
    for group in out.chunks_exact_mut(GROUP * cols) {
        for (row, sign) in group.chunks_exact_mut(cols).zip(SIGNS) {
            row.iter_mut().for_each(|v| *v *= sign * 0.25);
        }
        let mut half = 1;
        while half < GROUP {
            for pair in group.chunks_exact_mut(2 * half * cols) {
                let (low, high) = pair.split_at_mut(half * cols);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_spreads_over_its_group() {
        let mut data = vec![0.0; 32];
        data[3] = 8.0;
        let out = hadamard_rows(&data, 1);
        assert!(out[..16].iter().all(|v| v.abs() == 2.0));
        assert!(out[16..].iter().all(|v| *v == 0.0));
    }

    #[test]
    fn contraction_along_rows_is_kept() {
        let rows = 48;
        let a: Vec<f32> = (0..rows).map(|i| (i % 7) as f32 - 3.0).collect();
        let b: Vec<f32> = (0..rows).map(|i| (i % 5) as f32 - 2.0).collect();
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
        let (ha, hb) = (hadamard_rows(&a, 1), hadamard_rows(&b, 1));
        assert!(
            (dot(&a, &b) - dot(&ha, &hb)).abs() < 0.5,
            "within bf16 rounding"
        );
        assert_eq!(
            hadamard_rows(&a[..15], 1),
            a[..15],
            "a part of a group is not transformed"
        );
    }

    #[test]
    fn matches_the_matrix_of_the_definition() {
        // Column j of diag(signs) * H / 4: entry i is sign_i * (-1)^popcount(i & j) / 4.
        for i in 0..16 {
            let mut unit = vec![0.0; 16];
            unit[i] = 1.0;
            let expected: Vec<f32> = (0..16usize)
                .map(|j| {
                    let negative = (i & j).count_ones() % 2 == 1;
                    SIGNS[i] * if negative { -0.25 } else { 0.25 }
                })
                .collect();
            assert_eq!(hadamard_rows(&unit, 1), expected);
        }
    }
}

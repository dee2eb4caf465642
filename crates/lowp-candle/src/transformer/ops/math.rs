//! Element functions written so that a plain loop over them vectorises on any target: no calls, no branches.

use std::f32::consts::LOG2_E;

/// Adding and subtracting this rounds to an integer and leaves that integer in the low mantissa bits.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

/// `e^x`, within 2 ulp on [-87, 88]; arguments outside are clamped to that range.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HI - n * LN2_LO;
    // Cephes expf: minimax polynomial of (e^r - 1 - r) / r^2 on [-ln2/2, ln2/2].
    let mut p = 1.987_569_1e-4_f32;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let y = p * r * r + r + 1.0;
    f32::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Sum of `f(0..n)` in eight interleaved partial sums: a fixed order that vectorises.
#[inline(always)]
pub(crate) fn sum8(n: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut acc = [0.0f32; 8];
    let whole = n / 8 * 8;
    let mut i = 0;
    while i < whole {
        for (lane, a) in acc.iter_mut().enumerate() {
            *a += f(i + lane);
        }
        i += 8;
    }
    let mut total =
        ((acc[0] + acc[4]) + (acc[1] + acc[5])) + ((acc[2] + acc[6]) + (acc[3] + acc[7]));
    for j in whole..n {
        total += f(j);
    }
    total
}

/// The largest value, in eight interleaved lanes; NaN is ignored and nothing gives minus infinity.
#[inline(always)]
pub(crate) fn max8(x: &[f32]) -> f32 {
    let mut acc = [f32::NEG_INFINITY; 8];
    let chunks = x.chunks_exact(8);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (a, &v) in acc.iter_mut().zip(chunk) {
            *a = if v > *a { v } else { *a };
        }
    }
    acc.iter()
        .chain(tail)
        .fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_library() {
        for i in -86_000..88_000 {
            let x = i as f32 * 1e-3;
            let expected = f64::from(x).exp();
            assert!(
                (f64::from(exp(x)) / expected - 1.0).abs() < 3e-7,
                "exp({x})"
            );
        }
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn sum_covers_the_tail() {
        assert_eq!(sum8(19, |i| i as f32), 171.0);
    }
}

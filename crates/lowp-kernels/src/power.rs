//! Integer powers of binary64 numbers, for bias corrections: the same bits on every machine, which the
//! power functions of mathematical libraries do not promise.

/// `base^exponent` in binary64 (docs/numerics.md 12.8).
///
/// Binary exponentiation from the highest bit on, on sums of two binary64 numbers. Every operation
/// rounds once. The error before the last rounding is below `exponent * 2^-100` of the result.
pub(crate) fn power(base: f64, exponent: u64) -> f64 {
    let mut result = [1.0, 0.0];
    for bit in (0..u64::BITS - exponent.leading_zeros()).rev() {
        result = product(result, result);
        if exponent >> bit & 1 == 1 {
            result = product(result, [base, 0.0]);
        }
    }
    result[0]
}

/// The product of `a + b` and `c + d`, as a number and what it lacks.
fn product([a, b]: [f64; 2], [c, d]: [f64; 2]) -> [f64; 2] {
    let high = a * c;
    let low = b.mul_add(c, a.mul_add(d, a.mul_add(c, -high)));
    let sum = high + low;
    [sum, low - (sum - high)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupScalars;

    const BETAS: [f32; 6] = [0.9, 0.95, 0.99, 0.999, 0.9999, 0.0];
    const STEPS: u64 = 100_000;

    fn correction(beta: f32, step: u64) -> f32 {
        let group = GroupScalars {
            beta1: beta,
            ..GroupScalars::default()
        };
        group.at_step(step).correction1
    }

    #[test]
    fn corrections_equal_exact_arithmetic() {
        /// The binary point: 100 bits after it, and room for the 24 of a factor.
        const POINT: i32 = 100;
        for beta in BETAS {
            // beta is factor * 2^-40: all of these betas are multiples of that.
            let factor = (f64::from(beta) * 2f64.powi(40)) as u128;
            assert_eq!(factor as f64 * 2f64.powi(-40), f64::from(beta));
            let shift = factor.trailing_zeros().min(40);
            let factor = factor >> shift;
            assert!(factor < 1 << 24);
            let mut exact = 1u128 << POINT;
            for step in 1..=STEPS {
                exact = (exact * factor) >> (40 - shift);
                let expected = (1.0 - exact as f64 * 2f64.powi(-POINT)) as f32;
                assert_eq!(correction(beta, step), expected, "{beta}^{step}");
            }
        }
    }

    /// What the corrections were before they could be made on a device.
    #[test]
    fn corrections_equal_those_of_the_mathematical_library() {
        for beta in BETAS {
            for step in 1..=STEPS {
                let expected = (1.0 - f64::from(beta).powf(step as f64)) as f32;
                assert_eq!(correction(beta, step), expected, "{beta}^{step}");
            }
        }
    }

    #[test]
    fn powers_of_integers_are_rounded_once() {
        for base in [3u32, 5, 6, 7, 10, 11, 13, 1_000_003] {
            let mut exact = 1u128;
            for exponent in 1.. {
                let Some(next) = exact.checked_mul(base.into()) else {
                    break;
                };
                exact = next;
                let found = power(f64::from(base), exponent);
                assert_eq!(found, exact as f64, "{base}^{exponent}");
            }
        }
    }

    #[test]
    fn known_powers() {
        assert_eq!(power(0.3, 0), 1.0);
        assert_eq!(power(0.0, 0), 1.0);
        assert_eq!(power(0.0, 7), 0.0);
        assert_eq!(power(1.0, u64::MAX), 1.0);
        assert_eq!(power(0.5, 1074), f64::from_bits(1));
        assert_eq!(power(0.999, u64::MAX), 0.0);
        assert_eq!(power(3.0, 33), 5_559_060_566_555_523.0);
        // 3^34 needs 54 bits and ends in a 1: the tie goes to the even neighbour.
        assert_eq!(power(3.0, 34), 16_677_181_699_666_568.0);
        assert_eq!(power(-2.0, 3), -8.0);
    }
}

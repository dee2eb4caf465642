//! f32 values as the bytes of a float of 16 or 32 bits, rounded to nearest even, and [`Overflows`], those that became infinite.

use crate::dtypes::OutputDtype;
use half::{bf16, f16};
use std::cell::RefCell;

/// Appends the little-endian bytes of `values` as `float`, and returns how many finite values became infinite.
///
/// Ties go to the even neighbor, subnormal results are kept, NaN stays NaN. What is beyond the largest finite value by
/// half of its last place or more becomes infinite.
pub(crate) fn append(float: OutputDtype, values: &[f32], bytes: &mut Vec<u8>) -> usize {
    match float {
        OutputDtype::F32 => {
            each(values, bytes, f32::to_le_bytes);
            0
        }
        OutputDtype::Bf16 => narrow(values, bytes, |value| {
            let rounded = bf16::from_f32(value);
            (rounded.to_le_bytes(), rounded.is_infinite())
        }),
        OutputDtype::F16 => narrow(values, bytes, |value| {
            let rounded = f16::from_f32(value);
            (rounded.to_le_bytes(), rounded.is_infinite())
        }),
    }
}

pub(crate) fn first_f32(bytes: &[u8]) -> Option<f32> {
    bytes.first_chunk().map(|bytes| f32::from_le_bytes(*bytes))
}

fn narrow(values: &[f32], bytes: &mut Vec<u8>, round: impl Fn(f32) -> ([u8; 2], bool)) -> usize {
    let mut overflowed = 0;
    each(values, bytes, |value| {
        let (rounded, infinite) = round(value);
        overflowed += usize::from(infinite && value.is_finite());
        rounded
    });
    overflowed
}

/// Appends what `to` makes of each of `values`.
fn each<const N: usize>(values: &[f32], bytes: &mut Vec<u8>, mut to: impl FnMut(f32) -> [u8; N]) {
    let start = bytes.len();
    bytes.resize(start + values.len() * N, 0);
    let (out, _) = bytes[start..].as_chunks_mut::<N>();
    for (out, value) in out.iter_mut().zip(values) {
        *out = to(*value);
    }
}

/// Finite values that became infinite: the first tensor that has one, and how many there are.
#[derive(Debug, Default)]
pub struct Overflows(RefCell<Option<(String, usize)>>);

impl Overflows {
    /// Counts `count` values of tensor `name`.
    pub(crate) fn add(&self, name: &str, count: usize) {
        if count > 0 {
            let mut all = self.0.borrow_mut();
            all.get_or_insert_with(|| (name.to_owned(), 0)).1 += count;
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.borrow().as_ref().map_or(0, |(_, count)| *count)
    }

    /// The first tensor that has one.
    pub fn first(&self) -> Option<String> {
        self.0.borrow().as_ref().map(|(name, _)| name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a 16-bit pattern with `exponent` exponent bits, from the definition of IEEE 754; `None` for NaN.
    fn value_of(bits: u16, exponent: u32) -> Option<f64> {
        let mantissa = 15 - exponent;
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let field = i32::from(bits >> mantissa & ((1 << exponent) - 1));
        let fraction = f64::from(bits & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
        let bias = (1 << (exponent - 1)) - 1;
        match field {
            0 => Some(sign * fraction * f64::powi(2.0, 1 - bias)),
            top if top == (1 << exponent) - 1 && fraction != 0.0 => None,
            top if top == (1 << exponent) - 1 => Some(sign * f64::INFINITY),
            field => Some(sign * (1.0 + fraction) * f64::powi(2.0, field - bias)),
        }
    }

    /// The nearest pattern to `value`, ties to even, found among the magnitudes in order.
    fn nearest(value: f32, exponent: u32) -> u16 {
        let (value, sign) = (f64::from(value), u16::from(value.is_sign_negative()) << 15);
        let (mut low, mut high) = (0u16, ((1 << exponent) - 1) << (15 - exponent));
        let infinity = high;
        // Infinity rounds as the power of two that would follow the largest finite value.
        let of = |bits: u16| {
            if bits == infinity {
                f64::powi(2.0, 1 << (exponent - 1))
            } else {
                value_of(bits, exponent).expect("a number")
            }
        };
        if value.abs() >= of(infinity) {
            return sign | infinity;
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if of(middle) <= value.abs() {
                low = middle;
            } else {
                high = middle;
            }
        }
        let (below, above) = (value.abs() - of(low), of(high) - value.abs());
        let up = above < below || (above == below && high % 2 == 0);
        sign | if up { high } else { low }
    }

    /// Every float of 16 bits, its neighbors in f32, the middle to the next, and the neighbors of that.
    fn inputs(exponent: u32) -> Vec<f32> {
        let mut inputs = Vec::new();
        for bits in 0..=u16::MAX {
            let here = value_of(bits, exponent).map_or(f32::NAN, |value| value as f32);
            let next = value_of(bits.wrapping_add(1), exponent).map_or(f32::NAN, |v| v as f32);
            let middle = ((f64::from(here) + f64::from(next)) / 2.0) as f32;
            for value in [here, middle] {
                inputs.extend([value, value.next_up(), value.next_down()]);
            }
        }
        inputs.extend([
            f32::MAX,
            f32::MIN,
            f32::MIN_POSITIVE,
            1e-45,
            65519.99,
            65520.0,
        ]);
        inputs
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        for (float, exponent) in [(OutputDtype::F16, 5), (OutputDtype::Bf16, 8)] {
            let inputs = inputs(exponent);
            let mut bytes = Vec::new();
            let overflowed = append(float, &inputs, &mut bytes);
            let mut expected_overflow = 0;
            for (&value, bytes) in inputs.iter().zip(bytes.chunks_exact(2)) {
                let found = u16::from_le_bytes([bytes[0], bytes[1]]);
                if value.is_nan() {
                    assert_eq!(value_of(found, exponent), None, "{value:?}");
                    continue;
                }
                let expected = nearest(value, exponent);
                assert_eq!(
                    found, expected,
                    "{float:?} of {value:?}: {found:#x}, not {expected:#x}"
                );
                let infinite = value_of(found, exponent).is_some_and(f64::is_infinite);
                expected_overflow += usize::from(infinite && value.is_finite());
            }
            assert_eq!(overflowed, expected_overflow);
            assert!(overflowed > 0);
        }
    }

    #[test]
    fn f32_is_kept() {
        let (values, mut bytes) = ([1.0f32, -0.0, f32::NAN, f32::MAX], Vec::new());
        assert_eq!(append(OutputDtype::F32, &values, &mut bytes), 0);
        assert_eq!(bytes, values.map(f32::to_le_bytes).concat());
    }
}

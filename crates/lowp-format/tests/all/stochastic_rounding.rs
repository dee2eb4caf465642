//! Laws of stochastic rounding to the formats of optimizer state: codes stay, and the mean over all random numbers is the value.

use half::bf16;
use lowp_format::codec::{bf16 as bf16_codec, e4m3, ue4m4};
use proptest::prelude::*;

/// A rounding by sixteen random bits, the values between which it has no bias, and the distance of the values next to one.
struct Rounding {
    name: &'static str,
    round: fn(f32, u16) -> f32,
    /// Unbiased from the first to the second magnitude.
    range: [f32; 2],
    mantissa_bits: i32,
    /// Exponent of the smallest normal value.
    lowest: i32,
    signed: bool,
}

const ROUNDINGS: [Rounding; 3] = [
    Rounding {
        name: "E4M3",
        round: |x, random| e4m3::decode(e4m3::encode_stochastic(x, random)),
        range: [0.0, e4m3::MAX],
        mantissa_bits: 3,
        lowest: -6,
        signed: true,
    },
    Rounding {
        name: "UE4M4",
        round: |x, random| ue4m4::decode(ue4m4::encode_stochastic(x, random)),
        range: [1.0 / 262_144.0, ue4m4::MAX],
        mantissa_bits: 4,
        lowest: -14,
        signed: false,
    },
    Rounding {
        name: "BF16",
        round: |x, random| bf16_codec::round_stochastic(x, random).to_f32(),
        range: [1e-30, 1e30],
        mantissa_bits: 7,
        lowest: -126,
        signed: true,
    },
];

impl Rounding {
    /// The distance of the neighbours of `x`.
    fn step(&self, x: f32) -> f64 {
        let exponent = ((x.abs().to_bits() >> 23).cast_signed() - 127).max(self.lowest);
        2f64.powi(exponent - self.mantissa_bits)
    }
}

/// Each value of a format stays, whatever the random number.
#[test]
fn values_of_the_format_stay() {
    let randoms = (0..=u16::MAX).step_by(257);
    for random in randoms {
        for code in 0..=u8::MAX {
            let found = ue4m4::encode_stochastic(ue4m4::decode(code), random);
            assert_eq!(found, code, "UE4M4 {random}");
            if code & 0x7F != 0x7F {
                let found = e4m3::encode_stochastic(e4m3::decode(code), random);
                assert_eq!(found, code, "E4M3 {random}");
            }
        }
    }
    for bits in (0..=u16::MAX).filter(|&bits| !bf16::from_bits(bits).is_nan()) {
        let x = bf16::from_bits(bits);
        for random in [0, 1, 0x7FFF, 0x8000, u16::MAX] {
            assert_eq!(bf16_codec::round_stochastic(x.to_f32(), random), x);
        }
    }
}

/// The values of UE4M4 rise with the codes, from zero to the largest.
#[test]
fn codes_of_ue4m4_are_in_order() {
    let values: Vec<f32> = (0..=u8::MAX).map(ue4m4::decode).collect();
    assert!(values.is_sorted_by(|a, b| a < b));
    assert_eq!(
        [values[0], values[1], values[255]],
        [0.0, 2f32.powi(-18), ue4m4::MAX]
    );
    // Fields as in docs/numerics.md 1.1.
    for (code, value) in (0..=255u8).zip(values) {
        let (exponent, fraction) = (i32::from(code >> 4), f32::from(code & 15) / 16.0);
        let expected = match exponent {
            0 => fraction * 2f32.powi(-14),
            _ => (1.0 + fraction) * 2f32.powi(exponent - 15),
        };
        assert_eq!(value, expected, "{code:02X}");
    }
}

#[test]
fn values_outside_the_range() {
    for random in [0, 1, u16::MAX] {
        for x in [448.1, f32::MAX, f32::INFINITY] {
            assert_eq!(e4m3::encode_stochastic(x, random), 0x7E);
            assert_eq!(e4m3::encode_stochastic(-x, random), 0xFE);
            assert_eq!(ue4m4::encode_stochastic(x, random), 0xFF);
        }
        // What is not zero stays so.
        for x in [f32::from_bits(1), 1e-30, 2f32.powi(-19)] {
            assert_eq!(ue4m4::encode_stochastic(x, random), 1);
        }
        for code in [0x00, 0x80] {
            assert_eq!(e4m3::encode_stochastic(e4m3::decode(code), random), code);
        }
        assert_eq!(e4m3::encode_stochastic(f32::NAN, random), 0x7F);
        assert_eq!(e4m3::encode_stochastic(-f32::NAN, random), 0x7F);
        assert_eq!(ue4m4::encode_stochastic(f32::NAN, random), 0xFF);
        let nan = f32::from_bits(0xFF80_0001);
        assert_eq!(
            bf16_codec::round_stochastic(nan, random).to_bits(),
            bf16::from_f32(nan).to_bits()
        );
    }
    assert_eq!(bf16_codec::round_stochastic(f32::MAX, 0), bf16::MAX);
    assert_eq!(bf16_codec::round_stochastic(f32::MAX, 1), bf16::INFINITY);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Over all random numbers, the results are the two neighbours of a value, and their mean is the value.
    #[test]
    fn the_mean_is_the_value(which in 0..3usize, place in 0f32..1.0, fraction in 1f32..2.0, negative: bool) {
        let rounding = &ROUNDINGS[which];
        let [low, high] = rounding.range;
        let low = low.max(2f32.powi(rounding.lowest - rounding.mantissa_bits - 2));
        let x = ((low.ln() + place * (high.ln() - low.ln())).exp() * fraction).clamp(low.max(rounding.range[0]), high);
        let x = if negative && rounding.signed { -x } else { x };
        let step = rounding.step(x);
        let mut sum = 0.0;
        for random in 0..=u16::MAX {
            let found = f64::from((rounding.round)(x, random));
            prop_assert!((found - f64::from(x)).abs() < step, "{}: {x} gives {found}", rounding.name);
            sum += found;
        }
        let mean = sum / 65536.0;
        prop_assert!((mean - f64::from(x)).abs() <= step / 65536.0, "{}: {x} has mean {mean}", rounding.name);
    }
}

//! The element codecs against definitions that share no code with them: the value of a code from
//! its bit fields, and the nearest code by distance.
//!
//! `LOWP_EXHAUSTIVE=1` walks all 2^32 inputs; otherwise every 251st.

use std::iter::StepBy;
use std::ops::RangeInclusive;
use std::thread;

use half::bf16;
use lowp_format::codec::{e2m1, e4m3, e5m2, e8m0};
use lowp_format::{Philox, SourceRounding};

/// A float code, described by its fields (docs/numerics.md 1.1).
struct Format {
    name: &'static str,
    exponent_bits: u32,
    mantissa_bits: u32,
    bias: i32,
    /// Largest finite magnitude.
    last: u8,
    /// What NaN encodes to.
    nan: u8,
    encode: fn(f32) -> u8,
    decode: fn(u8) -> f32,
}

const FORMATS: [Format; 3] = [
    Format {
        name: "E4M3",
        exponent_bits: 4,
        mantissa_bits: 3,
        bias: 7,
        last: 0x7E,
        nan: 0x7F,
        encode: e4m3::encode,
        decode: e4m3::decode,
    },
    Format {
        name: "E5M2",
        exponent_bits: 5,
        mantissa_bits: 2,
        bias: 15,
        last: 0x7B,
        nan: 0x7F,
        encode: e5m2::encode,
        decode: e5m2::decode,
    },
    Format {
        name: "E2M1",
        exponent_bits: 2,
        mantissa_bits: 1,
        bias: 1,
        last: 0x7,
        nan: 0x7,
        encode: e2m1::encode,
        decode: e2m1::decode,
    },
];

impl Format {
    fn sign(&self) -> u8 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    /// The value of a magnitude code from its fields.
    fn value(&self, magnitude: u8) -> f64 {
        let fraction = f64::from(magnitude & ((1 << self.mantissa_bits) - 1));
        let fraction = fraction / f64::from(1u32 << self.mantissa_bits);
        match i32::from(magnitude >> self.mantissa_bits) {
            0 => fraction * 2f64.powi(1 - self.bias),
            exponent => (1.0 + fraction) * 2f64.powi(exponent - self.bias),
        }
    }

    /// The finite magnitudes, by code.
    fn values(&self) -> Vec<f64> {
        (0..=self.last).map(|code| self.value(code)).collect()
    }

    /// The nearest code by distance to each of `values`, the even one of two.
    fn nearest(&self, values: &[f64], x: f32) -> u8 {
        if x.is_nan() {
            return self.nan;
        }
        let magnitude = f64::from(x.abs()).min(values[values.len() - 1]);
        let distance = |code: u8| (values[usize::from(code)] - magnitude).abs();
        let mut best = 0;
        for code in 1..=self.last {
            let (new, old) = (distance(code), distance(best));
            if new < old || (new == old && code % 2 == 0) {
                best = code;
            }
        }
        if x.is_sign_negative() {
            best | self.sign()
        } else {
            best
        }
    }

    /// The midpoint above each magnitude: where the next code takes over. Exact in binary64.
    fn midpoints(&self) -> Vec<f64> {
        let mid = |code| (self.value(code) + self.value(code + 1)) / 2.0;
        (0..self.last).map(mid).collect()
    }

    fn check(&self, values: &[f64], x: f32) {
        let (found, expected) = ((self.encode)(x), self.nearest(values, x));
        let bits = x.to_bits();
        assert_eq!(found, expected, "{} of {x:e} ({bits:08X})", self.name);
    }
}

/// Every `stride()`-th of all inputs, cut into ascending ranges of magnitude bits, one per thread.
fn in_parallel(bits: RangeInclusive<u32>, walk: impl Fn(StepBy<RangeInclusive<u32>>) + Sync) {
    let (start, end) = bits.into_inner();
    let threads = thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let size = (end - start) / threads + 1;
    thread::scope(|scope| {
        for part in 0..threads {
            let first = start + part * size;
            let range = first..=(first + (size - 1)).min(end);
            let walk = &walk;
            scope.spawn(move || walk(range.step_by(stride())));
        }
    });
}

fn stride() -> usize {
    if std::env::var("LOWP_EXHAUSTIVE").is_ok_and(|v| v == "1") {
        1
    } else {
        251
    }
}

const INFINITY: u32 = 0x7F80_0000;
const SIGN: u32 = 0x8000_0000;

#[test]
fn every_code_decodes_to_the_value_of_its_fields_and_encodes_to_itself() {
    for format in &FORMATS {
        for code in 0..format.sign() {
            let negative = code | format.sign();
            let [plus, minus] = [code, negative].map(format.decode);
            assert_eq!(
                minus.to_bits(),
                plus.to_bits() | SIGN,
                "{} {code:02X}",
                format.name
            );
            if plus.is_finite() {
                assert!(code <= format.last, "{} {code:02X}", format.name);
                assert_eq!(
                    f64::from(plus),
                    format.value(code),
                    "{} {code:02X}",
                    format.name
                );
                assert_eq!((format.encode)(plus), code);
                assert_eq!((format.encode)(minus), negative);
            } else {
                // Infinity saturates; NaN has one code, without its sign.
                let both = [plus, minus].map(format.encode);
                let nan = [format.nan; 2];
                let largest = [format.last, format.last | format.sign()];
                assert_eq!(both, if plus.is_nan() { nan } else { largest });
                assert!(code > format.last, "{} {code:02X}", format.name);
            }
        }
    }
    // Only E5M2 has infinity, and that is one code.
    assert_eq!(e5m2::decode(0x7C), f32::INFINITY);
    assert!((0x7D..=0x7F).all(|code| e5m2::decode(code).is_nan()));
    assert!(e4m3::decode(0x7F).is_nan());
    // E2M1 reads four bits of its byte.
    for byte in 0..=255 {
        assert_eq!(
            e2m1::decode(byte).to_bits(),
            e2m1::decode(byte & 0xF).to_bits()
        );
    }
}

#[test]
fn every_bf16_input_and_a_million_others_encode_to_the_nearest_code() {
    let random = Philox::new(1, 0);
    for format in &FORMATS {
        let values = format.values();
        for bits in 0..=u16::MAX {
            format.check(&values, bf16::from_bits(bits).to_f32());
        }
        for block in 0..250_000 {
            for bits in random.block(block) {
                format.check(&values, f32::from_bits(bits));
            }
        }
    }
}

#[test]
fn neighbours_of_every_value_and_midpoint_encode_to_the_nearest_code() {
    for format in &FORMATS {
        let values = format.values();
        for point in [values.clone(), format.midpoints()].concat() {
            let x = point as f32;
            assert_eq!(
                f64::from(x),
                point,
                "binary32 holds every value and midpoint"
            );
            for near in [x, x.next_up(), x.next_down()] {
                format.check(&values, near);
                format.check(&values, -near);
            }
        }
    }
}

/// Whether `x` lies beyond the midpoint above `code`; a tie leaves an odd code.
fn passes(x: f32, midpoint: f64, code: u8) -> bool {
    let x = f64::from(x);
    x > midpoint || (x == midpoint && code % 2 == 1)
}

#[test]
fn all_inputs_encode_to_the_nearest_code() {
    for format in &FORMATS {
        let midpoints = format.midpoints();
        in_parallel(0..=INFINITY, |range| {
            let mut code = 0;
            for bits in range {
                let x = f32::from_bits(bits);
                while midpoints
                    .get(usize::from(code))
                    .is_some_and(|&mid| passes(x, mid, code))
                {
                    code += 1;
                }
                let found = [x, -x].map(format.encode);
                assert_eq!(
                    found,
                    [code, code | format.sign()],
                    "{} {bits:08X}",
                    format.name
                );
            }
        });
        in_parallel(INFINITY + 1..=SIGN - 1, |range| {
            for bits in range {
                let found = [bits, bits | SIGN].map(|bits| (format.encode)(f32::from_bits(bits)));
                assert_eq!(found, [format.nan; 2], "{} {bits:08X}", format.name);
            }
        });
    }
}

#[test]
fn e8m0_is_the_power_of_two_at_or_above() {
    for code in 0..=0xFE {
        let value = 2f64.powi(i32::from(code) - 127);
        assert_eq!(f64::from(e8m0::decode(code)), value);
        assert_eq!(f64::from(e8m0::inverse(code)) * value, 1.0, "{code:02X}");
    }
    assert!(e8m0::decode(0xFF).is_nan() && e8m0::inverse(0xFF).is_nan());
    assert_eq!(
        [f32::INFINITY, f32::NAN].map(e8m0::encode_ceil),
        [0xFE, 0xFF]
    );
    in_parallel(0..=INFINITY - 1, |range| {
        let mut code = 0u8;
        for bits in range {
            let v = f32::from_bits(bits);
            while code < 0xFE && f64::from(v) > f64::from(e8m0::decode(code)) {
                code += 1;
            }
            assert_eq!(e8m0::encode_ceil(v), code, "{bits:08X}");
        }
    });
}

#[test]
fn e8m0_neighbours_of_every_power_of_two() {
    for code in 0..=0xFE {
        let v = e8m0::decode(code);
        let above = (code + 1).min(0xFE);
        let near = [v.next_down(), v, v.next_up()].map(e8m0::encode_ceil);
        assert_eq!(near, [code, code, above], "{code:02X}");
    }
}

#[test]
fn e8m0_floor_is_the_power_of_two_at_or_below() {
    for emax in [8, 15] {
        for exponent in 0..=254 {
            for fraction in [0, 1, 0x3F_FFFF, 0x40_0000, 0x7F_FFFF] {
                let v = f32::from_bits(exponent << 23 | fraction);
                let target = f64::from(v) / 2f64.powi(emax);
                let at_or_below = |code: &u8| 2f64.powi(i32::from(*code) - 127) <= target;
                let expected = (0..=0xFE).rev().find(at_or_below).unwrap_or(0);
                assert_eq!(e8m0::encode_floor(v, emax), expected, "{v:e} {emax}");
            }
        }
        let special = [f32::INFINITY, f32::NAN].map(|v| e8m0::encode_floor(v, emax));
        assert_eq!(special, [0xFF; 2]);
    }
}

#[test]
fn e8m0_even_is_the_floor_of_what_rounds_to_the_element() {
    for (emax, mantissa_bits) in [(8, 3), (15, 2), (2, 1)] {
        for exponent in 0..=255u32 {
            for fraction in [0, 1, 0x3F_FFFF, 0x40_0000, 0x6F_FFFF, 0x70_0000, 0x7F_FFFF] {
                let bits = exponent << 23 | fraction;
                let v = f32::from_bits(bits);
                // Halves up: the fraction carries into the exponent from half a step below it on.
                let carries = fraction + (0x40_0000 >> mantissa_bits) >= 0x80_0000;
                let expected = match exponent + u32::from(carries) {
                    _ if !v.is_finite() => 0xFF,
                    exponent => exponent.saturating_sub(emax) as u8,
                };
                for v in [v, f32::from_bits(1 << 31 | bits)] {
                    let found = e8m0::encode_even(v, emax.cast_signed(), mantissa_bits);
                    assert_eq!(found, expected, "{:08X} {emax}", v.to_bits());
                }
            }
        }
    }
}

#[test]
fn stochastic_rounding_keeps_the_expected_value() {
    for bits in 0..=0x40C0 {
        let x = bf16::from_bits(bits).to_f32();
        let decoded = |r| f64::from(e2m1::decode(e2m1::encode_stochastic(x, r)));
        let mean = (0..=255).map(decoded).sum::<f64>() / 256.0;
        let step = [0.5, 1.0, 2.0][usize::from(x >= 2.0) + usize::from(x >= 4.0)];
        assert!((mean - f64::from(x)).abs() <= step / 256.0, "{x}: {mean}");
    }
}

#[test]
fn stochastic_rounding_is_monotone_and_moves_one_code_at_most() {
    for bits in 0..=u16::MAX >> 1 {
        let x = bf16::from_bits(bits).to_f32();
        let codes: Vec<u8> = (0..=255).map(|r| e2m1::encode_stochastic(x, r)).collect();
        if x.is_nan() {
            assert!(codes.iter().all(|&code| code == 0x7));
            continue;
        }
        let below = (0..8)
            .rev()
            .find(|&code| e2m1::decode(code) <= x)
            .unwrap_or(0);
        assert_eq!(codes[0], below, "no random bits: towards zero, {x}");
        assert!(codes.is_sorted(), "{x}: {codes:?}");
        assert!(codes[255] <= (below + 1).min(7), "{x}: {codes:?}");
        if e2m1::decode(below) == x {
            assert_eq!(codes[255], below, "a code's own value stays, {x}");
        }
        if let Some(next) = bits
            .checked_add(1)
            .map(bf16::from_bits)
            .filter(|n| !n.is_nan())
        {
            for r in [0, 1, 127, 128, 255] {
                assert!(e2m1::encode_stochastic(next.to_f32(), r) >= codes[usize::from(r)]);
            }
        }
        let negative = e2m1::encode_stochastic(-x, 77);
        assert_eq!(negative, codes[77] | 8, "the sign is kept, also of zero");
    }
}

#[test]
fn packing_keeps_both_nibbles() {
    for byte in 0..=255u8 {
        let codes = [0, 1].map(|i| e2m1::nibble(&[byte], i));
        assert_eq!(
            codes,
            [byte & 0xF, byte >> 4],
            "element 0 is the low nibble"
        );
        assert_eq!(e2m1::pack(codes[0], codes[1]), byte);
        for code in 0..16 {
            for index in [0, 1] {
                let mut bytes = [0xA5, byte, 0x5A];
                e2m1::set_nibble(&mut bytes, 2 + index, code);
                assert_eq!(e2m1::nibble(&bytes, 2 + index), code);
                assert_eq!(e2m1::nibble(&bytes, 3 - index), codes[1 - index]);
                assert_eq!([bytes[0], bytes[2]], [0xA5, 0x5A]);
            }
        }
    }
}

#[test]
fn bf16_source_rounding_is_to_nearest_even() {
    let random = Philox::new(2, 0);
    for block in 0..50_000 {
        for bits in random.block(block) {
            // The exponent of infinity overflows to it by the same rule; NaN stays NaN.
            let x = f32::from_bits(bits);
            let rounded = SourceRounding::ViaBf16.apply(x);
            if x.is_nan() {
                assert!(rounded.is_nan());
                continue;
            }
            let (low, tail) = (bits & 0xFFFF_0000, bits & 0xFFFF);
            let up = tail > 0x8000 || (tail == 0x8000 && bits & 0x1_0000 != 0);
            assert_eq!(rounded.to_bits(), if up { low + 0x1_0000 } else { low });
            assert_eq!(SourceRounding::F32.apply(x).to_bits(), bits);
        }
    }
}

//! Laws of a master in two halves: nothing is lost, and the parameter is the nearest bfloat16 but for the direction of ties.
//!
//! `LOWP_EXHAUSTIVE=1` walks all 2^32 values; otherwise those next to what is special among the lower 16 bits of each upper half.

use half::bf16;
use lowp_format::codec::remainder::{join, split};

fn check(bits: u32) {
    let x = f32::from_bits(bits);
    let (parameter, remainder) = split(x);
    let joined = join(parameter, remainder);
    if x.is_nan() {
        assert_eq!((parameter.to_bits(), remainder), (0x7FC0, 0), "{bits:08X}");
        assert!(joined.is_nan(), "{bits:08X}");
        return;
    }
    assert_eq!(joined.to_bits(), bits);
    let even = bf16::from_f32(x);
    let tie = bits & 0xFFFF == 0x8000;
    let expected = if tie {
        (bits >> 16) as u16 + 1
    } else {
        even.to_bits()
    };
    assert_eq!(parameter.to_bits(), expected, "{bits:08X}");
}

#[test]
fn halves_are_the_value_and_the_parameter_is_the_nearest() {
    if std::env::var_os("LOWP_EXHAUSTIVE").is_some_and(|value| value == "1") {
        (0..=u32::MAX).for_each(check);
        return;
    }
    for upper in 0..=u32::from(u16::MAX) {
        for lower in [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF] {
            check(upper << 16 | lower);
        }
    }
}

/// The parameters of larger values are not smaller.
#[test]
fn order_stays() {
    let step = 0x0101;
    let values = || (0..=0x7F80_0000).step_by(step).map(f32::from_bits);
    let parameters: Vec<bf16> = values().map(|x| split(x).0).collect();
    assert!(parameters.is_sorted());
    for (x, parameter) in values().zip(parameters) {
        let (negative, remainder) = split(-x);
        assert_eq!((-negative, remainder), (parameter, split(x).1));
    }
}

/// A parameter alone is the master whose remainder is zero.
#[test]
fn a_parameter_has_no_remainder() {
    for bits in 0..=u16::MAX {
        let parameter = bf16::from_bits(bits);
        assert_eq!(join(parameter, 0).to_bits(), u32::from(bits) << 16);
        if !parameter.is_nan() {
            let (found, remainder) = split(parameter.to_f32());
            assert_eq!((found.to_bits(), remainder), (bits, 0));
        }
    }
}

/// Also one that was written alone: a zero with a negative remainder, for example.
#[test]
fn any_pair_is_nearest_to_its_parameter() {
    for bits in 0..=u16::MAX {
        let parameter = bf16::from_bits(bits);
        for remainder in [i16::MIN, -0x7FFF, -1, 0, 1, 0x7FFE, i16::MAX] {
            let x = join(parameter, remainder);
            assert_eq!(x.is_nan(), parameter.is_nan(), "{bits:04X} {remainder}");
            if !parameter.is_nan() {
                assert_eq!(split(x).0.to_bits(), bits, "{bits:04X} {remainder}");
            }
        }
    }
}

/// No 16 bits beside it would do for a parameter that is rounded to nearest with ties to even: 65,537 values have one that is even.
#[test]
fn ties_to_even_need_more_bits() {
    let even = 0x3F80u16;
    let around = (u32::from(even) << 16) - 0x1_0000..(u32::from(even) << 16) + 0x1_0000;
    let nearest = around.filter(|&bits| bf16::from_f32(f32::from_bits(bits)).to_bits() == even);
    assert_eq!(nearest.count(), (1 << 16) + 1);
}

//! A binary32 in two halves of 16 bits: a parameter in bfloat16, and the remainder of its master.

use half::bf16;

/// The parameter and the remainder of one value.
///
/// The parameter is the nearest bfloat16, ties away from zero, and infinite from half a step above the largest finite one on. The remainder is
/// how many binary32 values `x` is farther from zero than the parameter: -32768 to 32767. All but the bits of a NaN is kept: a NaN gives `7FC0`
/// and 0. Source: docs/numerics.md 23.5.
#[inline(always)]
pub const fn split(x: f32) -> (bf16, i16) {
    let bits = x.to_bits();
    let nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    let bits = if nan { 0x7FC0_0000 } else { bits };
    let parameter = bits.wrapping_add(0x8000) >> 16;
    (bf16::from_bits(parameter as u16), bits as i16)
}

/// The value of a parameter and a remainder: that which [`split`] was given, where they came from there.
///
/// A sum that is a NaN, as no value has it, is the parameter: so a parameter that was written alone is what the value is nearest to, whatever
/// the remainder.
#[inline(always)]
pub const fn join(parameter: bf16, remainder: i16) -> f32 {
    let alone = (parameter.to_bits() as u32) << 16;
    let sum = alone.wrapping_add_signed(remainder as i32);
    let nan = sum & 0x7FFF_FFFF > 0x7F80_0000;
    f32::from_bits(if nan { alone } else { sum })
}

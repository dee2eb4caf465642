//! E4M3 (the "FN" variant): sign, 4 exponent bits (bias 7), 3 mantissa bits; largest value 448.

use super::sign_byte;

/// Largest finite value, code `0x7E`.
pub const MAX: f32 = 448.0;

/// Encodes one value.
///
/// Rounding: to nearest, ties to the even code, then saturating. `|x| <= 2^-10` gives zero,
/// `|x| >= 448` and infinities give the largest code; the sign is kept, also of zero. NaN gives
/// `0x7F`. Source: docs/numerics.md 1.2.
#[inline(always)]
pub const fn encode(x: f32) -> u8 {
    let bits = x.to_bits();
    let abs = bits & 0x7FFF_FFFF;
    // Subnormal codes have a fixed step of 2^-9, which is the unit in the last place of 2^14.
    let magic = f32::from_bits(0x4680_0000);
    let small = (f32::from_bits(abs) + magic)
        .to_bits()
        .wrapping_sub(0x4680_0000);
    // Normal codes: round the 23-bit fraction to 3 bits, rebias 127 -> 7.
    let rounded = abs.wrapping_add(0x7_FFFF + ((abs >> 20) & 1)) >> 20;
    let normal = rounded.wrapping_sub((127 - 7) << 3);
    let magnitude = if abs < 0x3C80_0000 { small } else { normal };
    let magnitude = if abs >= 0x43E0_0000 { 0x7E } else { magnitude };
    let code = magnitude | sign_byte(bits);
    (if abs > 0x7F80_0000 { 0x7F } else { code }) as u8
}

/// Encodes one value with stochastic rounding driven by sixteen random bits.
///
/// The magnitude moves up by `random / 65536` of the distance between neighbouring codes, then down to a code: the expected decoded value is
/// `x` up to `1 / 65536` of that distance for `|x| <= 448`. Saturating; the sign is kept, also of zero. NaN gives `0x7F`. Source:
/// docs/numerics.md 23.
#[inline(always)]
pub const fn encode_stochastic(x: f32, random: u16) -> u8 {
    let bits = x.to_bits();
    let abs = bits & 0x7FFF_FFFF;
    // Codes below 2^-6 have the distances of the binade that begins there.
    let below = abs < 0x3C80_0000;
    let moved = (f32::from_bits(abs) + f32::from_bits(0x3C80_0000)).to_bits();
    let from = if below { moved } else { abs };
    let bias = if below { 127 - 6 } else { 127 - 7 };
    // 20 bits of the fraction are dropped, of which the random ones are the upper 16.
    let magnitude = ((from + ((random as u32) << 4)) >> 20) - (bias << 3);
    let magnitude = if magnitude > 0x7E { 0x7E } else { magnitude };
    let code = magnitude | sign_byte(bits);
    (if abs > 0x7F80_0000 { 0x7F } else { code }) as u8
}

/// Decodes one code, exactly. `0x7F` and `0xFF` are NaN.
#[inline(always)]
pub const fn decode(code: u8) -> f32 {
    let magnitude = (code & 0x7F) as u32;
    // Place exponent and mantissa in a binary32 and correct the bias by an exact product.
    let value = f32::from_bits(magnitude << 20) * f32::from_bits((127 + 120) << 23);
    let value = if magnitude == 0x7F { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | ((code as u32 & 0x80) << 24))
}

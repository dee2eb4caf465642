//! E5M2: sign, 5 exponent bits (bias 15), 2 mantissa bits; largest finite value 57344.

use super::sign_byte;

/// Largest finite value, code `0x7B`.
pub const MAX: f32 = 57344.0;

/// Encodes one value.
///
/// Rounding: to nearest, ties to the even code, then saturating. `|x| <= 2^-17` gives zero,
/// `|x| >= 57344` and infinities give the largest finite code; the sign is kept, also of zero.
/// NaN gives `0x7F`. Source: docs/numerics.md 1.2.
#[inline(always)]
pub const fn encode(x: f32) -> u8 {
    let bits = x.to_bits();
    let abs = bits & 0x7FFF_FFFF;
    // Subnormal codes have a fixed step of 2^-16, which is the unit in the last place of 2^7.
    let magic = f32::from_bits(0x4300_0000);
    let small = (f32::from_bits(abs) + magic)
        .to_bits()
        .wrapping_sub(0x4300_0000);
    // Normal codes: round the 23-bit fraction to 2 bits, rebias 127 -> 15.
    let rounded = abs.wrapping_add(0xF_FFFF + ((abs >> 21) & 1)) >> 21;
    let normal = rounded.wrapping_sub((127 - 15) << 2);
    let magnitude = if abs < 0x3880_0000 { small } else { normal };
    let magnitude = if abs >= 0x4760_0000 { 0x7B } else { magnitude };
    let code = magnitude | sign_byte(bits);
    (if abs > 0x7F80_0000 { 0x7F } else { code }) as u8
}

/// Decodes one code, exactly. `0x7C` and `0xFC` are infinities; above them lie the NaN codes.
#[inline(always)]
pub const fn decode(code: u8) -> f32 {
    let magnitude = (code & 0x7F) as u32;
    let value = f32::from_bits(magnitude << 21) * f32::from_bits((127 + 112) << 23);
    let value = if magnitude == 0x7C {
        f32::INFINITY
    } else {
        value
    };
    let value = if magnitude > 0x7C { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | ((code as u32 & 0x80) << 24))
}

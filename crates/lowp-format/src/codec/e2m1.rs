//! E2M1: sign, 2 exponent bits (bias 1), 1 mantissa bit. Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
//!
//! Two elements share a byte: element `2i` in the low nibble, `2i + 1` in the high nibble.

/// Largest finite value, code `0x7`.
pub const MAX: f32 = 6.0;

/// The magnitudes by code.
pub const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Encodes one value into the low four bits.
///
/// Rounding: to nearest, ties to the even code, saturating; infinities give +-6. The sign is
/// kept, also of zero. NaN gives +6 (`0x7`). Source: docs/numerics.md 1.3.
#[inline(always)]
pub const fn encode(x: f32) -> u8 {
    let a = x.abs();
    let magnitude = (a > 0.25) as u32
        + (a >= 0.75) as u32
        + (a > 1.25) as u32
        + (a >= 1.75) as u32
        + (a > 2.5) as u32
        + (a >= 3.5) as u32
        + (a > 5.0) as u32;
    let code = magnitude | ((x.to_bits() >> 28) & 0x8);
    (if x.to_bits() & 0x7FFF_FFFF > 0x7F80_0000 {
        0x7
    } else {
        code
    }) as u8
}

/// The distance between neighbouring magnitudes at `a >= 0`.
#[inline(always)]
const fn step(a: f32) -> f32 {
    if a >= 4.0 {
        2.0
    } else if a >= 2.0 {
        1.0
    } else {
        0.5
    }
}

/// Encodes one value with stochastic rounding driven by eight random bits.
///
/// The magnitude moves up by `random / 256` of a step, then down to the grid, so the expected
/// decoded value is `x` up to a 1/256 step for `|x| <= 6`. Saturating; the sign is kept; NaN
/// gives +6. Source: docs/numerics.md 7.5.
#[inline(always)]
pub fn encode_stochastic(x: f32, random: u8) -> u8 {
    let a = x.abs();
    let moved = f32::from(random).mul_add(step(a) / 256.0, a);
    let grid = step(moved);
    let magnitude = ((moved / grid).floor() * grid).min(MAX);
    // The grid value is representable, so nearest rounding returns its code.
    let code = encode(magnitude) | ((x.to_bits() >> 28) & 0x8) as u8;
    if x.is_nan() { 0x7 } else { code }
}

/// Decodes the low four bits of `code`, exactly.
#[inline(always)]
pub const fn decode(code: u8) -> f32 {
    let magnitude = MAGNITUDES[(code & 7) as usize];
    f32::from_bits(magnitude.to_bits() | ((code as u32 & 8) << 28))
}

/// Packs two codes into one byte, the first in the low nibble.
#[inline(always)]
pub const fn pack(first: u8, second: u8) -> u8 {
    (first & 0xF) | (second << 4)
}

/// The code of element `index` in packed `bytes`.
#[inline(always)]
pub const fn nibble(bytes: &[u8], index: usize) -> u8 {
    (bytes[index / 2] >> (4 * (index % 2))) & 0xF
}

/// Replaces the code of element `index` in packed `bytes`; its neighbour keeps its bits.
#[inline(always)]
pub const fn set_nibble(bytes: &mut [u8], index: usize, code: u8) {
    let shift = 4 * (index % 2);
    let byte = &mut bytes[index / 2];
    *byte = (*byte & !(0xF << shift)) | ((code & 0xF) << shift);
}

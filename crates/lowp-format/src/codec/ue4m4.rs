//! UE4M4: no sign, 4 exponent bits (bias 15), 4 mantissa bits; largest value 1.9375. The second moments of an optimizer.

/// Largest value, code `0xFF`. There is no infinity and no NaN.
pub const MAX: f32 = 1.9375;

/// Encodes `x >= 0` with stochastic rounding driven by sixteen random bits.
///
/// Moves up by `random / 65536` of the distance between neighbouring codes, then down to a code: the expected decoded value is `x` up to
/// `1 / 65536` of that distance for `2^-18 <= x <= 1.9375`. What is not zero never gives zero: `0 < x < 2^-18` gives the smallest value,
/// 2^-18. Saturating, also for infinities and NaN; the sign is ignored. Source: docs/numerics.md 23.
#[inline(always)]
pub const fn encode_stochastic(x: f32, random: u16) -> u8 {
    let abs = x.to_bits() & 0x7FFF_FFFF;
    // Codes below 2^-14 have the distances of the binade that begins there.
    let below = abs < 0x3880_0000;
    let moved = (f32::from_bits(abs) + f32::from_bits(0x3880_0000)).to_bits();
    let bits = if below { moved } else { abs };
    let bias = if below { 127 - 14 } else { 127 - 15 };
    // 19 bits of the fraction are dropped, of which the random ones are the upper 16.
    let code = ((bits + ((random as u32) << 3)) >> 19) - (bias << 4);
    let code = if code > 0xFF { 0xFF } else { code };
    (if code == 0 && abs != 0 { 1 } else { code }) as u8
}

/// Decodes one code, exactly.
#[inline(always)]
pub const fn decode(code: u8) -> f32 {
    // Place exponent and mantissa in a binary32 and correct the bias by an exact product.
    f32::from_bits((code as u32) << 19) * f32::from_bits((127 + 112) << 23)
}

//! E8M0: an unsigned power of two with bias 127, the block scale of the OCP MX formats.

/// The code that is not a number.
pub const NAN: u8 = 0xFF;

/// Encodes the smallest power of two that is not below `v >= 0`, saturating at `0xFE`.
///
/// NaN gives `0xFF`, infinity `0xFE`, zero `0x00`. Source: docs/numerics.md 1.4.
#[inline(always)]
pub const fn encode_ceil(v: f32) -> u8 {
    let bits = v.to_bits() & 0x7FFF_FFFF;
    let exponent = bits >> 23;
    let fraction = bits & 0x7F_FFFF;
    // A subnormal above 2^-127 needs exponent 1; at or below it, 0 is enough.
    let up = if exponent == 0 {
        (fraction > 0x40_0000) as u32
    } else {
        (fraction != 0) as u32
    };
    let code = exponent + up;
    let code = if code > 0xFE { 0xFE } else { code };
    (if bits > 0x7F80_0000 { 0xFF } else { code }) as u8
}

/// Encodes the power of two of `v`'s exponent field lowered by `emax`, at least `0x00`; infinity and NaN
/// give `0xFF` (OCP MX 1.0, 6.3).
#[inline(always)]
pub const fn encode_floor(v: f32, emax: i32) -> u8 {
    let exponent = ((v.to_bits() >> 23) & 0xFF).cast_signed() - emax;
    let code = if exponent < 0 { 0 } else { exponent };
    (if v.is_finite() { code } else { 0xFF }) as u8
}

/// Encodes as [`encode_floor`] the power of two of `v` rounded to `mantissa_bits` fraction bits, halves up: a block
/// whose amax rounds to the next power of two counts as that (docs/numerics.md 19).
#[inline(always)]
pub const fn encode_even(v: f32, emax: i32, mantissa_bits: u32) -> u8 {
    // Without the sign, so that no NaN overflows.
    let rounded = (v.to_bits() & 0x7FFF_FFFF) + (1 << (22 - mantissa_bits));
    let exponent = ((rounded >> 23) & 0xFF).cast_signed() - emax;
    let code = if exponent < 0 { 0 } else { exponent };
    (if v.is_finite() { code } else { 0xFF }) as u8
}

/// Decodes one code: `2^(code - 127)`. Code 0 is the subnormal `2^-127`, `0xFF` is NaN.
#[inline(always)]
pub const fn decode(code: u8) -> f32 {
    let bits = (code as u32) << 23;
    let bits = if code == 0 { 0x0040_0000 } else { bits };
    if code == NAN {
        f32::NAN
    } else {
        f32::from_bits(bits)
    }
}

/// The exact reciprocal, `2^(127 - code)`. `0xFF` gives NaN.
#[inline(always)]
pub const fn inverse(code: u8) -> f32 {
    if code == NAN {
        f32::NAN
    } else {
        decode(254 - code)
    }
}

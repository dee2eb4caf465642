//! bfloat16 as the kernels convert it: the same bits on every backend.

use half::bf16;

/// The bfloat16 bits of `x`, rounded to nearest even; NaN stays a (quiet) NaN.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if bits & 0x7FFF_FFFF > 0x7F80_0000 {
        quiet
    } else {
        rounded
    }) as u16
}

/// The value of a bfloat16, exactly.
#[inline(always)]
pub(crate) fn bf16_value(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// `x` rounded to bfloat16.
#[inline(always)]
pub(crate) fn round_bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(bf16_bits(x)) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_is_that_of_half() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(
                    bf16_bits(x),
                    bf16::from_f32(x).to_bits(),
                    "{:08X}",
                    x.to_bits()
                );
            }
        }
    }
}

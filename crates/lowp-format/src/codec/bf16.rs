//! Stochastic rounding to bfloat16. Rounding to nearest is that of the `half` crate.

use half::bf16;

/// Rounds one value with stochastic rounding driven by sixteen random bits.
///
/// The lower 16 bits of the binary32 are the chance, in 65536ths, of the neighbour of larger magnitude, so the expected value is `x`. Above
/// the largest finite bfloat16 that neighbour is an infinity. Infinities stay, and a NaN is rounded as to nearest. Source: docs/numerics.md
/// 23.2.
#[inline(always)]
pub const fn round_stochastic(x: f32, random: u16) -> bf16 {
    let bits = x.to_bits();
    let abs = bits & 0x7FFF_FFFF;
    let quiet = if abs > 0x7F80_0000 { 0x40 } else { 0 };
    let special = (bits >> 16) | quiet;
    let rounded = bits.wrapping_add(random as u32) >> 16;
    bf16::from_bits((if abs >= 0x7F80_0000 { special } else { rounded }) as u16)
}

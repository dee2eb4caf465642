//! Two-level scaling (NVFP4): an E4M3 scale per block under an f32 amax, and the choice of four over
//! six (docs/numerics.md 7 and 20.1).

use crate::codec::{e2m1, e4m3};

/// Whether a block may be encoded for a maximum of 4 instead of 6, by which error the two are
/// compared, and the largest block scale that the amax is mapped to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FourOverSix {
    /// Blocks aim at 6; block scales reach 448.
    #[default]
    Off,
    /// The smaller sum of absolute errors; block scales reach 256, so that those for 4 fit.
    Mae,
    /// The smaller sum of squared errors; block scales reach 256.
    Mse,
    /// As `Mae` with block scales up to 448.
    Mae448,
    /// As `Mse` with block scales up to 448.
    Mse448,
}

/// `fl(1 / 6)`, the factor of the two-level block scale.
const SIXTH: f32 = 1.0 / 6.0;

impl FourOverSix {
    /// The block scale that the amax is mapped to.
    #[inline(always)]
    pub const fn bound(self) -> f32 {
        match self {
            FourOverSix::Mae | FourOverSix::Mse => 256.0,
            FourOverSix::Off | FourOverSix::Mae448 | FourOverSix::Mse448 => 448.0,
        }
    }

    /// The largest product of a block scale and an element: `6 * bound`.
    #[inline(always)]
    pub const fn largest(self) -> f32 {
        6.0 * self.bound()
    }

    /// Whether blocks have a choice.
    #[inline(always)]
    pub const fn is_on(self) -> bool {
        !matches!(self, FourOverSix::Off)
    }

    /// Whether errors are squared.
    #[inline(always)]
    pub const fn squares(self) -> bool {
        matches!(self, FourOverSix::Mse | FourOverSix::Mse448)
    }
}

/// Encode scale of an amax (NVFP4's `S_enc`): `fl(6 * bound / amax)`, at most `f32::MAX`; 1 where the amax is 0 or
/// infinite. An amax is never NaN (2.2); should one be given, it counts as 1. Source: docs/numerics.md 7.1.
#[inline(always)]
pub fn two_level_encode_scale(amax: f32, choice: FourOverSix) -> f32 {
    if amax == 0.0 {
        return 1.0;
    }
    let amax = if amax.is_nan() { 1.0 } else { amax };
    let scale = (choice.largest() / amax).min(f32::MAX);
    if scale == 0.0 { 1.0 } else { scale }
}

/// The E4M3 decode scale byte of a block. Source: docs/numerics.md 7.2.
#[inline(always)]
pub fn two_level_block_scale(block_amax: f32, encode_scale: f32) -> u8 {
    e4m3::encode((block_amax * two_level_block_factor(encode_scale)).min(f32::MAX))
}

/// What a block amax is multiplied by before it becomes a block scale. Source: docs/numerics.md
/// 7.2.
#[inline(always)]
pub fn two_level_block_factor(encode_scale: f32) -> f32 {
    encode_scale * SIXTH
}

/// The multiplier of a block's values before E2M1 encoding. Source: docs/numerics.md 7.2.
#[inline(always)]
pub fn two_level_multiplier(block_scale: u8, encode_scale: f32) -> f32 {
    let decode_scale = 1.0 / encode_scale;
    (1.0 / (e4m3::decode(block_scale) * decode_scale)).min(f32::MAX)
}

/// The factor that decodes the elements of a two-level block. Source: docs/numerics.md 7.4.
#[inline(always)]
pub fn two_level_decode_factor(block_scale: u8, amax: f32, choice: FourOverSix) -> f32 {
    (e4m3::decode(block_scale) * amax) * (1.0 / choice.largest())
}

/// The block scales that four over six chooses between: for 6, then for 4. Source: docs/numerics.md 20.1.
#[inline(always)]
pub fn four_over_six_scales(block_amax: f32, encode_scale: f32) -> [u8; 2] {
    let base = (block_amax / 6.0) * encode_scale;
    [base, base * 1.5].map(|scale| e4m3::encode(scale.min(448.0)))
}

/// What is added to a block's error for value `x` under a candidate. Source: docs/numerics.md 20.1.
#[inline(always)]
pub fn four_over_six_error(
    x: f32,
    block_scale: u8,
    encode_scale: f32,
    amax: f32,
    choice: FourOverSix,
) -> f32 {
    let code = e2m1::encode(x * two_level_multiplier(block_scale, encode_scale));
    let decoded = (e2m1::decode(code) * e4m3::decode(block_scale)) * amax / choice.largest();
    let error = decoded - x;
    if choice.squares() {
        error * error
    } else {
        error.abs()
    }
}

/// Whether 4 is chosen: its error is smaller. A NaN chooses 6.
#[inline(always)]
pub fn chooses_four([error6, error4]: [f32; 2]) -> bool {
    error4 < error6
}

/// The error of a 2-D block from those of its rows, missing rows 0: a tree over rows `r` and `r + 8`, then `+ 4`,
/// `+ 2` and `+ 1`. Source: docs/numerics.md 20.1.
#[inline(always)]
pub fn four_over_six_rows(mut rows: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for row in 0..half {
            rows[row] += rows[row + half];
        }
    }
    rows[0]
}

//! Scale rules: how an amax becomes a scale. One function per formula of docs/numerics.md, used
//! by every kernel, plan and test.
//!
//! A scale is named by direction: an *encode* scale multiplies values, a *decode* scale
//! (`scale_inv`) multiplies codes.

use crate::codec::{e4m3, e8m0};
use crate::{Code, Orientation, Part};

/// How an E8M0 block scale is rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MxScale {
    /// Up to the next power of two: a finite block maximum is never clipped (TransformerEngine).
    #[default]
    Te,
    /// The exponent of the amax (OCP MX 1.0, 6.3): block maxima may saturate.
    OcpFloor,
}

/// Which entry of the amax history sets the next delayed scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AmaxAlgorithm {
    /// The largest of the window.
    #[default]
    Max,
    /// The latest.
    MostRecent,
}

/// How an f32 source is rounded before amax and encode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SourceRounding {
    /// Not at all: the f32 value is quantized.
    #[default]
    F32,
    /// To bfloat16 first (to nearest, ties to even), as TransformerEngine's partial cast does.
    ViaBf16,
}

impl SourceRounding {
    /// The value that is quantized for source value `x`.
    #[inline(always)]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            SourceRounding::F32 => x,
            SourceRounding::ViaBf16 => half::bf16::from_f32(x).to_f32(),
        }
    }
}

/// The scale arithmetic of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScaleRule {
    /// No scale: the element code holds the value itself (f32, bf16).
    None,
    /// One f32 encode scale for the whole tensor, given to the kernel.
    Tensor,
    /// One E8M0 scale per block.
    E8M0(MxScale),
    /// One E4M3 scale per block under one f32 tensor amax (NVFP4).
    TwoLevel,
    /// One f32 scale per block by [`tensor_scale`].
    BlockF32 {
        /// Round the scale down to a power of two.
        pow2: bool,
        /// Lower bound of the amax.
        epsilon: f32,
    },
}

impl ScaleRule {
    /// What a quantized tensor keeps as one f32 for all of its elements, if anything.
    pub const fn tensor_part(&self) -> Option<Part> {
        match self {
            ScaleRule::Tensor => Some(Part::DecodeScale),
            ScaleRule::TwoLevel => Some(Part::TensorAmax),
            ScaleRule::None | ScaleRule::E8M0(_) | ScaleRule::BlockF32 { .. } => None,
        }
    }
}

/// The ingredients that a kernel is made of. Backends dispatch on this and never see a recipe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelKey {
    /// Element code of the data.
    pub element: Code,
    /// Scale arithmetic.
    pub scale: ScaleRule,
    /// Block rows x columns per orientation, rowwise first; `None` where no block has a scale.
    pub blocks: Option<[[usize; 2]; 2]>,
}

impl KernelKey {
    /// Block rows x columns of `orientation`, or `None` where no block has a scale.
    pub fn block(&self, orientation: Orientation) -> Option<[usize; 2]> {
        self.blocks.map(|blocks| blocks[orientation as usize])
    }
}

/// What a scale depends on, and so which phases a cast needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScaleSource {
    /// Nothing is scaled.
    None,
    /// The amaxes of earlier steps (delayed scaling).
    History {
        /// Length of the amax history.
        window: usize,
        /// Which entry counts.
        algorithm: AmaxAlgorithm,
        /// The scale leaves this many binary orders of headroom.
        margin: i32,
    },
    /// The amax of the whole tensor, now.
    TensorAmax {
        /// Round the scale down to a power of two.
        pow2: bool,
        /// Lower bound of the amax.
        epsilon: f32,
    },
    /// The amax of each block.
    BlockAmax,
    /// The amax of the whole tensor and of each block.
    TensorAndBlockAmax,
}

impl ScaleSource {
    /// Whether encoding must wait for the amax of the whole tensor (a second pass).
    pub const fn needs_tensor_amax(self) -> bool {
        matches!(
            self,
            ScaleSource::TensorAmax { .. } | ScaleSource::TensorAndBlockAmax
        )
    }

    /// Whether the tensor amax is observed, for this cast or for a later one.
    pub const fn observes_tensor_amax(self) -> bool {
        self.needs_tensor_amax() || matches!(self, ScaleSource::History { .. })
    }
}

/// Encode scale of a tensor (or an f32-scaled block) from its amax.
///
/// `fl(fp8_max / max(amax, epsilon))`; 1 where the amax is 0, infinite or NaN; `f32::MAX` where
/// the quotient overflows; then, with `pow2`, the fraction bits are cleared. The decode scale is
/// `fl(1 / scale)`. Source: docs/numerics.md 5.2.
#[inline]
pub fn tensor_scale(amax: f32, element: Code, pow2: bool, epsilon: f32) -> f32 {
    let amax = if amax < epsilon { epsilon } else { amax };
    let scale = if amax == 0.0 || !amax.is_finite() {
        1.0
    } else {
        let scale = element.max_finite() / amax;
        if scale.is_infinite() { f32::MAX } else { scale }
    };
    if pow2 {
        f32::from_bits(scale.to_bits() & 0xFF80_0000)
    } else {
        scale
    }
}

/// Rolls one column of an amax history and returns the next encode scale of delayed scaling.
///
/// `history[0]` is the current step; `reduced` is the agreed amax of the step, if one was reduced.
/// Source: docs/numerics.md 4.2 (the bulk kernel's rule: a step that saw only zeros changes
/// nothing).
pub fn history(
    history: &mut [f32],
    scale: f32,
    reduced: Option<f32>,
    element: Code,
    algorithm: AmaxAlgorithm,
    margin: i32,
) -> f32 {
    let Some(&newest) = history.first() else {
        return scale;
    };
    let last = reduced.filter(|&v| v != 0.0).unwrap_or(newest);
    if last == 0.0 {
        return scale;
    }
    let amax = match algorithm {
        AmaxAlgorithm::MostRecent => last,
        AmaxAlgorithm::Max => history[1..].iter().fold(last, |a, &b| a.max(b)),
    };
    // [0, h2, .., h(L-1), last]: the oldest entry h1 falls out.
    history.rotate_left(1);
    if let Some(slot) = history.last_mut() {
        *slot = last;
    }
    history[0] = 0.0;
    if amax.is_finite() && amax > 0.0 {
        let numerator = element.max_finite() * (-margin as f32).exp2();
        let scale = numerator / amax;
        if scale.is_infinite() { f32::MAX } else { scale }
    } else {
        scale
    }
}

impl MxScale {
    /// The E8M0 scale byte of a block. Source: docs/numerics.md 6.1 and 6.3.
    #[inline(always)]
    pub fn block_scale(self, amax: f32, element: Code) -> u8 {
        match self {
            MxScale::Te => e8m0::encode_ceil(amax * (1.0 / element.max_finite())),
            MxScale::OcpFloor => e8m0::encode_floor(amax, element.max_exponent()),
        }
    }
}

/// `fl(1 / 6)`, the factor of the two-level block scale.
const SIXTH: f32 = 1.0 / 6.0;

/// Tensor-level encode scale of two-level scaling (NVFP4's `S_enc`) from the tensor amax: `fl(2688 / amax)`, at most
/// `f32::MAX`; 1 where the amax is 0 or infinite. An amax is never NaN (2.2); should one be given,
/// it counts as 1. Source: docs/numerics.md 7.1.
#[inline]
pub fn two_level_encode_scale(amax: f32) -> f32 {
    if amax == 0.0 {
        return 1.0;
    }
    let amax = if amax.is_nan() { 1.0 } else { amax };
    let scale = (2688.0 / amax).min(f32::MAX);
    if scale == 0.0 { 1.0 } else { scale }
}

/// The E4M3 decode scale byte of a block under a tensor-level scale. Source: docs/numerics.md 7.2.
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
pub fn two_level_decode_factor(block_scale: u8, tensor_amax: f32) -> f32 {
    (e4m3::decode(block_scale) * tensor_amax) * (1.0 / 2688.0)
}

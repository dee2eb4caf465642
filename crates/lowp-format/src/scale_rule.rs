//! [`ScaleRule`]: how an amax becomes a scale, and [`KernelKey`], what one orientation is made of. One
//! function per formula of docs/numerics.md, used by every kernel, plan and test.
//!
//! A scale is named by direction: an *encode* scale multiplies values, a *decode* scale
//! (`scale_inv`) multiplies codes.

use crate::codec::e8m0;
use crate::{Axis, BufferSpec, Code, FourOverSix, Orientation, Part, Shape};

/// The bits of `|x|`, and 0 for NaN: their largest, as unsigned numbers, are the bits of an amax (docs/numerics.md 2.2). Exact, in any
/// order. Compilers make `fmaxnm` of floats that are compared on Arm, which returns NaN where one of them is a signaling NaN.
#[inline(always)]
pub const fn magnitude(x: f32) -> u32 {
    let bits = x.abs().to_bits();
    if bits > f32::INFINITY.to_bits() {
        0
    } else {
        bits
    }
}

/// How an E8M0 block scale is rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MxScale {
    /// Up to the next power of two: a finite block maximum is never clipped (TransformerEngine).
    #[default]
    Te,
    /// The exponent of the amax (OCP MX 1.0, 6.3): block maxima may saturate.
    OcpFloor,
    /// The exponent of the amax rounded to the precision of the elements: block maxima above the
    /// midpoint of the largest value and the next power of two count as that power. Written by Quark
    /// and compressed-tensors.
    Even,
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

/// The values that share the amax above block scales, or the scale where blocks have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// The whole tensor.
    Tensor,
    /// A line along which blocks run: a row of a rowwise operand, a column of a columnwise one.
    Line,
}

impl Extent {
    /// Amaxes of a matrix of `shape`.
    pub const fn entries(self, orientation: Orientation, shape: Shape) -> usize {
        match self {
            Extent::Tensor => 1,
            Extent::Line => Axis::outer(orientation).len(shape),
        }
    }

    /// Rows and columns that share an amax.
    pub const fn block(self, orientation: Orientation) -> [usize; 2] {
        match (self, orientation) {
            (Extent::Tensor, _) => [BufferSpec::WHOLE; 2],
            (Extent::Line, Orientation::Rowwise) => [1, BufferSpec::WHOLE],
            (Extent::Line, Orientation::Columnwise) => [BufferSpec::WHOLE, 1],
        }
    }
}

/// How scales follow from amaxes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScaleRule {
    /// No scale: the element code holds the value itself (f32, bf16).
    None,
    /// One f32 scale for the tensor, from the amaxes of earlier steps (delayed scaling).
    Delayed {
        /// Length of the amax history.
        window: usize,
        /// Which entry of the history counts.
        algorithm: AmaxAlgorithm,
        /// The scale leaves this many binary orders of headroom.
        margin: i32,
    },
    /// One f32 scale for the tensor or for each line, by [`tensor_scale`] from its amax now.
    Current {
        /// What shares a scale.
        extent: Extent,
        /// Round the scale down to a power of two.
        pow2: bool,
        /// Lower bound of the amax.
        epsilon: f32,
    },
    /// One E8M0 scale per block.
    E8M0(MxScale),
    /// One E4M3 scale per block under an f32 amax of the tensor or of each line (NVFP4).
    TwoLevel {
        /// What shares the amax.
        extent: Extent,
        /// Whether a block may aim at 4 instead of 6.
        four_over_six: FourOverSix,
    },
    /// One f32 scale per block by [`tensor_scale`].
    BlockF32 {
        /// Round the scale down to a power of two.
        pow2: bool,
        /// Lower bound of the amax.
        epsilon: f32,
    },
}

impl ScaleRule {
    /// NVFP4's rule: an amax of the tensor, and blocks that aim at 6.
    pub const TWO_LEVEL: Self = Self::TwoLevel {
        extent: Extent::Tensor,
        four_over_six: FourOverSix::Off,
    };

    /// What stands above block scales, or alone: the extent and what a quantized tensor keeps of it.
    pub const fn outer(&self) -> Option<(Extent, Part)> {
        match self {
            ScaleRule::Delayed { .. } => Some((Extent::Tensor, Part::DecodeScale)),
            ScaleRule::Current { extent, .. } => Some((*extent, Part::DecodeScale)),
            ScaleRule::TwoLevel { extent, .. } => Some((*extent, Part::Amax)),
            ScaleRule::None | ScaleRule::E8M0(_) | ScaleRule::BlockF32 { .. } => None,
        }
    }

    /// Whether each line has a scale or an amax of its own.
    pub const fn is_by_line(&self) -> bool {
        matches!(self.outer(), Some((Extent::Line, _)))
    }

    /// Which of the scales or amaxes above block scales is that of the element at `[row, col]`.
    pub const fn line(&self, orientation: Orientation, at: [usize; 2]) -> usize {
        if self.is_by_line() {
            at[orientation as usize]
        } else {
            0
        }
    }

    /// The code of a stored block scale, where blocks have scales.
    pub const fn entry(&self) -> Option<Code> {
        match self {
            ScaleRule::None | ScaleRule::Delayed { .. } | ScaleRule::Current { .. } => None,
            ScaleRule::E8M0(_) => Some(Code::E8M0),
            ScaleRule::TwoLevel { .. } => Some(Code::E4M3),
            ScaleRule::BlockF32 { .. } => Some(Code::F32),
        }
    }

    /// Whether encoding must wait for an amax of the tensor or of its lines (a second pass).
    pub const fn waits_for_amax(&self) -> bool {
        matches!(self, ScaleRule::Current { .. } | ScaleRule::TwoLevel { .. })
    }

    /// Whether the scale comes of earlier steps.
    pub const fn is_delayed(&self) -> bool {
        matches!(self, ScaleRule::Delayed { .. })
    }
}

/// The ingredients that one orientation is made of. Backends dispatch on this and never see a recipe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelKey {
    /// Element code of the data.
    pub element: Code,
    /// Scale arithmetic.
    pub scale: ScaleRule,
    /// Block rows x columns; `None` where no block has a scale.
    pub block: Option<[usize; 2]>,
    /// Whether groups of 16 rows pass a random Hadamard transform first ([`crate::hadamard16`]).
    pub hadamard: bool,
}

impl KernelKey {
    /// Elements of `element` under `scale`, without block scales.
    pub const fn new(element: Code, scale: ScaleRule) -> Self {
        Self {
            element,
            scale,
            block: None,
            hadamard: false,
        }
    }

    /// The key with block scales of `block` rows x columns.
    #[must_use]
    pub const fn blocks(self, block: [usize; 2]) -> Self {
        Self {
            block: Some(block),
            ..self
        }
    }
}

/// Encode scale of a tensor (or an f32-scaled block or line) from its amax.
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
        let scale = delayed_numerator(element, margin) / amax;
        if scale.is_infinite() { f32::MAX } else { scale }
    } else {
        scale
    }
}

/// What a delayed scale is a multiple of, `max_finite * 2^-margin`: `scale = delayed_numerator / amax`. Exact, and the same on every machine
/// (`f32::exp2` promises no last bit), for the margins of `-64..=64` that recipes have; those beyond 126 count as 126.
pub fn delayed_numerator(element: Code, margin: i32) -> f32 {
    let exponent = 127 - margin.clamp(-126, 126);
    element.max_finite() * f32::from_bits((exponent as u32) << 23)
}

impl MxScale {
    /// The E8M0 scale byte of a block. Source: docs/numerics.md 6.1, 6.3 and 19.
    #[inline(always)]
    pub fn block_scale(self, amax: f32, element: Code) -> u8 {
        match self {
            MxScale::Te => e8m0::encode_ceil(amax * (1.0 / element.max_finite())),
            MxScale::OcpFloor => e8m0::encode_floor(amax, element.max_exponent()),
            MxScale::Even => {
                e8m0::encode_even(amax, element.max_exponent(), element.mantissa_bits())
            }
        }
    }
}

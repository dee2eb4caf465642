//! `mxfp8-2d`: FP8 weights with one E8M0 scale per 32x32 tile; one copy of codes and scales serves
//! both orientations (docs/numerics.md 6.2).

use smallvec::smallvec;

use super::{Fp8Format, Mxfp8, Operand, Recipe, RecipeOptions, Role};
use crate::{
    Axis, BufferList, BufferSpec, Code, FormatError, KernelKey, MxScale, Origin, PaddedForm,
    ScaleRule, ScaleSource, SourceRounding, Usage,
};

/// MXFP8 with 32x32 blocks for weights; activations and gradients use 1-D blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mxfp8TwoD {
    /// FP8 codes; E4M3 unless set.
    pub format: Fp8Format,
    /// Rounding of the block scales.
    pub mx_scale: MxScale,
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
}

impl Default for Mxfp8TwoD {
    fn default() -> Self {
        Self {
            format: Fp8Format::E4M3,
            mx_scale: MxScale::default(),
            source_rounding: SourceRounding::default(),
        }
    }
}

impl Mxfp8TwoD {
    /// The name of the recipe.
    pub const NAME: &'static str = "mxfp8-2d";
    /// Block rows x columns.
    const BLOCK: [usize; 2] = [32, 32];

    /// The recipe with `options`, of which it has format, mx_scale and source_rounding.
    ///
    /// # Errors
    /// Any other option.
    pub fn from_options(options: &RecipeOptions) -> Result<Self, FormatError> {
        let (mut left, default) = (*options, Self::default());
        let recipe = Self {
            format: left.format.take().unwrap_or(default.format),
            mx_scale: left.mx_scale.take().unwrap_or(default.mx_scale),
            source_rounding: left.source_rounding.take().unwrap_or(default.source_rounding),
        };
        left.finish(Self::NAME).map(|()| recipe)
    }
}

impl Recipe for Mxfp8TwoD {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn kernel(&self) -> KernelKey {
        KernelKey {
            element: self.format.element(Role::Weight),
            scale: ScaleRule::E8M0(self.mx_scale),
            blocks: Some([Self::BLOCK; 2]),
        }
    }

    fn scale_source(&self) -> ScaleSource {
        ScaleSource::BlockAmax
    }

    fn buffers(&self, _: Usage) -> BufferList {
        let (serves, axes) = (Usage::BOTH, [Axis::Rows, Axis::Cols]);
        let (pad, origin) = (PaddedForm::TILES_128X4, Origin::Quantized);
        smallvec![
            BufferSpec::data(serves, self.format.element(Role::Weight), axes, origin),
            BufferSpec::block_scale(serves, Code::E8M0, axes, Self::BLOCK, pad, origin),
        ]
    }

    fn source_rounding(&self) -> SourceRounding {
        self.source_rounding
    }

    fn operand(&self, role: Role) -> Operand {
        let Self { format, mx_scale, source_rounding } = *self;
        match role {
            Role::Weight => Operand::of(self),
            Role::Activation | Role::Gradient => {
                Mxfp8 { format, mx_scale, source_rounding }.operand(role)
            }
        }
    }

    fn options(&self) -> RecipeOptions {
        RecipeOptions {
            format: Some(self.format),
            mx_scale: Some(self.mx_scale),
            source_rounding: Some(self.source_rounding),
            ..RecipeOptions::default()
        }
    }
}

//! `nvfp4-2d`: E2M1 weights with one E4M3 scale per 16x16 tile under one f32 tensor amax; the
//! columnwise operand is the transpose of the rowwise one (docs/numerics.md 7 and 9).

use super::{Nvfp4OneD, Operand, Recipe, RecipeOptions, Role};
use crate::{
    Axis, BufferKey, BufferList, BufferSpec, Code, FormatError, KernelKey, Origin, PaddedForm,
    Part, ScaleRule, ScaleSource, SourceRounding, Usage,
};

/// NVFP4 with 16x16 blocks for weights; activations and gradients use 1-D blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Nvfp4TwoD {
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
}

impl Nvfp4TwoD {
    /// The name of the recipe.
    pub const NAME: &'static str = "nvfp4-2d";
    /// Block rows x columns.
    const BLOCK: [usize; 2] = [16, 16];

    /// The recipe with `options`, of which it has source_rounding.
    ///
    /// # Errors
    /// Any other option.
    pub fn from_options(options: &RecipeOptions) -> Result<Self, FormatError> {
        let mut left = *options;
        let recipe = Self { source_rounding: left.source_rounding.take().unwrap_or_default() };
        left.finish(Self::NAME).map(|()| recipe)
    }
}

impl Recipe for Nvfp4TwoD {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn kernel(&self) -> KernelKey {
        KernelKey {
            element: Code::E2M1,
            scale: ScaleRule::TwoLevel,
            blocks: Some([Self::BLOCK; 2]),
        }
    }

    fn scale_source(&self) -> ScaleSource {
        ScaleSource::TensorAndBlockAmax
    }

    fn buffers(&self, usage: Usage) -> BufferList {
        let (code, pad) = (Code::E4M3, PaddedForm::TILES_128X4);
        let rowwise = |part| BufferKey::new(Usage::ROWWISE, part);
        let mut buffers = BufferList::new();
        if usage.contains(Usage::ROWWISE) {
            let (serves, axes) = (Usage::ROWWISE, [Axis::Rows, Axis::Cols]);
            let origin = Origin::Quantized;
            buffers.push(BufferSpec::data(serves, Code::E2M1, axes, origin));
            buffers.push(BufferSpec::block_scale(serves, code, axes, Self::BLOCK, pad, origin));
        }
        if usage.contains(Usage::COLUMNWISE) {
            let (serves, axes) = (Usage::COLUMNWISE, [Axis::Cols, Axis::Rows]);
            let origin = Origin::TransposeOf(rowwise(Part::Data));
            buffers.push(BufferSpec::data(serves, Code::E2M1, axes, origin));
            let origin = Origin::TransposeOf(rowwise(Part::BlockScale));
            buffers.push(BufferSpec::block_scale(serves, code, axes, Self::BLOCK, pad, origin));
        }
        buffers.push(BufferSpec::tensor_amax());
        buffers
    }

    fn source_rounding(&self) -> SourceRounding {
        self.source_rounding
    }

    fn operand(&self, role: Role) -> Operand {
        match role {
            Role::Weight => Operand::of(self),
            Role::Activation | Role::Gradient => {
                Nvfp4OneD { source_rounding: self.source_rounding }.operand(role)
            }
        }
    }

    fn options(&self) -> RecipeOptions {
        RecipeOptions {
            source_rounding: Some(self.source_rounding),
            ..RecipeOptions::default()
        }
    }
}

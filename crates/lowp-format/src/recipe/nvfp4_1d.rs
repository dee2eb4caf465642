//! `nvfp4-1d`: E2M1 elements with one E4M3 scale per 16 under one f32 tensor amax, quantized
//! along K and along M separately (docs/numerics.md 7).

use super::{Operand, Recipe, RecipeOptions, Role, Rounding};
use crate::{
    Axis, BufferList, BufferSpec, Code, FormatError, KernelKey, Origin, PaddedForm, ScaleRule,
    ScaleSource, SourceRounding, Usage,
};

/// NVFP4 with 1x16 and 16x1 blocks. Neither orientation can be derived from the other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Nvfp4OneD {
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
}

impl Nvfp4OneD {
    /// The name of the recipe.
    pub const NAME: &'static str = "nvfp4-1d";
    /// Block rows x columns, rowwise and columnwise.
    const BLOCKS: [[usize; 2]; 2] = [[1, 16], [16, 1]];

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

impl Recipe for Nvfp4OneD {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn kernel(&self) -> KernelKey {
        KernelKey {
            element: Code::E2M1,
            scale: ScaleRule::TwoLevel,
            blocks: Some(Self::BLOCKS),
        }
    }

    fn scale_source(&self) -> ScaleSource {
        ScaleSource::TensorAndBlockAmax
    }

    fn buffers(&self, usage: Usage) -> BufferList {
        let (code, pad, origin) = (Code::E4M3, PaddedForm::TILES_128X4, Origin::Quantized);
        let [row_block, col_block] = Self::BLOCKS;
        let mut buffers = BufferList::new();
        if usage.contains(Usage::ROWWISE) {
            let (serves, axes) = (Usage::ROWWISE, [Axis::Rows, Axis::Cols]);
            buffers.push(BufferSpec::data(serves, Code::E2M1, axes, origin));
            buffers.push(BufferSpec::block_scale(serves, code, axes, row_block, pad, origin));
        }
        if usage.contains(Usage::COLUMNWISE) {
            let (serves, axes) = (Usage::COLUMNWISE, [Axis::Cols, Axis::Rows]);
            buffers.push(BufferSpec::data(serves, Code::E2M1, axes, origin));
            buffers.push(BufferSpec::block_scale(serves, code, axes, col_block, pad, origin));
        }
        buffers.push(BufferSpec::tensor_amax());
        buffers
    }

    fn source_rounding(&self) -> SourceRounding {
        self.source_rounding
    }

    fn operand(&self, role: Role) -> Operand {
        let rounding = match role {
            Role::Gradient => Rounding::Stochastic,
            Role::Weight | Role::Activation => Rounding::Nearest,
        };
        Operand { rounding, hadamard: role != Role::Weight, ..Operand::of(self) }
    }

    fn options(&self) -> RecipeOptions {
        RecipeOptions {
            source_rounding: Some(self.source_rounding),
            ..RecipeOptions::default()
        }
    }
}

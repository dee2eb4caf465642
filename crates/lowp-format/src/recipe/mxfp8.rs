//! `mxfp8`: FP8 elements with one E8M0 scale per 32, quantized along K and along M separately
//! (docs/numerics.md 6).

use super::{Fp8Format, Operand, Recipe, RecipeOptions, Role};
use crate::{
    Axis, BufferList, BufferSpec, Code, FormatError, KernelKey, MxScale, Orientation, Origin,
    PaddedForm, ScaleRule, ScaleSource, SourceRounding, Usage,
};

/// MXFP8 with 1x32 and 32x1 blocks. Neither orientation can be derived from the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mxfp8 {
    /// FP8 codes; E4M3 unless set.
    pub format: Fp8Format,
    /// Rounding of the block scales.
    pub mx_scale: MxScale,
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
}

impl Default for Mxfp8 {
    fn default() -> Self {
        Self {
            format: Fp8Format::E4M3,
            mx_scale: MxScale::default(),
            source_rounding: SourceRounding::default(),
        }
    }
}

impl Mxfp8 {
    /// The name of the recipe.
    pub const NAME: &'static str = "mxfp8";
    /// Block rows x columns, rowwise and columnwise.
    const BLOCKS: [[usize; 2]; 2] = [[1, 32], [32, 1]];

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

    fn kernel_of(&self, role: Role) -> KernelKey {
        KernelKey {
            element: self.format.element(role),
            scale: ScaleRule::E8M0(self.mx_scale),
            blocks: Some(Self::BLOCKS),
        }
    }

    fn buffers_of(&self, role: Role, usage: Usage) -> BufferList {
        let element = self.format.element(role);
        let axes = [Axis::Rows, Axis::Cols];
        let pad = PaddedForm::TILES_128X4;
        let mut buffers = BufferList::new();
        for orientation in Orientation::ALL {
            let serves = orientation.usage();
            if usage.contains(serves) {
                let block = Self::BLOCKS[orientation as usize];
                let origin = Origin::Quantized;
                buffers.push(BufferSpec::data(serves, element, axes, origin));
                buffers
                    .push(BufferSpec::block_scale(serves, Code::E8M0, axes, block, pad, origin));
            }
        }
        buffers
    }
}

impl Recipe for Mxfp8 {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn kernel(&self) -> KernelKey {
        self.kernel_of(Role::Weight)
    }

    fn scale_source(&self) -> ScaleSource {
        ScaleSource::BlockAmax
    }

    fn buffers(&self, usage: Usage) -> BufferList {
        self.buffers_of(Role::Weight, usage)
    }

    fn source_rounding(&self) -> SourceRounding {
        self.source_rounding
    }

    fn operand(&self, role: Role) -> Operand {
        let buffers = self.buffers_of(role, Usage::BOTH);
        Operand { kernel: self.kernel_of(role), buffers, ..Operand::of(self) }
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

//! `fp32`: no quantization. The baseline, and the parameters that stay in high precision.

use smallvec::smallvec;

use super::{Recipe, RecipeOptions};
use crate::{
    Axis, BufferList, BufferSpec, Code, FormatError, KernelKey, Origin, ScaleRule, ScaleSource,
    Usage,
};

/// IEEE-754 binary32 values; one copy serves both orientations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlainF32;

impl PlainF32 {
    /// The name of the recipe.
    pub const NAME: &'static str = "fp32";

    /// The recipe; it has no options.
    ///
    /// # Errors
    /// Any option.
    pub fn from_options(options: &RecipeOptions) -> Result<Self, FormatError> {
        options.finish(Self::NAME).map(|()| Self)
    }
}

impl Recipe for PlainF32 {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn kernel(&self) -> KernelKey {
        KernelKey { element: Code::F32, scale: ScaleRule::None, blocks: None }
    }

    fn scale_source(&self) -> ScaleSource {
        ScaleSource::None
    }

    fn buffers(&self, _: Usage) -> BufferList {
        let axes = [Axis::Rows, Axis::Cols];
        smallvec![BufferSpec::data(Usage::BOTH, Code::F32, axes, Origin::Quantized)]
    }
}

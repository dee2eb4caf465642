//! `bf16`: no scales. The usual precision of weights on the wire.

use smallvec::smallvec;

use super::{Recipe, RecipeOptions};
use crate::{
    Axis, BufferList, BufferSpec, Code, FormatError, KernelKey, Origin, ScaleRule, ScaleSource,
    Usage,
};

/// bfloat16 values, rounded to nearest with ties to even; one copy serves both orientations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlainBf16;

impl PlainBf16 {
    /// The name of the recipe.
    pub const NAME: &'static str = "bf16";

    /// The recipe; it has no options.
    ///
    /// # Errors
    /// Any option.
    pub fn from_options(options: &RecipeOptions) -> Result<Self, FormatError> {
        options.finish(Self::NAME).map(|()| Self)
    }
}

impl Recipe for PlainBf16 {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn kernel(&self) -> KernelKey {
        KernelKey { element: Code::Bf16, scale: ScaleRule::None, blocks: None }
    }

    fn scale_source(&self) -> ScaleSource {
        ScaleSource::None
    }

    fn buffers(&self, _: Usage) -> BufferList {
        let axes = [Axis::Rows, Axis::Cols];
        smallvec![BufferSpec::data(Usage::BOTH, Code::Bf16, axes, Origin::Quantized)]
    }
}

//! `fp8-delayed`: one f32 scale per tensor, taken from the amaxes of earlier steps
//! (docs/numerics.md 4).

use super::fp8_current::per_tensor_buffers;
use super::{Fp8Format, Operand, Recipe, RecipeOptions, Role};
use crate::{
    AmaxAlgorithm, BufferList, Code, FormatError, KernelKey, ScaleRule, ScaleSource,
    SourceRounding, Usage,
};

/// Per-tensor FP8 with delayed scaling. The scale is known before the values are, so a cast is
/// one pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8Delayed {
    /// FP8 codes; HYBRID unless set.
    pub format: Fp8Format,
    /// Binary orders of headroom; 0 unless set.
    pub margin: i32,
    /// Length of the amax history; 1024 unless set.
    pub history: usize,
    /// Which entry of the history counts; the largest unless set.
    pub amax_algorithm: AmaxAlgorithm,
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
}

impl Default for Fp8Delayed {
    fn default() -> Self {
        Self {
            format: Fp8Format::Hybrid,
            margin: 0,
            history: 1024,
            amax_algorithm: AmaxAlgorithm::default(),
            source_rounding: SourceRounding::default(),
        }
    }
}

impl Fp8Delayed {
    /// The name of the recipe.
    pub const NAME: &'static str = "fp8-delayed";

    /// The recipe with `options`, of which it has format, margin, history, amax_algorithm and source_rounding.
    ///
    /// # Errors
    /// Any other option, or an empty history.
    pub fn from_options(options: &RecipeOptions) -> Result<Self, FormatError> {
        let (mut left, default) = (*options, Self::default());
        let recipe = Self {
            format: left.format.take().unwrap_or(default.format),
            margin: left.margin.take().unwrap_or(default.margin),
            history: left.history.take().unwrap_or(default.history),
            amax_algorithm: left.amax_algorithm.take().unwrap_or(default.amax_algorithm),
            source_rounding: left.source_rounding.take().unwrap_or(default.source_rounding),
        };
        left.finish(Self::NAME)?;
        if recipe.history == 0 {
            return Err(FormatError::OptionValue {
                option: "history",
                value: "0".to_owned(),
                expected: "at least 1",
            });
        }
        if !(-64..=64).contains(&recipe.margin) {
            return Err(FormatError::OptionValue {
                option: "margin",
                value: recipe.margin.to_string(),
                expected: "-64 to 64 binary orders",
            });
        }
        Ok(recipe)
    }

    fn kernel_of(element: Code) -> KernelKey {
        KernelKey { element, scale: ScaleRule::Tensor, blocks: None }
    }
}

impl Recipe for Fp8Delayed {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn kernel(&self) -> KernelKey {
        Self::kernel_of(self.format.element(Role::Weight))
    }

    fn scale_source(&self) -> ScaleSource {
        let Self { history: window, amax_algorithm: algorithm, margin, .. } = *self;
        ScaleSource::History { window, algorithm, margin }
    }

    fn buffers(&self, usage: Usage) -> BufferList {
        per_tensor_buffers(self.format.element(Role::Weight), usage)
    }

    fn source_rounding(&self) -> SourceRounding {
        self.source_rounding
    }

    fn operand(&self, role: Role) -> Operand {
        let element = self.format.element(role);
        let buffers = per_tensor_buffers(element, Usage::BOTH);
        Operand { kernel: Self::kernel_of(element), buffers, ..Operand::of(self) }
    }

    fn options(&self) -> RecipeOptions {
        RecipeOptions {
            format: Some(self.format),
            margin: Some(self.margin),
            history: Some(self.history),
            amax_algorithm: Some(self.amax_algorithm),
            source_rounding: Some(self.source_rounding),
            ..RecipeOptions::default()
        }
    }
}

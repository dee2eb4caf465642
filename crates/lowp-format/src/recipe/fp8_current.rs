//! `fp8-current`: one f32 scale per tensor, taken from its amax now (docs/numerics.md 5).

use super::{Fp8Format, Operand, Recipe, RecipeOptions, Role};
use crate::{
    Axis, BufferKey, BufferList, BufferSpec, Code, FormatError, KernelKey, Origin, Part, ScaleRule,
    ScaleSource, SourceRounding, Usage,
};

/// Per-tensor FP8 with current scaling. The amax must be agreed by all ranks before the cast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8Current {
    /// FP8 codes; HYBRID unless set.
    pub format: Fp8Format,
    /// Round the scale down to a power of two; off unless set.
    pub pow2: bool,
    /// Lower bound of the amax; 0 unless set.
    pub epsilon: f32,
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
}

impl Default for Fp8Current {
    fn default() -> Self {
        Self {
            format: Fp8Format::Hybrid,
            pow2: false,
            epsilon: 0.0,
            source_rounding: SourceRounding::default(),
        }
    }
}

impl Fp8Current {
    /// The name of the recipe.
    pub const NAME: &'static str = "fp8-current";

    /// The recipe with `options`, of which it has format, pow2, epsilon and source_rounding.
    ///
    /// # Errors
    /// Any other option, or an epsilon that is negative or not finite.
    pub fn from_options(options: &RecipeOptions) -> Result<Self, FormatError> {
        let (mut left, default) = (*options, Self::default());
        let recipe = Self {
            format: left.format.take().unwrap_or(default.format),
            pow2: left.pow2.take().unwrap_or(default.pow2),
            epsilon: left.epsilon.take().unwrap_or(default.epsilon),
            source_rounding: left.source_rounding.take().unwrap_or(default.source_rounding),
        };
        left.finish(Self::NAME)?;
        if !recipe.epsilon.is_finite() || recipe.epsilon < 0.0 {
            return Err(FormatError::OptionValue {
                option: "epsilon",
                value: recipe.epsilon.to_string(),
                expected: "0 or a positive finite number",
            });
        }
        Ok(recipe)
    }

    fn kernel_of(element: Code) -> KernelKey {
        KernelKey { element, scale: ScaleRule::Tensor, blocks: None }
    }
}

/// Rowwise data, columnwise data as its byte transpose, and one shared decode scale.
pub(super) fn per_tensor_buffers(element: Code, usage: Usage) -> BufferList {
    let rowwise = BufferKey::new(Usage::ROWWISE, Part::Data);
    let mut buffers = BufferList::new();
    if usage.contains(Usage::ROWWISE) {
        let axes = [Axis::Rows, Axis::Cols];
        buffers.push(BufferSpec::data(Usage::ROWWISE, element, axes, Origin::Quantized));
    }
    if usage.contains(Usage::COLUMNWISE) {
        let axes = [Axis::Cols, Axis::Rows];
        let origin = Origin::TransposeOf(rowwise);
        buffers.push(BufferSpec::data(Usage::COLUMNWISE, element, axes, origin));
    }
    buffers.push(BufferSpec::decode_scale());
    buffers
}

impl Recipe for Fp8Current {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn kernel(&self) -> KernelKey {
        Self::kernel_of(self.format.element(Role::Weight))
    }

    fn scale_source(&self) -> ScaleSource {
        ScaleSource::TensorAmax { pow2: self.pow2, epsilon: self.epsilon }
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
            pow2: Some(self.pow2),
            epsilon: Some(self.epsilon),
            source_rounding: Some(self.source_rounding),
            ..RecipeOptions::default()
        }
    }
}

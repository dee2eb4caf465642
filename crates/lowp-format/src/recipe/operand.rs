//! [`Operand`]: how a GEMM operand is quantized while a weight lives in a recipe.

use crate::{BufferList, KernelKey, Recipe, ScaleSource, SourceRounding, Usage};

/// What a tensor is in a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A parameter.
    Weight,
    /// The input of the forward GEMM.
    Activation,
    /// The gradient of the output.
    Gradient,
}

/// How values are rounded to element codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To nearest, ties to even.
    #[default]
    Nearest,
    /// Up or down with a probability that keeps the expected value (E2M1 only).
    Stochastic,
}

/// The quantization of one operand, as data. It is ephemeral: never sharded, gathered or saved.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// The ingredients of its kernels.
    pub kernel: KernelKey,
    /// What its scales depend on.
    pub scale_source: ScaleSource,
    /// How its source is rounded first.
    pub source_rounding: SourceRounding,
    /// Its buffers for both usages.
    pub buffers: BufferList,
    /// How its values are rounded.
    pub rounding: Rounding,
    /// Whether operands of the weight-gradient GEMM pass a random Hadamard transform along their
    /// rows first.
    pub hadamard: bool,
    /// The orientations in which a product reads it quantized. In the others it reads the values
    /// themselves, which still pass the Hadamard transform, because the other operand does.
    pub quantized: Usage,
}

impl Operand {
    /// An operand quantized exactly as `recipe` quantizes a tensor.
    pub fn of(recipe: &impl Recipe) -> Self {
        Self {
            kernel: recipe.kernel(),
            scale_source: recipe.scale_source(),
            source_rounding: recipe.source_rounding(),
            buffers: recipe.buffers(Usage::BOTH),
            rounding: Rounding::Nearest,
            hadamard: false,
            quantized: Usage::BOTH,
        }
    }
}

//! [`Operand`]: how a GEMM operand is quantized while a weight lives in a recipe.

use crate::{BufferList, Quantizers, SourceRounding, Usage};

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

impl Role {
    /// Every role.
    pub const ALL: [Role; 3] = [Role::Weight, Role::Activation, Role::Gradient];
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

impl Rounding {
    /// How a tensor in `role` is rounded where gradients are rounded so, and everything else to nearest.
    pub(super) fn of_gradients(self, role: Role) -> Self {
        match role {
            Role::Gradient => self,
            Role::Weight | Role::Activation => Self::Nearest,
        }
    }
}

/// The quantization of one operand, as data. It is ephemeral: never sharded, gathered or saved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operand {
    /// How each orientation is quantized. Where the columnwise one passes a Hadamard transform, an operand that is not
    /// quantized there passes it, too, because the other operand of the product does.
    pub quantizers: Quantizers,
    /// How its source is rounded first.
    pub source_rounding: SourceRounding,
    /// How its values are rounded.
    pub rounding: Rounding,
    /// The orientations in which a product reads it quantized. In the others it reads the values themselves.
    pub quantized: Usage,
}

impl Operand {
    /// Buffers of the operand for both usages.
    pub fn buffers(&self) -> BufferList {
        self.quantizers.buffers(Usage::BOTH)
    }
}

//! [`Fp8Format`]: which FP8 codes a recipe uses.

use super::Role;
use crate::Code;

/// Which FP8 codes a recipe uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Format {
    /// E4M3 for every tensor.
    E4M3,
    /// E5M2 for every tensor. For gradient tensors and files; training rejects it for weights.
    E5M2,
    /// E4M3 for weights and activations, E5M2 for gradients.
    Hybrid,
}

impl Fp8Format {
    /// The element code of a tensor in `role`.
    pub const fn element(self, role: Role) -> Code {
        match (self, role) {
            (Fp8Format::E5M2, _) | (Fp8Format::Hybrid, Role::Gradient) => Code::E5M2,
            _ => Code::E4M3,
        }
    }
}

//! [`RecipeOptions`]: the options of all recipes as text-friendly values.

use crate::{AmaxAlgorithm, Code, FormatError, MxScale, SourceRounding};

use super::Role;

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

/// Options by name. `None` means the recipe's default; a recipe rejects what it does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecipeOptions {
    /// FP8 codes.
    pub format: Option<Fp8Format>,
    /// Binary orders of headroom of a delayed scale.
    pub margin: Option<i32>,
    /// Length of the amax history of delayed scaling.
    pub history: Option<usize>,
    /// Which entry of the amax history counts.
    pub amax_algorithm: Option<AmaxAlgorithm>,
    /// Round per-tensor scales down to a power of two.
    pub pow2: Option<bool>,
    /// Lower bound of the amax of a per-tensor scale.
    pub epsilon: Option<f32>,
    /// Rounding of E8M0 block scales.
    pub mx_scale: Option<MxScale>,
    /// Rounding of the source before amax and encode. Every quantizing recipe has it.
    pub source_rounding: Option<SourceRounding>,
}

impl RecipeOptions {
    /// Whether no option is left; the caller takes those of `recipe` out of a copy.
    ///
    /// # Errors
    /// Names the first option left.
    pub fn finish(self, recipe: &'static str) -> Result<(), FormatError> {
        let left = [
            (self.format.is_some(), "format"),
            (self.margin.is_some(), "margin"),
            (self.history.is_some(), "history"),
            (self.amax_algorithm.is_some(), "amax_algorithm"),
            (self.pow2.is_some(), "pow2"),
            (self.epsilon.is_some(), "epsilon"),
            (self.mx_scale.is_some(), "mx_scale"),
            (self.source_rounding.is_some(), "source_rounding"),
        ];
        match left.into_iter().find(|(set, _)| *set) {
            Some((_, option)) => Err(FormatError::UnusedOption { recipe, option }),
            None => Ok(()),
        }
    }
}

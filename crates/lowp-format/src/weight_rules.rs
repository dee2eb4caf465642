//! Questions about the weights of a recipe, answered from its kernels.

use crate::{Code, Extent, KernelKey, Recipe, Role};

/// Whether a scale of weights in `recipe` follows from the amax of the whole tensor.
pub fn has_tensor_scale(recipe: &impl Recipe) -> bool {
    let kernels = recipe.quantizers(Role::Weight).kernels();
    let of_tensor = |key: &KernelKey| matches!(key.scale.outer(), Some((Extent::Tensor, _)));
    kernels.iter().any(of_tensor)
}

/// The element codes of a weight: `E4M3`, or `E2M1 and E4M3` where the orientations differ.
pub fn elements_of(recipe: &impl Recipe) -> String {
    let kernels = recipe.quantizers(Role::Weight).kernels();
    let [row, col]: [Code; 2] = kernels.map(|key| key.element);
    if row == col {
        return row.to_string();
    }
    format!("{row} and {col}")
}

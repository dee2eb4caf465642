//! Questions about the weights of a recipe, answered from its kernels.

use crate::{
    Code, Extent, FormatError, KernelKey, Quantizer, Quantizers, Recipe, Role, ScaleRule, Shape,
    lcm,
};

/// Whether a scale of weights in `recipe` follows from the amax of the whole tensor.
pub fn has_tensor_scale(recipe: &impl Recipe) -> bool {
    let kernels = recipe.quantizers(Role::Weight).kernels();
    let of_tensor = |key: &KernelKey| matches!(key.scale.outer(), Some((Extent::Tensor, _)));
    kernels.iter().any(of_tensor)
}

/// Whether weights in `recipe` are values in bf16 in the order of rows, in one copy.
pub fn is_in_bf16(recipe: &impl Recipe) -> bool {
    let bf16 = KernelKey::new(Code::Bf16, ScaleRule::None);
    recipe.quantizers(Role::Weight) == Quantizers::shared(Quantizer::row_major(bf16))
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

/// The shape of a linear layer against the blocks of its weight, of its input, whose columns are those of the weight, and of the gradient of
/// its output, whose columns are the weight's rows.
///
/// # Errors
/// The columns of one of them.
pub fn check_layer(recipe: &impl Recipe, shape: Shape) -> Result<(), FormatError> {
    recipe.check(shape)?;
    for (role, cols) in [(Role::Activation, shape.cols), (Role::Gradient, shape.rows)] {
        let operand = recipe.operand(role);
        for orientation in operand.quantized.orientations() {
            let buffers = operand.quantizers.buffers(orientation.usage());
            let quanta = buffers.iter().map(|buffer| buffer.col_quantum());
            let multiple = quanta.fold(1, lcm);
            if !cols.is_multiple_of(multiple) {
                return Err(FormatError::Columns {
                    recipe: recipe.name(),
                    shape: Shape::new(shape.cols, shape.rows),
                    multiple,
                });
            }
        }
    }
    Ok(())
}

/// What [`check_layer`] found of the layer of this name, in words.
pub fn layer_error(name: &str, shape: Shape, recipe: &str, error: &FormatError) -> String {
    match error {
        FormatError::Columns {
            shape: wrong,
            multiple,
            ..
        } => {
            let what = if *wrong == shape { "columns" } else { "rows" };
            format!(
                "layer {name} is {shape}, and {recipe} needs {what} at a multiple of {multiple}"
            )
        }
        other => format!("layer {name}: {other}"),
    }
}

//! What the index of a checkpoint says of a quantized weight: all that its bytes follow from.

use lowp_format::{Recipe, Role, Shape};
use serde_json::{Map, Value, json};

/// The key that records of other parameters do not have.
const KERNELS: &str = "kernels";

/// The record of weights of `shape` in `recipe`.
pub fn weight_record(recipe: &impl Recipe, shape: Shape) -> Value {
    let options = recipe.options();
    let options: Map<String, Value> = options
        .iter()
        .map(|(name, value)| (name.to_owned(), json!(value)))
        .collect();
    json!({
        "recipe": recipe.name(),
        "options": options,
        "shape": [shape.rows, shape.cols],
        // Also what changes a recipe without being one of its options.
        KERNELS: format!("{:?} {:?}", recipe.quantizers(Role::Weight), recipe.source_rounding()),
    })
}

/// Whether `record` is one of a quantized weight.
pub fn is_weight_record(record: &Value) -> bool {
    record.get(KERNELS).is_some()
}

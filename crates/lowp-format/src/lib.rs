//! What the bytes of a low-precision tensor mean: element codes, scale rules, recipes, buffer
//! layouts and gather plans. Pure values and pure functions: no I/O, no threads, no device.
//!
//! A [`Recipe`] is a `Copy` value. For each orientation ([`Quantizers`]) it defines which buffers a quantized tensor
//! consists of ([`BufferSpec`]) and which arithmetic fills them ([`KernelKey`]). Shapes, padding, slicing, gathering
//! and accounting are derived from these definitions by code that all recipes share.
//!
//! # Example
//!
//! ```
//! use lowp_format::{AnyRecipe, GatherPlan, Recipe, RecipeOptions, Shape, Usage};
//!
//! let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
//! let shape = Shape::new(192, 64);
//! for spec in recipe.buffers(Usage::ROWWISE) {
//!     println!("{}: {} bytes", spec.key, spec.bytes(shape));
//! }
//! let plan = GatherPlan::new(&recipe, shape, 4, Usage::ROWWISE)?;
//! assert_eq!(plan.wire_bytes(), 192 * 64 + 192 * 64 / 32);
//! # Ok::<(), lowp_format::FormatError>(())
//! ```
#![forbid(unsafe_code)]

pub mod codec;
pub mod spelling;

mod block_cuts;
mod buffer;
mod buffer_key;
mod code;
mod cuts;
mod describe;
mod error;
mod gather;
mod hadamard;
mod philox;
mod quantizer;
mod recipe;
mod reshard;
mod scale_layout;
mod scale_rule;
mod shape;
mod shard_tiles;
mod state_block;
mod table;
mod tensor;
mod two_level;
mod usage;
mod weight_rules;
mod words;

pub use block_cuts::{BlockCuts, block_cuts};
pub use buffer::{Axis, BufferList, BufferSpec, Origin, PaddedForm};
pub use buffer_key::{BufferKey, Part};
pub use code::Code;
pub use cuts::RowCuts;
pub use describe::{buffers_table, gather_table, layout_map, ranks_table};
pub use error::FormatError;
pub use gather::{GatherPlan, GatherStep, Phase, PhasePlans, PieceLayout};
pub use hadamard::{HADAMARD_ROWS, HADAMARD_SIGNS, hadamard_rows, hadamard16, rotate_rows};
pub use philox::Philox;
pub use quantizer::{Columnwise, Quantizer, Quantizers};
pub use recipe::*;
pub use reshard::ReshardAfterForward;
pub use scale_layout::{Form, ScaleLayout};
pub use scale_rule::{
    AmaxAlgorithm, Extent, KernelKey, MxScale, ScaleRule, SourceRounding, delayed_numerator,
    history, magnitude, tensor_scale,
};
pub use shape::Shape;
pub use shard_tiles::{ShardTiles, TileRange};
pub use state_block::{STATE_BLOCK, StateBits, StateCode, state_bytes};
pub use table::Table;
pub use tensor::{Buffer, QuantizedTensor};
pub use two_level::*;
pub use usage::{Orientation, Usage};
pub use weight_rules::{check_layer, elements_of, has_tensor_scale, is_in_bf16, layer_error};
pub use words::RecipeWords;

/// The greatest common divisor of `a` and `b`: the other one if one of them is 0.
pub const fn gcd(a: usize, b: usize) -> usize {
    let (mut gcd, mut rest) = (a, b);
    while rest != 0 {
        (gcd, rest) = (rest, gcd % rest);
    }
    gcd
}

/// The least common multiple of `a` and `b`: 0 if one of them is, and [`usize::MAX`] if it does not fit.
pub const fn lcm(a: usize, b: usize) -> usize {
    match gcd(a, b) {
        0 => 0,
        gcd => (a / gcd).saturating_mul(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_common_multiple_is_the_first_that_both_divide() {
        for a in 1..=24 {
            for b in 1..=24 {
                let common = (1..).find(|m| m % a == 0 && m % b == 0);
                assert_eq!(Some(lcm(a, b)), common, "{a} and {b}");
            }
        }
        assert_eq!([lcm(0, 0), lcm(0, 3), lcm(3, 0)], [0; 3]);
        assert_eq!(lcm(usize::MAX, usize::MAX - 1), usize::MAX);
    }
}

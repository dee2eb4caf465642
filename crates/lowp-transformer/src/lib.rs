//! Transformers that train on GPUs: weights live in a recipe's codes, sharded as a [`lowp_candle::ShardedModel`] has them, and
//! activations and gradients in bf16; none of them leaves the device.
//!
//! A linear layer multiplies what it holds. Where the hardware multiplies codes, it gets them ([`product`] is the table of that);
//! elsewhere operands are decoded to bf16 first. Norms, softmax and the loss are f32 arithmetic.
//!
//! ```
//! use lowp_format::{AnyRecipe, Recipe};
//! use lowp_transformer::product::{Pass, Product};
//!
//! let hopper = (9, 0);
//! for recipe in AnyRecipe::all() {
//!     for pass in Pass::ALL {
//!         let product = Product::of_recipe(&recipe, pass, hopper);
//!         println!("{}: {} in {}", recipe.name(), pass.name(), product.describe());
//!         // Ampere multiplies no codes.
//!         assert_eq!(Product::of_recipe(&recipe, pass, (8, 0)), Product::Bf16);
//!     }
//! }
//! ```

pub mod product;

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", test))]
mod known;
#[cfg(any(feature = "cuda", test))]
mod params;
mod sizes;

#[cfg(feature = "cuda")]
pub use cuda::{
    GATHERS, Gathers, MicroBatch, Profile, Spent, Tokens, Transformer, TransformerError, capability,
};
pub use sizes::{Block, Sizes};

//! Transformers that train on GPUs. Weights are stored as codes of a recipe, sharded by a [`lowp_fsdp::ShardedModel`]; activations and
//! gradients are bf16. All of them stay on the device.
//!
//! A linear layer multiplies codes if the hardware can ([`lowp_gemm::table`] lists the products); otherwise its operands are decoded to
//! bf16 first. Norms, softmax and the loss are f32 arithmetic.
//!
//! ```
//! use lowp_transformer::{Block, Sizes};
//!
//! let sizes = Sizes { dim: 256, layers: 2, heads: 4, seq: 128, vocab: 512, block: Block::Gpt };
//! assert_eq!(sizes.linears()[..2], [[768, 256], [256, 256]]);
//! // A head of 8 values is too narrow for a GPU.
//! assert!(Sizes { heads: 32, ..sizes }.check().is_err());
//! ```

#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "a plan needs the bytes alone")
)]
mod attention_slice;
#[cfg(feature = "cuda")]
mod cuda;
mod gpt_check;
mod gpt_config;
mod hub;
#[cfg(any(feature = "cuda", test))]
mod known;
#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "a plan needs the bytes alone")
)]
mod linear_plan;
mod llama;
mod memory;
#[cfg(any(feature = "cuda", test))]
mod params;
#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "a plan needs the bytes alone")
)]
mod places;
mod rope;
mod sizes;

#[cfg(feature = "cuda")]
pub use cuda::{Gathers, Profile, Tokens, Transformer, TransformerError, capability, has_cudnn};
pub use gpt_check::SizeError;
pub use gpt_config::{Arch, GptConfig};
pub use hub::{HubError, HubModel};
pub use llama::{Family, Llama};
pub use memory::{HOPPER, MicroBatch, ModelMemory};
pub use places::CudnnPasses;
pub use rope::{Rope, RopeScaling};
pub use sizes::{Block, LlamaSizes, Sizes};

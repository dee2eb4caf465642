//! candle layers whose weights are sharded, quantized parameters.
//!
//! A [`QuantLinear`] is a linear layer whose weight is not a candle variable. The layer gets the weight when it runs
//! ([`WeightSource::with_weight`], once in forward and once in backward) and releases it after use; the gradient of the weight
//! does not go to candle's gradient store, but to the source of the weight. Between the two calls nothing holds the full weight,
//! so a rank needs only a low-precision shard of it. [`layers`] makes such layers for the weights of a
//! [`lowp_fsdp::ShardedModel`]. Of its other parameters [`CandleVars`] has those that are used throughout, and [`transients`] are embeddings
//! and heads, which are gathered for each use; [`transformer`] builds GPT and Llama from all of them, which `lowp train` trains.
//!
//! Each rank is a thread. Set `CANDLE_NUM_THREADS=1` before the first tensor is made: candle's worker pool is shared by
//! all threads of the process and waits by spinning.
//!
//! ```
//! use lowp_candle::{Linear, MemoryWeight, QuantLinear};
//! use candle_core::{Device, Tensor};
//! use std::sync::Arc;
//!
//! let weight = Arc::new(MemoryWeight::new(2, 3, vec![1.0, 0.0, 0.0, 0.0, 1.0, 1.0])?);
//! let layer = QuantLinear::new(weight.clone(), 1);
//! let x = Tensor::new(&[[1.0f32, 2.0, 3.0]], &Device::Cpu)?;
//! let y = layer.forward(&x)?;
//! assert_eq!(y.to_vec2::<f32>()?, [[1.0, 5.0]]);
//! # Ok::<(), candle_core::Error>(())
//! ```

pub mod custom_op;
mod error;
mod linear;
mod memory_weight;
mod model;
pub mod transformer;
mod transient;

pub use error::CandleError;
pub use linear::{Exact, Linear, OperandCast, QuantLinear, WeightSource};
pub use lowp_gemm::dense::{MatMut, MatRef, matmul, product};
pub use memory_weight::MemoryWeight;
pub use model::{CandleVars, layers};
pub use transient::transients;

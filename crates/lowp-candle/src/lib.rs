//! candle layers whose weights are sharded, quantized parameters.
//!
//! A [`QuantLinear`] is a linear layer whose weight is not a candle variable: it is fetched when the layer runs
//! ([`WeightSource::with_weight`], once forward and once backward), used, and given back; the weight's gradient goes
//! to a sink instead of candle's gradient store. Between the two calls nothing holds the full weight, which is what
//! lets a rank own only a low-precision shard of it. [`layers`] are those over the weights of a [`lowp_fsdp::ShardedModel`], and
//! [`CandleVars`] its other parameters; [`transformer`] has GPT and Llama on them, which `lowp train` trains.
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
mod gemm;
mod linear;
mod memory_weight;
mod model;
pub mod transformer;

pub use error::CandleError;
pub use gemm::{MatMut, MatRef, matmul, product};
pub use linear::{Exact, Linear, OperandCast, QuantLinear, WeightSource};
pub use memory_weight::MemoryWeight;
pub use model::{CandleVars, layers};

//! [`TransformerError`]: what can be wrong with a transformer on a GPU.

use lowp_candle::ModelError;
use lowp_kernels::KernelError;
use lowp_shard::ShardError;
use thiserror::Error;

/// What is wrong.
#[derive(Debug, Error)]
pub enum TransformerError {
    /// cuBLASLt was not found.
    #[error(
        "NVIDIA's cuBLASLt (libcublasLt.so.13 or .12) was not found; install CUDA's libraries and have their folder in \
         LD_LIBRARY_PATH, for example /usr/local/cuda/lib64"
    )]
    NoCublas,
    /// cuBLASLt has no kernel for a product.
    #[error(
        "cuBLASLt has no kernel for {product} ({why}); products of codes with scales per row or per 128 need cuBLASLt 12.9 or later: \
         install it, or take another recipe (`lowp recipes --device cuda`)"
    )]
    NoProduct {
        /// The product.
        product: String,
        /// Its status.
        why: String,
    },
    /// Sizes or a recipe that the model cannot take.
    #[error("{0}")]
    Unsupported(String),
    /// A batch that is not what the model was built for.
    #[error("a batch of {found} tokens for a model of {expected}")]
    Batch {
        /// Tokens given.
        found: usize,
        /// Tokens of the model's batch.
        expected: usize,
    },
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A gather, a reduction or another rank failed.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The sharded model failed.
    #[error(transparent)]
    Model(#[from] ModelError),
}

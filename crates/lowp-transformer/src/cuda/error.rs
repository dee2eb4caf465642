//! [`TransformerError`]: what can be wrong with a transformer on a GPU.

use lowp_comm::CommError;
use lowp_fsdp::ModelError;
use lowp_gemm::GemmError;
use lowp_kernels::KernelError;
use lowp_shard::ShardError;
use thiserror::Error;

/// What is wrong.
#[derive(Debug, Error)]
pub enum TransformerError {
    /// A product does not run.
    #[error(transparent)]
    Gemm(#[from] GemmError),
    /// Sizes or a recipe that the model cannot take.
    #[error("{0}")]
    Unsupported(String),
    /// A batch that is not what the model was built for.
    #[error("the batch has {found} tokens, but the model was made for {expected}")]
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

impl From<CommError> for TransformerError {
    fn from(error: CommError) -> Self {
        ShardError::from(error).into()
    }
}

//! [`CandleError`]: what can be wrong with a sharded model that candle runs.

use lowp_comm::CommError;
use lowp_format::FormatError;
use lowp_fsdp::ModelError;
use lowp_kernels::KernelError;
use lowp_optim::OptimError;
use lowp_shard::ShardError;
use thiserror::Error;

/// What is wrong.
#[derive(Debug, Error)]
pub enum CandleError {
    /// A variable that the loss does not depend on.
    #[error("variable '{name}' has no gradient; use it in the loss, or leave it out of the model")]
    NoGradient {
        /// Its name.
        name: String,
    },
    /// The sharded model failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// What stands below a sharded model.
macro_rules! from {
    ($($error:ty),+) => {$(
        impl From<$error> for CandleError {
            fn from(error: $error) -> Self {
                Self::Model(error.into())
            }
        }
    )+};
}

from!(CommError, FormatError, KernelError, OptimError, ShardError);

/// As candle's operations report it.
impl From<CandleError> for candle_core::Error {
    fn from(error: CandleError) -> Self {
        match error {
            CandleError::Candle(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}

//! What gathers, reduce-scatters and optimizer steps of 1 billion parameters cost over ranks on GPUs: the rows of `lowp bench --ranks`,
//! which [`Bandwidth`](crate::cost::Bandwidth) reads.

#[cfg(feature = "cuda")]
mod by_size;
#[cfg(feature = "cuda")]
mod offload;
#[cfg(feature = "cuda")]
mod rank;

#[cfg(feature = "cuda")]
use std::sync::Arc;

use lowp_comm::CommError;
#[cfg(feature = "cuda")]
use lowp_comm::Communicator;
use lowp_format::FormatError;
#[cfg(feature = "cuda")]
use lowp_kernels::Cuda;
use lowp_kernels::KernelError;
use lowp_optim::OptimError;
use lowp_shard::ShardError;
use serde::Serialize;
use thiserror::Error;

#[cfg(feature = "cuda")]
type Result<T> = std::result::Result<T, BenchError>;

/// What can go wrong in a measurement.
#[derive(Debug, Error)]
pub enum BenchError {
    /// No recipe to measure something with.
    #[error("no recipe {what}")]
    NoRecipe {
        /// Which one.
        what: &'static str,
    },
    /// A shape that a recipe cannot take.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The device.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Shards and gathers.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The optimizer.
    #[error(transparent)]
    Optim(#[from] OptimError),
}

/// How much is measured, the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Timed runs per row.
    pub runs: usize,
    /// What both sides of every shape are divided by.
    pub shrink: usize,
    /// Whether only steps are measured, with masters and states in page-locked memory of the host.
    pub offload: bool,
}

/// One operation of all ranks.
#[derive(Clone, Debug, Serialize)]
pub struct RankRow {
    /// What was measured, in words.
    pub operation: String,
    /// The recipe, the dtype of gradients, or `any`.
    pub recipe: String,
    /// Bytes of the full buffers of a gather, or that one rank's step reads and writes.
    pub bytes: usize,
    /// Median time of the slowest rank.
    pub milliseconds: f64,
    /// Bytes that arrive from other ranks, or that the step moves, in 10^9 per second.
    pub gb_per_s: f64,
    /// The rate as a part of that of one all-gather of the same bytes, or of the copy's.
    pub share: f64,
    /// Median time of the calling thread for one run, per weight.
    pub host_microseconds_per_weight: Option<f64>,
}

/// The rows of all ranks, and what they are compared with.
#[derive(Clone, Debug, Serialize)]
pub struct RankRows {
    /// Parameters of the model.
    pub parameters: usize,
    /// Bytes read and written by a device-to-device copy of large buffers, in 10^9 per second.
    pub copy_gb_per_s: f64,
    /// A copy of few bytes among others in a graph.
    pub small_copy_microseconds: f64,
    /// One for each operation, recipe or dtype that was measured.
    pub rows: Vec<RankRow>,
}

#[cfg(feature = "cuda")]
pub use offload::offloaded_bytes;

/// Measures the rows whose operation or recipe contains `filter`. On rank 0 `say` gets the name of each row before it runs. Collective: every
/// rank gets the same times.
///
/// # Errors
/// A device or a rank that fails.
#[cfg(feature = "cuda")]
pub fn measure(
    cuda: &Cuda,
    comm: Arc<dyn Communicator<Cuda>>,
    size: Size,
    filter: Option<&str>,
    say: &(dyn Fn(&str) + Sync),
) -> Result<RankRows> {
    let cuda = cuda.clone();
    let rank = rank::Rank {
        cuda,
        comm,
        size,
        say,
    };
    rank.measure(filter)
}

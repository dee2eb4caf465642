//! [`Communicator`]: the collectives that sharding needs, and [`Traffic`], what they sent.

use std::fmt::{Debug, Display};
use std::ops::Range;
use std::sync::Arc;

use lowp_kernels::Backend;

use crate::ShardError;

mod hub;
mod local;
mod post;
mod ranks;

pub use local::LocalComm;
pub use ranks::{RanksFailed, run_ranks, run_ranks_on};

/// One buffer of a batched all-gather.
#[derive(Clone, Copy, Debug)]
pub struct GatherItem<'a, B: Backend> {
    /// This rank's piece, whole.
    pub source: &'a B::Buffer<u8>,
    /// Where all pieces go; apart from every rank's source, but that this rank's piece may lie in its
    /// place in it already.
    pub dest: &'a B::Buffer<u8>,
    /// The bytes of `dest` that each rank's piece fills, in rank order.
    pub ranges: &'a [Range<usize>],
}

/// One gradient of a batched reduce-scatter.
#[derive(Clone, Copy, Debug)]
pub struct ReduceItem<'a, B: Backend> {
    /// This rank's full gradient.
    pub grad: &'a B::Buffer<f32>,
    /// The elements that each rank receives the sum of, in rank order.
    pub ranges: &'a [Range<usize>],
    /// Receives the sum of this rank's range; another buffer than any rank's `grad`.
    pub out: &'a B::Buffer<f32>,
    /// Add the sum to `out` instead of replacing it.
    pub accumulate: bool,
}

/// How gradients travel. Sums are accumulated in fp32 either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GradWire {
    /// As they are.
    #[default]
    F32,
    /// Each contribution, the rank's own included, is rounded to bf16 (to nearest even) first.
    Bf16,
}

impl GradWire {
    /// Bytes of one element on the wire.
    pub const fn bytes(self) -> usize {
        match self {
            GradWire::F32 => 4,
            GradWire::Bf16 => 2,
        }
    }

    /// The value that arrives for `x`.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            GradWire::F32 => x,
            GradWire::Bf16 => half::bf16::from_f32(x).to_f32(),
        }
    }
}

/// Bytes that passed through one rank's communicator since it was made. Each byte counts once, on
/// the rank whose piece it belongs to, however the collective moves it: the sum over all ranks of
/// a gather or reduce-scatter is the size of the full buffers on the wire. Calls that a graph repeats count
/// when they are captured, not when it is launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of this rank's pieces in all-gathers.
    pub all_gather_bytes: u64,
    /// Bytes, in the wire's dtype, of this rank's ranges in reduce-scatters.
    pub reduce_scatter_bytes: u64,
    /// Bytes of this rank's vectors in all-reduces.
    pub all_reduce_bytes: u64,
    /// Number of gathers and reductions.
    pub calls: u64,
}

impl Traffic {
    /// What was added since `earlier`.
    #[must_use]
    pub fn since(self, earlier: Traffic) -> Traffic {
        Traffic {
            all_gather_bytes: self.all_gather_bytes - earlier.all_gather_bytes,
            reduce_scatter_bytes: self.reduce_scatter_bytes - earlier.reduce_scatter_bytes,
            all_reduce_bytes: self.all_reduce_bytes - earlier.all_reduce_bytes,
            calls: self.calls - earlier.calls,
        }
    }
}

/// A group of ranks. Every method that moves data is collective: all ranks of the group make the
/// same calls in the same order. A rank makes one call at a time, whatever group it is in.
///
/// # Errors
/// A rank that fails, departs, calls something else, or does not come in time is an error on
/// every rank, never a hang; every later call fails at once with the same cause.
pub trait Communicator<B: Backend>: Send + Sync + Debug {
    /// This rank in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn world_size(&self) -> usize;

    /// The stream that gathers and reductions work on: they read what it was given before the call, and
    /// what it is given after the call reads them. [`ordered`] makes another stream wait for them, and
    /// them for it.
    fn backend(&self) -> &B;

    /// Whether gathers and reductions only give work to the stream, and wait for no other rank on the
    /// host: a graph can capture them.
    fn is_enqueued(&self) -> bool;

    /// Gathers every rank's piece of every item; the rank's own piece is copied too, unless it lies in its place.
    ///
    /// # Errors
    /// As the trait says; also a source of another length than its range.
    fn all_gather(&self, items: &[GatherItem<'_, B>]) -> Result<(), ShardError>;

    /// Sums gradients over the ranks, in rank order with fp32 accumulation, and gives each rank
    /// its own range.
    ///
    /// # Errors
    /// As the trait says; also an `out` of another length than its range.
    fn reduce_scatter(&self, items: &[ReduceItem<'_, B>], wire: GradWire)
    -> Result<(), ShardError>;

    /// Replaces every entry by its maximum over the ranks. NaN entries are ignored.
    ///
    /// # Errors
    /// As the trait says.
    fn all_reduce_max(&self, values: &B::Buffer<f32>) -> Result<(), ShardError>;

    /// Replaces every entry by its sum over the ranks, in rank order.
    ///
    /// # Errors
    /// As the trait says.
    fn all_reduce_sum(&self, values: &B::Buffer<f32>) -> Result<(), ShardError>;

    /// Replaces every host value by its sum over the ranks, in rank order.
    ///
    /// # Errors
    /// As the trait says.
    fn all_reduce_sum_f64(&self, values: &mut [f64]) -> Result<(), ShardError>;

    /// Checks that all ranks give the same `description` of `what`.
    ///
    /// # Errors
    /// As the trait says; [`ShardError::Mismatch`] on every rank if descriptions differ.
    fn agree(&self, what: &str, description: &str) -> Result<(), ShardError>;

    /// Waits for all ranks.
    ///
    /// # Errors
    /// As the trait says.
    fn barrier(&self) -> Result<(), ShardError>;

    /// Says that this rank failed: wakes all ranks of the whole world, whatever group they wait
    /// in, with [`ShardError::Failed`]. Not collective. The first failure stays the cause. In a world
    /// of one rank nobody waits, and the rank may try again.
    fn abort(&self, message: &str);

    /// Splits the group: ranks that give the same `color` form a new group, ordered by `key`.
    ///
    /// # Errors
    /// As the trait says.
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<B>>, ShardError>;

    /// What passed through this communicator so far.
    fn traffic(&self) -> Traffic;
}

/// Makes a `call` of `comm` between the earlier and the later work of `backend`, a stream of the same device
/// as the communicator's.
///
/// # Errors
/// Those of `call`, handles of different devices, or a device failure.
pub fn ordered<B: Backend, T>(
    backend: &B,
    comm: &dyn Communicator<B>,
    call: impl FnOnce() -> Result<T, ShardError>,
) -> Result<T, ShardError> {
    comm.backend().wait_for(backend)?;
    let done = call();
    // Also behind a part of the call that failed: what it reads and writes is lent to others next.
    let ordered = backend.wait_for(comm.backend());
    let done = done?;
    ordered?;
    Ok(done)
}

/// How one rank's part in a collective operation ends: an error wakes all other ranks, which would
/// wait for this one in their next collective call. Every operation of this crate and of the
/// optimizer that is documented as collective returns through it.
///
/// # Errors
/// Those of `result`, as they are.
pub fn or_abort<B: Backend, T, E: Display>(
    comm: &dyn Communicator<B>,
    result: Result<T, E>,
) -> Result<T, E> {
    result.inspect_err(|error| comm.abort(&error.to_string()))
}

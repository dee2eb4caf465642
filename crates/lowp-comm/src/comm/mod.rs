//! [`Communicator`]: the collectives that sharding needs, on buffers of a device, and [`Traffic`], what they sent.

use std::fmt::{Debug, Display};
use std::ops::Range;
use std::sync::Arc;

use lowp_kernels::{Backend, FloatDtype, Source};

use crate::{CommError, Control};

mod check;
mod host;
mod local;
mod owned;
mod ranks;
mod staging;
mod traffic;
mod uneven;

pub use host::HostComm;
pub use local::LocalComm;
pub use owned::{Direction, OwnedItem, OwnedPiece};
pub use ranks::{RanksFailed, run_comms, run_ranks, run_ranks_on};
pub use staging::{ReduceStaging, StagedGrad};
pub use traffic::{Counters, Traffic};
pub use uneven::{Adder, MAX_PEER_GPUS, Move, UnevenRun, spanned};

/// Pieces from this many bytes on are large. Between GPUs they are exchanged apart from smaller ones of the same batch: in one NCCL group
/// both would take up to 1.3 times as long.
pub const LARGE_PIECE: usize = 1 << 20;

/// Whether the ranks' pieces of a buffer are exchanged with large ones.
pub fn is_large(ranges: &[Range<usize>]) -> bool {
    ranges.iter().any(|range| range.len() >= LARGE_PIECE)
}

/// Where the ranks' pieces lie, if they have one length and follow each other: NCCL gathers them in one operation, others in one for each
/// rank.
pub fn even(ranges: &[Range<usize>]) -> Option<Range<usize>> {
    let [first, .., last] = ranges else {
        return ranges.first().cloned();
    };
    let follows =
        |pair: &[Range<usize>]| pair[1].start == pair[0].end && pair[1].len() == first.len();
    ranges
        .windows(2)
        .all(follows)
        .then_some(first.start..last.end)
}

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
    /// The memory of this rank's full gradient.
    pub grad: &'a Source<B>,
    /// Its number, the same for gradients of the batch that lie in one memory. All ranks give the same numbers and ranges: which operations
    /// they enqueue follows from these.
    pub memory: usize,
    /// The elements of that memory that each rank receives the sum of, in rank order.
    pub ranges: &'a [Range<usize>],
    /// Receives the sum of this rank's range; another buffer than any rank's `grad`.
    pub out: &'a B::Buffer<f32>,
    /// Add the sum to `out` instead of replacing it.
    pub accumulate: bool,
}

impl<B: Backend> ReduceItem<'_, B> {
    /// The dtype that travels, where f32 gradients travel as `wire`.
    pub fn wire(&self, wire: GradWire) -> GradWire {
        match self.grad.dtype() {
            FloatDtype::F32 => wire,
            FloatDtype::Bf16 => GradWire::Bf16,
        }
    }
}

/// The dtype that f32 gradients have on the wire; those in bf16 travel as they are. Accumulation is f32 always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GradWire {
    /// As they are, in f32.
    #[default]
    F32,
    /// Each rank's gradient is rounded to bf16 (nearest even) first.
    Bf16,
}

impl GradWire {
    /// Both dtypes, the exact one first.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// `f32` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            GradWire::F32 => "f32",
            GradWire::Bf16 => "bf16",
        }
    }

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

/// One batch of data between ranks.
#[derive(Debug)]
pub enum Collective<'a, B: Backend> {
    /// Gathers every rank's piece of every item; the rank's own piece is copied too, unless it lies in its
    /// place.
    AllGather(&'a [GatherItem<'a, B>]),
    /// Sums gradients, f32 or bf16, over the ranks with f32 accumulation, and gives each rank its own range.
    ReduceScatter(&'a [ReduceItem<'a, B>], GradWire),
    /// Moves vectors between the ranks that have their pieces and those that have the whole. Each rank copies what it owns, unless it lies in
    /// its place.
    Owned(&'a [OwnedItem<'a, B>], Direction),
    /// Replaces every entry by its maximum over the ranks. NaN entries are ignored.
    Max(&'a B::Buffer<f32>),
    /// Replaces every entry of every buffer by its sum over the ranks.
    Sum(&'a [&'a B::Buffer<f32>]),
}

impl<B: Backend> Clone for Collective<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Collective<'_, B> {}

impl<B: Backend> Collective<'_, B> {
    /// What it is called in errors.
    pub const fn name(&self) -> &'static str {
        match self {
            Collective::AllGather(_) => "all_gather",
            Collective::ReduceScatter(_, GradWire::F32) => "reduce_scatter (f32 wire)",
            Collective::ReduceScatter(_, GradWire::Bf16) => "reduce_scatter (bf16 wire)",
            Collective::Owned(_, Direction::ToOwners) => "to_owners",
            Collective::Owned(_, Direction::FromOwners) => "from_owners",
            Collective::Max(_) => "all_reduce_max",
            Collective::Sum(_) => "all_reduce_sum",
        }
    }
}

/// A batch that was started: a stream waits for its results.
#[derive(Clone, Debug)]
pub struct Started<B: Backend>(B::Event);

impl<B: Backend> Started<B> {
    /// Makes later work of `stream` follow the batch.
    ///
    /// # Errors
    /// A stream of another device, or the device failed.
    pub fn wait(&self, stream: &B) -> Result<(), CommError> {
        Ok(stream.wait(&self.0)?)
    }
}

/// One rank of a group of ranks that move data between devices. All ranks of the group make the same calls in the
/// same order. A rank makes one call at a time, whatever group it is in.
///
/// The ranks hear of each other through [`Communicator::control`].
///
/// # Order of sums
/// Maxima and gathers have one result. Sums of [`Collective::Sum`] and [`Collective::ReduceScatter`] are in rank order where ranks are
/// threads or processes of the host ([`LocalComm`], [`HostComm`]), and in the order that the library
/// chooses where they are NCCL's: equal from run to run on the same machines with the same settings, and not
/// equal to those of another world or engine. What must be equal everywhere is made of gathered parts, which every
/// rank sums in rank order.
///
/// # Errors
/// A rank that fails, departs, calls something else, or does not come in time is an error on
/// every rank, never a hang; every later call fails at once with the same cause. Where calls are only
/// enqueued ([`Communicator::is_enqueued`]) ranks that call different things are found by the next optimizer step that gets a record of it
/// ([`CallLog`](crate::CallLog)), or by the time limit.
pub trait Communicator<B: Backend>: Send + Sync + Debug {
    /// The ranks of the group, on the host.
    fn control(&self) -> &dyn Control;

    /// The stream that batches work on: they read what it was given before the call, and
    /// what it is given after the call reads them. [`Communicator::start`] and [`ordered`] put them between the work of another stream.
    fn backend(&self) -> &B;

    /// Whether batches are only given to the stream, and wait for no other rank on the
    /// host: a graph can capture them.
    fn is_enqueued(&self) -> bool;

    /// Gives one batch to the stream. Its `label` says which one it is: ranks that wait for each other on the host compare it, so
    /// that batches of equal lengths are not taken for each other. It may be empty.
    ///
    /// # Errors
    /// As the trait says; also buffers of another length than their ranges.
    fn enqueue(&self, label: &str, batch: Collective<'_, B>) -> Result<(), CommError>;

    /// Says that `event`, a point after collectives that were given by a graph, must pass within the time limit; `what`
    /// they are. Batches that are enqueued are watched anyway.
    fn expect(&self, event: B::Event, what: &'static str) {
        // Ranks that wait on the host find each other missing there.
        let _ = (event, what);
    }

    /// Splits the group: ranks that give the same `color` form a new group, ordered by `key`.
    ///
    /// # Errors
    /// As the trait says.
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<B>>, CommError>;

    /// Another communicator of the same ranks, on a stream of its own. What each adds or converts there runs while another one moves data,
    /// which they do in the order of their calls. Its traffic is counted here. None where that gains nothing: where ranks wait for each other on the host, and on a rank that
    /// is alone. Collective.
    ///
    /// # Errors
    /// As the trait says; the device has no room for a stream.
    fn beside(&self) -> Result<Option<Arc<dyn Communicator<B>>>, CommError> {
        Ok(None)
    }

    /// Drops what was planned of reductions, which holds the gradients that it was planned for.
    fn forget_reductions(&self) {}

    /// Counts what a launch of a graph sent, as it was counted at the capture ([`Traffic`]).
    fn count(&self, sent: Traffic);

    /// What passed through this communicator so far.
    fn traffic(&self) -> Traffic;

    /// This rank in the group.
    fn rank(&self) -> usize {
        self.control().rank()
    }

    /// Number of ranks in the group.
    fn world_size(&self) -> usize {
        self.control().members().len()
    }

    /// Starts a batch that follows `after`, a point of a stream of the same device.
    ///
    /// # Errors
    /// As [`Communicator::enqueue`].
    fn start(
        &self,
        after: &B::Event,
        label: &str,
        batch: Collective<'_, B>,
    ) -> Result<Started<B>, CommError> {
        self.backend().wait(after)?;
        self.enqueue(label, batch)?;
        Ok(Started(self.backend().record()?))
    }

    /// [`Collective::AllGather`] without a label.
    ///
    /// # Errors
    /// As [`Communicator::enqueue`].
    fn all_gather(&self, items: &[GatherItem<'_, B>]) -> Result<(), CommError> {
        self.enqueue("", Collective::AllGather(items))
    }

    /// [`Collective::ReduceScatter`] without a label.
    ///
    /// # Errors
    /// As [`Communicator::enqueue`].
    fn reduce_scatter(&self, items: &[ReduceItem<'_, B>], wire: GradWire) -> Result<(), CommError> {
        self.enqueue("", Collective::ReduceScatter(items, wire))
    }

    /// [`Collective::Max`] without a label.
    ///
    /// # Errors
    /// As [`Communicator::enqueue`].
    fn all_reduce_max(&self, values: &B::Buffer<f32>) -> Result<(), CommError> {
        self.enqueue("", Collective::Max(values))
    }

    /// [`Collective::Sum`] of one buffer, without a label.
    ///
    /// # Errors
    /// As [`Communicator::enqueue`].
    fn all_reduce_sum(&self, values: &B::Buffer<f32>) -> Result<(), CommError> {
        self.enqueue("", Collective::Sum(&[values]))
    }
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
    result.inspect_err(|error| comm.control().abort(&error.to_string()))
}

/// Makes a `call` of `comm` between the earlier and the later work of `backend`, a stream of the same device
/// as the communicator's.
///
/// # Errors
/// Those of `call`, handles of different devices, or a device failure.
pub fn ordered<B: Backend, T>(
    backend: &B,
    comm: &dyn Communicator<B>,
    call: impl FnOnce() -> Result<T, CommError>,
) -> Result<T, CommError> {
    comm.backend().wait_for(backend)?;
    let done = call();
    // Also after a call that failed halfway: what it reads and writes is lent to others next.
    let ordered = backend.wait_for(comm.backend());
    let done = done?;
    ordered?;
    Ok(done)
}

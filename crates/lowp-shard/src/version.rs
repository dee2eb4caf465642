//! [`Version`]: which content the rows of a shard have, so that a gather knows when its copy is old.
//!
//! Every cast raises the version of what it fills, before it writes: [`crate::CastPlan`] in `run`
//! and `calibrate`, and the optimizer in every step that it applies. These are collective, and a
//! cast names the same tensors on every rank, so versions advance together, also on ranks whose
//! rows of a tensor are none. Other writes say it themselves, also before they begin
//! ([`crate::ShardedTensor::begin_write`]). A [`crate::GatherGroup`] remembers the versions that it gathered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lowp_format::{QuantizedTensor, Recipe, Shape};
use lowp_kernels::Backend;

/// Counts how often something was written. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct Version(Arc<AtomicU64>);

/// Whether both count together.
impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Version {
    /// The number of writes that began so far.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Says that a write begins.
    pub(crate) fn raise(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// What a cast can fill: a tensor, or the rows of a shard, whose version it raises.
pub trait CastTensor<B: Backend> {
    /// The recipe of the tensor.
    type Recipe: Recipe;

    /// The buffers to fill.
    fn tensor(&self) -> &QuantizedTensor<B::Buffer<u8>, Self::Recipe>;

    /// What to raise with every cast.
    fn version(&self) -> Option<&Version>;

    /// Where the rows are in the whole matrix, if they may begin and end within blocks: the scales are those of the whole matrix then.
    fn slice(&self) -> Option<CastSlice> {
        None
    }
}

/// Where the rows of a [`CastTensor`] are in a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CastSlice {
    /// Shape of the whole matrix.
    pub full: Shape,
    /// The first element of the rows in the flattened matrix.
    pub start: usize,
}

/// A tensor of its own, which nobody gathers.
impl<B: Backend, R: Recipe> CastTensor<B> for QuantizedTensor<B::Buffer<u8>, R> {
    type Recipe = R;

    fn tensor(&self) -> &QuantizedTensor<B::Buffer<u8>, R> {
        self
    }

    fn version(&self) -> Option<&Version> {
        None
    }
}

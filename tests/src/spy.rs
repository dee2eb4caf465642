//! A communicator that notes what passes through it.

use std::mem::take;
use std::sync::{Arc, Mutex, PoisonError};

use lowp_kernels::{Backend, Cpu, CpuBuffer};
use lowp_shard::{Communicator, GatherItem, GradWire, ReduceItem, ShardError, Traffic};

/// One collective call of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// The bytes of this rank's piece of every item.
    AllGather(Vec<Vec<u8>>),
    /// Number of items.
    ReduceScatter(usize),
    /// Number of entries.
    AllReduceMax(usize),
    /// Number of entries.
    AllReduceSum(usize),
    /// Number of entries.
    AllReduceSumF64(usize),
    /// What the ranks compare.
    Agree(String),
    /// A barrier.
    Barrier,
    /// A split.
    Split,
}

/// A communicator that notes every call and passes it on to another one.
#[derive(Debug)]
pub struct Spy {
    inner: Arc<dyn Communicator<Cpu>>,
    calls: Mutex<Vec<Call>>,
}

impl Spy {
    /// A spy on `inner`.
    pub fn new(inner: Arc<dyn Communicator<Cpu>>) -> Arc<Self> {
        let calls = Mutex::default();
        Arc::new(Self { inner, calls })
    }

    /// The calls since the last time.
    pub fn take(&self) -> Vec<Call> {
        take(&mut self.calls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, call: Call) -> &dyn Communicator<Cpu> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.push(call);
        &*self.inner
    }
}

impl Communicator<Cpu> for Spy {
    fn backend(&self) -> &Cpu {
        self.inner.backend()
    }

    fn is_enqueued(&self) -> bool {
        self.inner.is_enqueued()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn all_gather(&self, items: &[GatherItem<'_, Cpu>]) -> Result<(), ShardError> {
        let pieces = items.iter().map(|item| Cpu.download(item.source));
        let pieces = pieces.collect::<Result<_, _>>()?;
        self.note(Call::AllGather(pieces)).all_gather(items)
    }

    fn reduce_scatter(
        &self,
        items: &[ReduceItem<'_, Cpu>],
        wire: GradWire,
    ) -> Result<(), ShardError> {
        self.note(Call::ReduceScatter(items.len()))
            .reduce_scatter(items, wire)
    }

    fn all_reduce_max(&self, values: &CpuBuffer<f32>) -> Result<(), ShardError> {
        self.note(Call::AllReduceMax(values.len()))
            .all_reduce_max(values)
    }

    fn all_reduce_sum(&self, values: &CpuBuffer<f32>) -> Result<(), ShardError> {
        self.note(Call::AllReduceSum(values.len()))
            .all_reduce_sum(values)
    }

    fn all_reduce_sum_f64(&self, values: &mut [f64]) -> Result<(), ShardError> {
        self.note(Call::AllReduceSumF64(values.len()))
            .all_reduce_sum_f64(values)
    }

    fn agree(&self, what: &str, description: &str) -> Result<(), ShardError> {
        self.note(Call::Agree(what.to_owned()))
            .agree(what, description)
    }

    fn barrier(&self) -> Result<(), ShardError> {
        self.note(Call::Barrier).barrier()
    }

    fn abort(&self, message: &str) {
        self.inner.abort(message);
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator<Cpu>>, ShardError> {
        self.note(Call::Split).split(color, key)
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

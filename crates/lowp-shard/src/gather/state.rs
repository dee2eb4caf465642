//! [`GatherState`]: which full tensors a group has, or is gathering.

use lowp_format::{Phase, Recipe};
use lowp_kernels::{Backend, KernelError};

use super::pool::Lease;
use crate::ShardedTensor;

/// A gather that the group's stream does not follow yet.
#[derive(Debug)]
pub(super) struct StartedGather<B: Backend> {
    pub(super) phase: Phase,
    /// The point of the communicator's stream after it.
    pub(super) arrived: B::Event,
}

/// The full tensors of a group between a gather and the reshard after it.
#[derive(Debug)]
pub(super) struct GatherState<B: Backend> {
    /// The memory of the tensors, from the start of a gather on.
    pub(super) lease: Option<Lease<B>>,
    /// The phase whose tensors are ready.
    pub(super) held: Option<Phase>,
    /// The gather of a phase that is on its way.
    pub(super) started: Option<StartedGather<B>>,
    /// The point after the gather of what backward needs beside what forward gathers or has gathered, while it is on its way.
    pub(super) rest: Option<B::Event>,
    /// The versions of the shards that the tensors were gathered from, by parameter.
    pub(super) versions: Vec<u64>,
}

impl<B: Backend> GatherState<B> {
    /// Nothing of `params` parameters.
    pub(super) fn new(params: usize) -> Self {
        Self {
            lease: None,
            held: None,
            started: None,
            rest: None,
            versions: vec![0; params],
        }
    }

    /// The phase whose gather is on its way.
    pub(super) fn started_phase(&self) -> Option<Phase> {
        self.started.as_ref().map(|started| started.phase)
    }

    /// The phase whose tensors are ready, or else on their way.
    pub(super) fn phase(&self) -> Option<Phase> {
        self.held.or(self.started_phase())
    }

    /// How often each shard of `params` was written since the versions were noted.
    pub(super) fn writes_since<R: Recipe>(
        &self,
        params: &[ShardedTensor<B, R>],
    ) -> impl Iterator<Item = u64> {
        let versions = params.iter().zip(&self.versions);
        versions.map(|(tensor, &gathered)| tensor.version() - gathered)
    }

    /// Notes the versions of the shards: they are gathered now.
    pub(super) fn note_versions<R: Recipe>(&mut self, params: &[ShardedTensor<B, R>]) {
        for (gathered, tensor) in self.versions.iter_mut().zip(params) {
            *gathered = tensor.version();
        }
    }

    /// Has `stream`, the group's, follow gathers that nobody used.
    pub(super) fn follow(&mut self, stream: &B) -> Result<(), KernelError> {
        let started = self.started.take().map(|started| started.arrived);
        let events = [started, self.rest.take()].into_iter().flatten();
        let waited = events.map(|event| stream.wait(&event));
        waited.fold(Ok(()), Result::and)
    }

    /// Gives the memory of the tensors back, after gathers that nobody used and the work that `stream`, the group's, has by now.
    pub(super) fn free(&mut self, stream: &B) {
        self.held = None;
        // What a gather that nobody used writes is lent to others next.
        let ordered = self.follow(stream);
        match (self.lease.take(), ordered) {
            // A device that cannot wait does not get the memory again.
            (Some(lease), Err(_)) => std::mem::forget(lease),
            (lease, _) => drop(lease),
        }
    }
}

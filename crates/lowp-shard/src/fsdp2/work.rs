//! [`Layout`]: the work that makes a full tensor of what arrived, for one set of addresses.

use std::ops::Range;

use lowp_comm::CommError;
use lowp_format::{BufferKey, FormatError, GatherPlan, QuantizedTensor, Recipe};
use lowp_kernels::{Backend, StepScalars};

use super::{GatherHooks, HookInput, HookSource};
use crate::gather::{LocalWork, MemoryStep, PoolBuffer, memory_steps, piece_ranges};
use crate::version::{CastTensor, Version};
use crate::{ShardError, ShardedTensor};

/// Buffers by name.
pub(super) type NamedBuffers<B> = Vec<(BufferKey, <B as Backend>::Buffer<u8>)>;

fn named<B: Backend>(buffers: &NamedBuffers<B>, key: BufferKey) -> Option<&B::Buffer<u8>> {
    let found = buffers.iter().find(|(known, _)| *known == key);
    found.map(|(_, buffer)| buffer)
}

/// The memory of a full tensor that is neither arrived nor the shard's.
#[derive(Debug)]
pub(super) struct FullMemory<B: Backend> {
    pub(super) outputs: NamedBuffers<B>,
    /// Full buffers that outputs are made of.
    pub(super) sources: NamedBuffers<B>,
    /// Pieces without padding, which are interleaved.
    pub(super) pieces: NamedBuffers<B>,
}

impl<B: Backend> FullMemory<B> {
    /// Where everything lies that work is planned over and that may move.
    pub(super) fn spans<R: Recipe>(
        &self,
        backend: &B,
        hooks: &GatherHooks<R>,
        shard: &ShardedTensor<B, R>,
        arrived: &[B::Buffer<u8>],
    ) -> Result<Vec<Range<usize>>, ShardError> {
        let own = self.outputs.iter().map(|(_, buffer)| buffer);
        let buffers = arrived.iter().chain(own);
        let mut spans: Vec<_> = buffers.map(|buffer| backend.span(buffer)).collect();
        for output in hooks.outputs() {
            if output.source == HookSource::Shard {
                let buffer = shard.local().buffer(output.spec.key)?;
                spans.push(backend.span(&buffer.storage));
            }
        }
        Ok(spans)
    }
}

/// Bytes that are copied, and where to.
#[derive(Debug)]
struct Copied<B: Backend> {
    from: B::Buffer<u8>,
    bytes: Range<usize>,
    to: B::Buffer<u8>,
    start: usize,
}

/// Planned work over one set of addresses, and the tensors over it.
#[derive(Debug)]
pub(super) struct Layout<B: Backend, R: Recipe> {
    pub(super) spans: Vec<Range<usize>>,
    copies: Vec<Copied<B>>,
    now: Vec<B::Plan>,
    delayed: Vec<B::Plan>,
    /// Before and after the delayed work.
    tensors: [QuantizedTensor<B::Buffer<u8>, R>; 2],
}

impl<B: Backend, R: Recipe> Layout<B, R> {
    pub(super) fn new(
        backend: &B,
        hooks: &GatherHooks<R>,
        shard: &ShardedTensor<B, R>,
        arrived: &[B::Buffer<u8>],
        memory: &FullMemory<B>,
        spans: Vec<Range<usize>>,
    ) -> Result<Self, ShardError> {
        for buffer in arrived {
            backend.owns(buffer)?;
        }
        let inputs = hooks.inputs().iter().zip(arrived);
        let input = |key: BufferKey| inputs.clone().find(|(input, _)| input.spec.key == key);
        let at = |key: BufferKey, arrivals: bool| -> Result<B::Buffer<u8>, ShardError> {
            let part = |input: &HookInput| {
                if arrivals {
                    input.joined()
                } else {
                    input.whole()
                }
            };
            if let Some((input, arrived)) = input(key)
                && let Some(part) = part(input)
            {
                return Ok(backend.view(arrived, part)?);
            }
            let own = match arrivals {
                true => named::<B>(&memory.pieces, key),
                false => {
                    named::<B>(&memory.outputs, key).or_else(|| named::<B>(&memory.sources, key))
                }
            };
            own.cloned().ok_or_else(|| missing(key))
        };
        let mut copies = Vec::new();
        let mut planned = |plan: &GatherPlan| -> Result<Vec<B::Plan>, ShardError> {
            let mut local = LocalWork::new();
            for step in memory_steps(plan) {
                if let MemoryStep::Fetch { spec, to, pieces } = &step {
                    let (input, arrived) = input(spec.key).ok_or_else(|| missing(spec.key))?;
                    let dest = at(to.key, to.arrivals)?;
                    // Joined pieces are where they belong.
                    let places = input.ranges().zip(piece_ranges(pieces));
                    let apart =
                        places.filter(|(bytes, _)| input.joined().is_none() && !bytes.is_empty());
                    copies.extend(apart.map(|(bytes, place)| Copied {
                        from: arrived.clone(),
                        bytes,
                        to: dest.clone(),
                        start: place.start,
                    }));
                }
                // Of what is equal on all ranks the shard's own buffer serves.
                local.add(step, |name: PoolBuffer| at(name.key, name.arrivals))?;
            }
            Ok(local.plan(backend)?)
        };
        let now = planned(&hooks.planned.plan)?;
        let delayed = hooks.planned.delayed.as_ref().map(&mut planned);
        let delayed = delayed.transpose()?.unwrap_or_default();
        let tensor = |derived: bool| {
            let outputs = hooks.outputs().iter().filter(|o| derived || !o.delayed);
            let specs = outputs.map(|output| output.spec);
            QuantizedTensor::with_buffers(shard.recipe(), hooks.full(), specs, |spec, _| {
                let shards = |output: &super::HookOutput| output.source == HookSource::Shard;
                let output = hooks.outputs().iter().find(|o| o.spec.key == spec.key);
                if output.is_some_and(shards) {
                    return Ok(shard.local().buffer(spec.key)?.storage.clone());
                }
                at(spec.key, false)
            })
        };
        let tensors = [tensor(false)?, tensor(true)?];
        Ok(Self {
            spans,
            copies,
            now,
            delayed,
            tensors,
        })
    }

    pub(super) fn tensor(&self, derived: bool) -> &QuantizedTensor<B::Buffer<u8>, R> {
        &self.tensors[usize::from(derived)]
    }

    pub(super) fn run(&self, backend: &B) -> Result<(), ShardError> {
        for copied in &self.copies {
            let Copied {
                from,
                bytes,
                to,
                start,
            } = copied;
            backend.copy(from, bytes.clone(), to, *start)?;
        }
        run_all(backend, &self.now)
    }

    pub(super) fn derive(&self, backend: &B) -> Result<(), ShardError> {
        run_all(backend, &self.delayed)
    }
}

fn run_all<B: Backend>(backend: &B, plans: &[B::Plan]) -> Result<(), ShardError> {
    for plan in plans {
        backend.run(plan, &StepScalars::default())?;
    }
    Ok(())
}

fn missing(key: BufferKey) -> ShardError {
    let usage = key.usage;
    FormatError::MissingBuffer { key, usage }.into()
}

/// Checks that a buffer has as many bytes as it must have.
pub(super) fn check_len<B: Backend>(
    backend: &B,
    item: usize,
    what: &'static str,
    buffer: &B::Buffer<u8>,
    needed: usize,
) -> Result<(), ShardError> {
    let found = backend.len(buffer);
    if found == needed {
        return Ok(());
    }
    Err(CommError::ItemLength {
        op: "a gather by hooks",
        item,
        what,
        needed,
        found,
    }
    .into())
}

/// What counts the writes of `shard`; clones of it share it.
pub(super) fn version_of<B: Backend, R: Recipe>(shard: &ShardedTensor<B, R>) -> Version {
    CastTensor::version(shard.local())
        .cloned()
        .unwrap_or_default()
}

//! [`Layout`]: the work that makes a full tensor of what arrived, for one set of addresses.

use std::ops::Range;

use lowp_comm::CommError;
use lowp_format::{BufferKey, BufferSpec, FormatError, QuantizedTensor, Recipe};
use lowp_kernels::{Backend, InterleaveJob, StepScalars, TransposeJob, Work};

use super::{GatherHooks, HookInput, HookSource};
use crate::version::{CastTarget, Version};
use crate::{GatherTarget, ShardError, ShardedTensor, run_steps};

/// Buffers by name.
pub(super) type Named<B> = Vec<(BufferKey, <B as Backend>::Buffer<u8>)>;

fn named<B: Backend>(buffers: &Named<B>, key: BufferKey) -> Option<&B::Buffer<u8>> {
    let found = buffers.iter().find(|(known, _)| *known == key);
    found.map(|(_, buffer)| buffer)
}

/// The memory of a full tensor that is neither arrived nor the shard's.
#[derive(Debug)]
pub(super) struct Memory<B: Backend> {
    pub(super) outputs: Named<B>,
    /// Full buffers that outputs are made of.
    pub(super) sources: Named<B>,
    /// Pieces without padding, which are interleaved.
    pub(super) pieces: Named<B>,
}

impl<B: Backend> Memory<B> {
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

/// Bytes that are copied behind other bytes.
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
        memory: &Memory<B>,
        spans: Vec<Range<usize>>,
    ) -> Result<Self, ShardError> {
        for buffer in arrived {
            backend.owns(buffer)?;
        }
        let mut recorded = Recorded {
            backend,
            inputs: hooks.inputs(),
            arrived,
            memory,
            copies: Vec::new(),
            interleave: Vec::new(),
            transpose: Vec::new(),
        };
        run_steps(&hooks.planned.plan, &mut recorded)?;
        let now = recorded.planned()?;
        if let Some(plan) = &hooks.planned.delayed {
            run_steps(plan, &mut recorded)?;
        }
        let delayed = recorded.planned()?;
        let tensor = |derived: bool| {
            let outputs = hooks.outputs().iter().filter(|o| derived || !o.delayed);
            let specs = outputs.map(|output| output.spec);
            QuantizedTensor::with_buffers(shard.recipe(), hooks.full(), specs, |spec, _| {
                let shards = |output: &super::HookOutput| output.source == HookSource::Shard;
                let output = hooks.outputs().iter().find(|o| o.spec.key == spec.key);
                if output.is_some_and(shards) {
                    return Ok(shard.local().buffer(spec.key)?.storage.clone());
                }
                recorded.filled(spec.key)
            })
        };
        let tensors = [tensor(false)?, tensor(true)?];
        Ok(Self {
            spans,
            copies: recorded.copies,
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

/// The steps of a plan, recorded.
struct Recorded<'a, B: Backend> {
    backend: &'a B,
    inputs: &'a [HookInput],
    arrived: &'a [B::Buffer<u8>],
    memory: &'a Memory<B>,
    copies: Vec<Copied<B>>,
    interleave: Vec<InterleaveJob<B>>,
    transpose: Vec<TransposeJob<B>>,
}

impl<B: Backend> Recorded<'_, B> {
    /// Plans what was recorded since the last time.
    fn planned(&mut self) -> Result<Vec<B::Plan>, ShardError> {
        let interleave = std::mem::take(&mut self.interleave);
        let transpose = std::mem::take(&mut self.transpose);
        let mut plans = Vec::new();
        if !interleave.is_empty() {
            plans.push(self.backend.plan(Work::Interleave(interleave))?);
        }
        if !transpose.is_empty() {
            plans.push(self.backend.plan(Work::Transpose(transpose))?);
        }
        Ok(plans)
    }

    /// An input, and what arrived for it.
    fn input(&self, key: BufferKey) -> Option<(&HookInput, &B::Buffer<u8>)> {
        let mut inputs = self.inputs.iter().zip(self.arrived);
        inputs.find(|(input, _)| input.spec.key == key)
    }
}

fn missing(key: BufferKey) -> ShardError {
    let usage = key.usage;
    FormatError::MissingBuffer { key, usage }.into()
}

impl<B: Backend> GatherTarget<B> for Recorded<'_, B> {
    type Error = ShardError;

    fn full(&mut self, spec: &BufferSpec, _: usize) -> Result<B::Buffer<u8>, ShardError> {
        self.filled(spec.key)
    }

    fn filled(&self, key: BufferKey) -> Result<B::Buffer<u8>, ShardError> {
        if let Some((input, arrived)) = self.input(key)
            && let Some(whole) = input.whole()
        {
            return Ok(self.backend.view(arrived, whole)?);
        }
        let Memory {
            outputs, sources, ..
        } = self.memory;
        let own = named::<B>(outputs, key).or_else(|| named::<B>(sources, key));
        own.cloned().ok_or_else(|| missing(key))
    }

    fn arrivals(&mut self, spec: &BufferSpec, _: usize) -> Result<B::Buffer<u8>, ShardError> {
        if let Some((input, arrived)) = self.input(spec.key)
            && let Some(joined) = input.joined()
        {
            return Ok(self.backend.view(arrived, joined)?);
        }
        let pieces = named::<B>(&self.memory.pieces, spec.key);
        pieces.cloned().ok_or_else(|| missing(spec.key))
    }

    fn fetch(
        &mut self,
        spec: &BufferSpec,
        dest: B::Buffer<u8>,
        ranges: Vec<Range<usize>>,
    ) -> Result<(), ShardError> {
        let (input, arrived) = self.input(spec.key).ok_or_else(|| missing(spec.key))?;
        // Otherwise the pieces are where they belong.
        if input.joined().is_none() {
            let places = input.ranges().zip(ranges);
            let copies = places.filter(|(bytes, _)| !bytes.is_empty());
            let copies = copies.map(|(bytes, place)| Copied {
                from: arrived.clone(),
                bytes,
                to: dest.clone(),
                start: place.start,
            });
            let copies: Vec<_> = copies.collect();
            self.copies.extend(copies);
        }
        Ok(())
    }

    fn interleave(&mut self, job: InterleaveJob<B>) -> Result<(), ShardError> {
        self.interleave.push(job);
        Ok(())
    }

    fn transpose(&mut self, job: TransposeJob<B>) -> Result<(), ShardError> {
        self.transpose.push(job);
        Ok(())
    }

    fn replicated(&mut self, _: &BufferSpec) -> Result<(), ShardError> {
        // The shard's own buffer serves.
        Ok(())
    }
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
    CastTarget::version(shard.local())
        .cloned()
        .unwrap_or_default()
}

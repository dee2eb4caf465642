//! [`FullTensor`]: what a gather by hooks made.

use lowp_format::{AnyRecipe, QuantizedTensor, Recipe};
use lowp_kernels::Backend;

use super::work::{FullMemory, Layout, NamedBuffers, check_len};
use super::{GatherHooks, HookOutput, StagedBuffer};
use crate::version::Version;
use crate::{ShardError, ShardedTensor};

/// The full tensor of one parameter and phase, and the work that fills it. Keeps the buffers that arrived in use, and
/// those of its shard's scale.
#[derive(Debug)]
pub struct FullTensor<B: Backend, R: Recipe = AnyRecipe> {
    hooks: GatherHooks<R>,
    shard: Version,
    memory: FullMemory<B>,
    /// The last one used first.
    layouts: Vec<Layout<B, R>>,
    keep: usize,
    planned: u64,
    /// The version of what it holds, if it holds something.
    filled: Option<u64>,
    derived: bool,
}

impl<B: Backend, R: Recipe> FullTensor<B, R> {
    pub(super) fn new(
        backend: &B,
        hooks: &GatherHooks<R>,
        shard: &Version,
        alloc: impl FnMut(&HookOutput) -> Result<B::Buffer<u8>, ShardError>,
    ) -> Result<Self, ShardError> {
        let mut staged = [Vec::new(), Vec::new()];
        for StagedBuffer {
            content,
            key,
            bytes,
        } in hooks.staged()
        {
            staged[content as usize].push((key, backend.alloc(bytes)?));
        }
        let [pieces, sources] = staged;
        Ok(Self {
            hooks: hooks.clone(),
            shard: shard.clone(),
            memory: FullMemory {
                outputs: allocated(backend, hooks, alloc)?,
                sources,
                pieces,
            },
            layouts: Vec::new(),
            keep: 1,
            planned: 0,
            filled: None,
            derived: false,
        })
    }

    /// The tensor: the buffers of the gather's first usage, and all of them after [`FullTensor::derive`]. The buffers of
    /// a tensor that is filled again lie where they lay, except those that arrived elsewhere.
    ///
    /// # Errors
    /// [`ShardError::GatherAgain`] if the shard was cast since, the last gather failed, or the memory was moved.
    pub fn tensor(&self) -> Result<&QuantizedTensor<B::Buffer<u8>, R>, ShardError> {
        let why = match (self.layouts.first(), self.filled) {
            (Some(layout), Some(filled)) if filled == self.shard.get() => {
                return Ok(layout.tensor(self.derived));
            }
            (Some(_), Some(_)) => "was cast again since it was gathered",
            _ => {
                "holds nothing: it was released, given other memory or another shard, or its last gather failed"
            }
        };
        let what = self.hooks.name();
        Err(ShardError::GatherAgain { what, why })
    }

    /// Makes what was left for later ([`GatherHooks::kept`], [`GatherHooks::with_usage`]), as work of `backend`. Does
    /// nothing if it is there. What arrived must still be in place, also the inputs that are no output.
    ///
    /// # Errors
    /// As [`FullTensor::tensor`], or the backend failed.
    pub fn derive(&mut self, backend: &B) -> Result<(), ShardError> {
        self.tensor()?;
        if let (false, Some(layout)) = (self.derived, self.layouts.first()) {
            layout.derive(backend)?;
        }
        self.derived = true;
        Ok(())
    }

    /// The gather that it is filled by.
    pub fn hooks(&self) -> &GatherHooks<R> {
        &self.hooks
    }

    /// How often work was planned, which may wait for the device.
    pub fn planned(&self) -> u64 {
        self.planned
    }

    /// Keeps planned work for the `sets` sets of addresses that were used last, and the handles of buffers with it: for
    /// memory that is freed and comes back at one of a few addresses. 1 unless this is called; 0 counts as 1.
    pub fn keep_sets(&mut self, sets: usize) {
        self.keep = sets.max(1);
        self.layouts.truncate(self.keep);
    }

    /// Lets go of what arrived, and of work that was planned over it. Its own memory stays for the next gather.
    pub fn release(&mut self) {
        self.layouts.clear();
        self.filled = None;
    }

    /// Takes other memory for the outputs that have their own: where it was freed in the meantime and allocated
    /// anew. `alloc` is asked as in [`GatherTag::post_all_gather_with`](crate::GatherTag::post_all_gather_with). The next gather
    /// fills it.
    ///
    /// # Errors
    /// A buffer of another length, or whatever `alloc` returns; then the memory stays what it was.
    pub fn set_memory(
        &mut self,
        backend: &B,
        alloc: impl FnMut(&HookOutput) -> Result<B::Buffer<u8>, ShardError>,
    ) -> Result<(), ShardError> {
        self.memory.outputs = allocated(backend, &self.hooks, alloc)?;
        self.filled = None;
        Ok(())
    }

    pub(super) fn check_made_for(
        &self,
        hooks: &GatherHooks<R>,
        shard: &Version,
    ) -> Result<(), ShardError> {
        let same = self.hooks == *hooks;
        if same && self.shard == *shard {
            return Ok(());
        }
        let other = if same { ", another parameter" } else { "" };
        Err(ShardError::OtherGather {
            what: "the full tensor",
            expected: hooks.text().to_owned(),
            found: format!("{}{other}", self.hooks.text()),
        })
    }

    /// Fills it with what arrived, which was checked.
    pub(super) fn fill(
        &mut self,
        backend: &B,
        version: u64,
        shard: &ShardedTensor<B, R>,
        arrived: &[B::Buffer<u8>],
    ) -> Result<(), ShardError> {
        (self.filled, self.derived) = (None, false);
        let spans = self.memory.spans(backend, &self.hooks, shard, arrived)?;
        match self.layouts.iter().position(|layout| layout.spans == spans) {
            Some(known) => self.layouts[..=known].rotate_right(1),
            None => {
                let layout =
                    Layout::new(backend, &self.hooks, shard, arrived, &self.memory, spans)?;
                self.layouts.insert(0, layout);
                self.layouts.truncate(self.keep);
                self.planned += 1;
            }
        }
        self.layouts[0].run(backend)?;
        self.filled = Some(version);
        Ok(())
    }
}

/// Memory for the outputs that have their own.
fn allocated<B: Backend, R: Recipe>(
    backend: &B,
    hooks: &GatherHooks<R>,
    mut alloc: impl FnMut(&HookOutput) -> Result<B::Buffer<u8>, ShardError>,
) -> Result<NamedBuffers<B>, ShardError> {
    let mut outputs = Vec::new();
    for (at, output) in hooks.outputs().iter().enumerate() {
        if output.has_memory() {
            let buffer = alloc(output)?;
            check_len(
                backend,
                at,
                "the memory of the output",
                &buffer,
                output.bytes,
            )?;
            outputs.push((output.spec.key, buffer));
        }
    }
    Ok(outputs)
}

//! [`SendBuffers`]: what a rank sends. [`GatherTag`]: what is known of it when it arrives.

use lowp_format::{AnyRecipe, Recipe};
use lowp_kernels::Backend;

use super::work::{check_len, version_of};
use super::{FullTensor, GatherHooks, HookInput, HookOutput, describe};
use crate::version::Version;
use crate::{ShardError, ShardedTensor};

/// What one rank sends: buffers of its shard, and padded copies where its piece is shorter than those of other ranks.
#[derive(Debug)]
pub struct SendBuffers<B: Backend, R: Recipe = AnyRecipe> {
    hooks: GatherHooks<R>,
    shard: ShardedTensor<B, R>,
    buffers: Vec<B::Buffer<u8>>,
    /// Inputs that are copied, with the shard's buffers.
    copied: Vec<(usize, B::Buffer<u8>)>,
}

impl<R: Recipe> GatherHooks<R> {
    /// What `shard` sends. Made once for each shard: the buffers stay the same.
    ///
    /// # Errors
    /// A shard of another shape, recipe, usage or of other cuts; no room.
    pub fn send_buffers<B: Backend>(
        &self,
        backend: &B,
        shard: &ShardedTensor<B, R>,
    ) -> Result<SendBuffers<B, R>, ShardError> {
        self.send_buffers_with(backend, shard, |_, bytes| Ok(backend.alloc(bytes)?))
    }

    /// What `shard` sends, with padded copies in buffers that `alloc(input, bytes)` chooses. It is asked for each input of which
    /// the rank's piece is shorter than [`HookInput::padded`].
    ///
    /// # Errors
    /// As [`GatherHooks::send_buffers`], a buffer of another length, or whatever `alloc` returns.
    pub fn send_buffers_with<B: Backend>(
        &self,
        backend: &B,
        shard: &ShardedTensor<B, R>,
        mut alloc: impl FnMut(&HookInput, usize) -> Result<B::Buffer<u8>, ShardError>,
    ) -> Result<SendBuffers<B, R>, ShardError> {
        self.check_shard(shard)?;
        let (mut buffers, mut copied) = (Vec::new(), Vec::new());
        for (at, input) in self.inputs().iter().enumerate() {
            let bytes = input.pieces[shard.spec().rank()];
            // Of what travels in the other phase alone, or comes from another rank, nothing is sent.
            let own = match bytes > 0 {
                true => Some(&shard.local().buffer(input.spec.key)?.storage),
                false => None,
            };
            if let Some(own) = own {
                check_len(backend, at, "the shard", own, bytes)?;
                if bytes == input.padded {
                    buffers.push(own.clone());
                    continue;
                }
            }
            let padded = alloc(input, input.padded)?;
            check_len(backend, at, "the padded copy", &padded, input.padded)?;
            buffers.push(padded);
            if let Some(own) = own {
                copied.push((at, own.clone()));
            }
        }
        Ok(SendBuffers {
            hooks: self.clone(),
            shard: shard.clone(),
            buffers,
            copied,
        })
    }

    /// Checks that `shard` is one of those that the hooks were made for.
    pub(super) fn check_shard<B: Backend>(
        &self,
        shard: &ShardedTensor<B, R>,
    ) -> Result<(), ShardError> {
        let found = describe(&shard.recipe(), shard.spec());
        if found == self.planned.shards {
            return Ok(());
        }
        Err(ShardError::OtherGather {
            what: "the shard",
            expected: self.planned.shards.clone(),
            found,
        })
    }

    /// The parameter in messages.
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.planned.recipe.name(), self.full())
    }
}

impl<B: Backend, R: Recipe> SendBuffers<B, R> {
    /// What is gathered: one buffer of [`HookInput::padded`] bytes per input, in the order of
    /// [`GatherHooks::inputs`].
    pub fn buffers(&self) -> &[B::Buffer<u8>] {
        &self.buffers
    }

    /// Brings padded copies up to date, as work of `backend`: what that stream is given afterwards may read
    /// [`SendBuffers::buffers`]. On ranks whose pieces are as long as any, there is nothing to do. The caller orders the
    /// stream after casts of the shard, and after the last gather that read the buffers.
    ///
    /// # Errors
    /// The backend failed.
    pub fn pre_all_gather(&self, backend: &B) -> Result<GatherTag<R>, ShardError> {
        let version = self.shard.version();
        for (input, own) in &self.copied {
            backend.copy(own, 0..backend.len(own), &self.buffers[*input], 0)?;
        }
        Ok(GatherTag {
            hooks: self.hooks.clone(),
            shard: version_of(&self.shard),
            version,
        })
    }
}

/// What a gather carries beside its bytes: which parameter it is of, in which phase and version. Holds no memory of a
/// device.
#[derive(Clone, Debug, PartialEq)]
pub struct GatherTag<R: Recipe = AnyRecipe> {
    hooks: GatherHooks<R>,
    shard: Version,
    version: u64,
}

impl<R: Recipe> GatherTag<R> {
    /// The gather.
    pub fn hooks(&self) -> &GatherHooks<R> {
        &self.hooks
    }

    /// The full tensor of what arrived, as work of `backend`: what that stream is given afterwards may read it. The
    /// caller orders the stream after the gather.
    ///
    /// `shard` is this rank's, the one that was sent. `arrived` has, for each input, the bytes of all ranks in rank
    /// order, padding included. Parts of it become buffers of the tensor ([`HookOutput::source`] says which).
    ///
    /// # Errors
    /// Another shard, one that was cast since its bytes were sent, another number of buffers or bytes, no room, or a
    /// failure of the backend.
    pub fn post_all_gather<B: Backend>(
        &self,
        backend: &B,
        shard: &ShardedTensor<B, R>,
        arrived: &[B::Buffer<u8>],
    ) -> Result<FullTensor<B, R>, ShardError> {
        let alloc = |output: &HookOutput| Ok(backend.alloc(output.bytes)?);
        self.post_all_gather_with(backend, shard, arrived, alloc)
    }

    /// As [`GatherTag::post_all_gather`], with memory that `alloc(output)` chooses, of [`HookOutput::bytes`] bytes. It is asked for the outputs
    /// that have memory of their own ([`HookOutput::has_memory`]), in their order.
    ///
    /// # Errors
    /// As [`GatherTag::post_all_gather`], a buffer of another length, or whatever `alloc` returns.
    pub fn post_all_gather_with<B: Backend>(
        &self,
        backend: &B,
        shard: &ShardedTensor<B, R>,
        arrived: &[B::Buffer<u8>],
        alloc: impl FnMut(&HookOutput) -> Result<B::Buffer<u8>, ShardError>,
    ) -> Result<FullTensor<B, R>, ShardError> {
        self.check_arrived(backend, shard, arrived)?;
        let mut full = FullTensor::new(backend, &self.hooks, &self.shard, alloc)?;
        full.fill(backend, self.version, shard, arrived)?;
        Ok(full)
    }

    /// As [`GatherTag::post_all_gather`], into a full tensor that an earlier gather of this parameter and phase made. Its own memory is used
    /// again. If what arrived lies where it lay then ([`FullTensor::keep_sets`]), planned work runs and nothing is
    /// allocated; elsewhere the work is planned anew.
    ///
    /// # Errors
    /// As [`GatherTag::post_all_gather`], and [`ShardError::OtherGather`] for the tensor of another parameter or phase, which
    /// is left as it is.
    pub fn post_all_gather_into<B: Backend>(
        &self,
        backend: &B,
        shard: &ShardedTensor<B, R>,
        arrived: &[B::Buffer<u8>],
        full: &mut FullTensor<B, R>,
    ) -> Result<(), ShardError> {
        self.check_arrived(backend, shard, arrived)?;
        full.check_made_for(&self.hooks, &self.shard)?;
        full.fill(backend, self.version, shard, arrived)
    }

    /// Whether `shard` is what was sent: for callers that use parts of what arrived as they are, and make the full tensor
    /// later or not at all.
    ///
    /// # Errors
    /// Another shard, or one that was cast since its bytes were sent.
    pub fn check<B: Backend>(&self, shard: &ShardedTensor<B, R>) -> Result<(), ShardError> {
        if version_of(shard) != self.shard {
            return Err(ShardError::OtherGather {
                what: "the shard",
                expected: self.hooks.planned.shards.clone(),
                found: format!(
                    "{}, another parameter",
                    describe(&shard.recipe(), shard.spec())
                ),
            });
        }
        if shard.version() != self.version {
            return Err(ShardError::GatherAgain {
                what: self.hooks.name(),
                why: "was cast after pre_all_gather, so its bytes and its scales may be of different casts",
            });
        }
        Ok(())
    }

    fn check_arrived<B: Backend>(
        &self,
        backend: &B,
        shard: &ShardedTensor<B, R>,
        arrived: &[B::Buffer<u8>],
    ) -> Result<(), ShardError> {
        self.check(shard)?;
        let (what, inputs) = (|| self.hooks.name(), self.hooks.inputs());
        if arrived.len() != inputs.len() {
            return Err(ShardError::Arrivals {
                what: what(),
                needed: inputs.len(),
                found: arrived.len(),
            });
        }
        for (input, buffer) in inputs.iter().zip(arrived) {
            let found = backend.len(buffer);
            if found != input.arriving() {
                return Err(ShardError::ArrivedBytes {
                    what: what(),
                    input: input.spec.key.to_string(),
                    world: input.pieces.len(),
                    padded: input.padded,
                    found,
                });
            }
        }
        Ok(())
    }
}

//! [`Shard`] and [`Gather`]: gathers that FSDP2 does. What travels and what is made of it is `lowp_shard::GatherHooks`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use lowp_format::{Shape, Usage};
use lowp_gemm::Multiplies;
use lowp_kernels::Cpu;
#[cfg(feature = "cuda")]
use lowp_kernels::Cuda;
use lowp_shard::{
    FullTensor, GatherHooks, GatherTag, HookSource, SendBuffers, ShardError, ShardSpec,
    ShardedTensor,
};
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{Device, DeviceArg, Memory, MemoryArg, Owned, Place};
use crate::recipe::Recipe;
use crate::tensor::{Named, name};

/// Sets of addresses that work stays planned for: memory that FSDP2 frees comes back at one of a few.
const SETS: usize = 8;

/// The rows of a weight that this rank stores, as FSDP2 cuts them.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct Shard {
    pub(crate) of: Owned<AnyShard>,
}

#[derive(Clone)]
pub(crate) enum AnyShard {
    Cpu(ShardedTensor<Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(ShardedTensor<Cuda>),
}

/// A backend whose shards and gathers Python may hold.
pub(crate) trait Held: Place + Multiplies {
    fn hold(shard: ShardedTensor<Self>) -> AnyShard;
    fn shard(shard: &AnyShard) -> Option<&ShardedTensor<Self>>;
}

impl Held for Cpu {
    fn hold(shard: ShardedTensor<Self>) -> AnyShard {
        AnyShard::Cpu(shard)
    }

    fn shard(shard: &AnyShard) -> Option<&ShardedTensor<Self>> {
        match shard {
            AnyShard::Cpu(shard) => Some(shard),
            #[cfg(feature = "cuda")]
            AnyShard::Cuda(_) => None,
        }
    }
}

#[cfg(feature = "cuda")]
impl Held for Cuda {
    fn hold(shard: ShardedTensor<Self>) -> AnyShard {
        AnyShard::Cuda(shard)
    }

    fn shard(shard: &AnyShard) -> Option<&ShardedTensor<Self>> {
        match shard {
            AnyShard::Cuda(shard) => Some(shard),
            AnyShard::Cpu(_) => None,
        }
    }
}

#[pymethods]
impl Shard {
    /// The shard of `rank` of `world` of a weight of `full` rows x columns, in `buffers`: those that a shard stores.
    #[new]
    fn new(
        device: DeviceArg,
        recipe: &Recipe,
        full: (usize, usize),
        world: usize,
        rank: usize,
        buffers: Named,
    ) -> Result<Self, Error> {
        let (recipe, shape) = (recipe.recipe, Shape::new(full.0, full.1));
        let spec = ShardSpec::chunked(&recipe, shape, world, rank, Usage::BOTH)?;
        let device = Device::new(&device)?;
        let of = crate::place::on_device!(&device, |backend| made(backend, recipe, spec, buffers))?;
        Ok(Self { of: Owned::new(of) })
    }

    /// Says that the buffers are about to be written by other means than the optimizer.
    fn begin_write(&self) {
        match &*self.of {
            AnyShard::Cpu(shard) => shard.begin_write(),
            #[cfg(feature = "cuda")]
            AnyShard::Cuda(shard) => shard.begin_write(),
        }
    }
}

fn made<B: Held>(
    backend: &B,
    recipe: lowp_format::AnyRecipe,
    spec: ShardSpec,
    buffers: Named,
) -> Result<AnyShard, Error> {
    let wrapped = |(name, memory): (String, MemoryArg)| {
        let memory = Memory::from(memory);
        let bytes = memory.span().len();
        Ok::<_, Error>((name, bytes, Some(backend.wrap(memory)?)))
    };
    let mut buffers = buffers
        .into_iter()
        .map(wrapped)
        .collect::<Result<Vec<_>, _>>()?;
    let shard = ShardedTensor::<B>::with_alloc(recipe, spec, |spec, bytes| {
        let is = |(n, found, _): &&mut (String, usize, _)| *n == name(spec.key) && *found == bytes;
        let found = buffers.iter_mut().find(is);
        // One of another length is as none: the length is checked in Python, and this names the buffer.
        let buffer = found.and_then(|(_, _, buffer)| buffer.take());
        buffer.ok_or_else(|| missing(spec.key))
    })?;
    Ok(B::hold(shard))
}

/// Python gave no memory for a buffer.
fn missing(key: lowp_format::BufferKey) -> ShardError {
    let usage = Usage::BOTH;
    lowp_format::FormatError::MissingBuffer { key, usage }.into()
}

/// Memory of Python as buffers, in order.
fn wrapped<B: Held>(
    backend: &B,
    memory: Vec<Memory>,
) -> Result<std::vec::IntoIter<B::Buffer<u8>>, Error> {
    let buffers = memory.into_iter().map(|m| backend.wrap(m));
    Ok(buffers.collect::<Result<Vec<_>, _>>()?.into_iter())
}

/// What was sent: given to `post` with what arrived.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct SentMark {
    sent: Owned<GatherTag>,
}

/// One parameter's gather for one phase.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct Gather {
    of: Owned<Mutex<Box<dyn Hooked>>>,
}

/// What every rank sends of a buffer.
#[pyclass(frozen, get_all, module = "lowp._lowp")]
pub(crate) struct GatherInput {
    name: String,
    /// Bytes that every rank sends.
    bytes: usize,
    /// Whether this rank sends a padded copy.
    is_padded: bool,
}

/// A buffer of the full tensor.
#[pyclass(frozen, get_all, module = "lowp._lowp")]
pub(crate) struct GatherOutput {
    name: String,
    bytes: usize,
    /// Where it lies: `arrived`, `memory` (its own) or `shard`.
    place: &'static str,
    /// Of what arrived: which input, and from which byte.
    input: usize,
    start: usize,
    /// Whether it is derived later.
    is_derived: bool,
}

/// What the gathers of all backends can do.
trait Hooked: Send + Sync {
    fn hooks(&self) -> &GatherHooks;
    fn rank(&self) -> usize;
    fn attach(&mut self, device: &Device, padded: Vec<Memory>) -> Result<(), Error>;
    fn pre(&self, device: &Device) -> Result<GatherTag, Error>;
    fn check(&self, sent: &GatherTag) -> Result<(), Error>;
    fn post(
        &mut self,
        device: &Device,
        sent: &GatherTag,
        arrived: Vec<Memory>,
        memory: Vec<Memory>,
    ) -> Result<(), Error>;
    fn derive(&mut self, device: &Device) -> Result<(), Error>;
}

struct Of<B: Held> {
    hooks: GatherHooks,
    shard: ShardedTensor<B>,
    send_buffers: Option<SendBuffers<B>>,
    full: Option<FullTensor<B>>,
}

impl<B: Held> Hooked for Of<B> {
    fn hooks(&self) -> &GatherHooks {
        &self.hooks
    }

    fn rank(&self) -> usize {
        self.shard.spec().rank()
    }

    fn attach(&mut self, device: &Device, padded: Vec<Memory>) -> Result<(), Error> {
        let backend = B::of_or(device, "the gather")?;
        let mut padded = wrapped(&backend, padded)?;
        // Their lengths are checked in `send_buffers_with`.
        let next = |input: &lowp_shard::HookInput, _: usize| {
            padded.next().ok_or_else(|| missing(input.spec.key))
        };
        let send_buffers = self.hooks.send_buffers_with(&backend, &self.shard, next)?;
        self.send_buffers = Some(send_buffers);
        Ok(())
    }

    fn pre(&self, device: &Device) -> Result<GatherTag, Error> {
        let backend = B::of_or(device, "the gather")?;
        let send_buffers = self.send_buffers.as_ref();
        let send_buffers = send_buffers.ok_or_else(|| {
            Error::new("pre before attach; give the gather its padded buffers first")
        })?;
        Ok(send_buffers.pre_all_gather(&backend)?)
    }

    fn check(&self, sent: &GatherTag) -> Result<(), Error> {
        Ok(sent.check(&self.shard)?)
    }

    fn post(
        &mut self,
        device: &Device,
        sent: &GatherTag,
        arrived: Vec<Memory>,
        memory: Vec<Memory>,
    ) -> Result<(), Error> {
        let backend = B::of_or(device, "the gather")?;
        let arrived: Vec<_> = wrapped(&backend, arrived)?.collect();
        let mut memory = wrapped(&backend, memory)?;
        let alloc =
            |output: &lowp_shard::HookOutput| memory.next().ok_or_else(|| missing(output.spec.key));
        match &mut self.full {
            None => {
                let mut full = sent.post_all_gather_with(&backend, &self.shard, &arrived, alloc)?;
                full.keep_sets(SETS);
                self.full = Some(full);
            }
            Some(full) => {
                if self
                    .hooks
                    .outputs()
                    .iter()
                    .any(|output| output.has_memory())
                {
                    full.set_memory(&backend, alloc)?;
                }
                sent.post_all_gather_into(&backend, &self.shard, &arrived, full)?;
            }
        }
        Ok(())
    }

    fn derive(&mut self, device: &Device) -> Result<(), Error> {
        let backend = B::of_or(device, "the gather")?;
        match &mut self.full {
            Some(full) => Ok(full.derive(&backend)?),
            None => Err(Error::new("derive before post; gather the tensor first")),
        }
    }
}

fn gathers<B: Held>(
    shard: &ShardedTensor<B>,
    kept: bool,
) -> Result<Vec<Box<dyn Hooked>>, ShardError> {
    let (recipe, spec) = (shard.recipe(), shard.spec());
    let hooks = match kept {
        true => vec![GatherHooks::kept(recipe, spec)?],
        false => GatherHooks::phases(recipe, spec)?.to_vec(),
    };
    let of = |hooks| {
        Box::new(Of {
            hooks,
            shard: shard.clone(),
            send_buffers: None,
            full: None,
        }) as Box<dyn Hooked>
    };
    Ok(hooks.into_iter().map(of).collect())
}

impl Gather {
    fn lock(&self) -> MutexGuard<'_, Box<dyn Hooked>> {
        // Whoever failed in between left the gather as it was: it is filled again, or says so.
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Gather {
    /// The gathers of `shard`: one for each phase, or with `kept` one for both.
    #[staticmethod]
    fn of(shard: &Shard, kept: bool) -> Result<Vec<Self>, Error> {
        let made = match &*shard.of {
            AnyShard::Cpu(shard) => gathers(shard, kept)?,
            #[cfg(feature = "cuda")]
            AnyShard::Cuda(shard) => gathers(shard, kept)?,
        };
        let gather = |of| Self {
            of: Owned::new(Mutex::new(of)),
        };
        Ok(made.into_iter().map(gather).collect())
    }

    /// What every rank sends.
    fn inputs(&self) -> Vec<GatherInput> {
        let of = self.lock();
        let rank = of.rank();
        let row = |input: &lowp_shard::HookInput| GatherInput {
            name: name(input.spec.key),
            bytes: input.padded,
            is_padded: input.pieces[rank] != input.padded,
        };
        of.hooks().inputs().iter().map(row).collect()
    }

    /// What the full tensor is made of.
    fn outputs(&self) -> Vec<GatherOutput> {
        let of = self.lock();
        let row = |output: &lowp_shard::HookOutput| {
            let (place, input, start) = match &output.source {
                HookSource::Arrived { input, bytes } => ("arrived", *input, bytes.start),
                HookSource::Pieces { .. } | HookSource::TransposeOf(_) => ("memory", 0, 0),
                HookSource::Shard => ("shard", 0, 0),
            };
            GatherOutput {
                name: name(output.spec.key),
                bytes: output.bytes,
                place,
                input,
                start,
                is_derived: output.delayed,
            }
        };
        of.hooks().outputs().iter().map(row).collect()
    }

    /// Everything that ranks must have in common.
    fn text(&self) -> String {
        self.lock().hooks().text().to_owned()
    }

    /// Takes memory for the inputs that are padded copies, in their order.
    fn attach(&self, device: DeviceArg, padded: Vec<MemoryArg>) -> Result<(), Error> {
        let padded = padded.into_iter().map(Memory::from).collect();
        self.lock().attach(&Device::new(&device)?, padded)
    }

    /// Brings padded copies up to date, on the stream that sends.
    fn pre(&self, device: DeviceArg) -> Result<SentMark, Error> {
        let sent = self.lock().pre(&Device::new(&device)?)?;
        Ok(SentMark {
            sent: Owned::new(sent),
        })
    }

    /// Fails where the shard was cast since its bytes were sent.
    fn check(&self, sent: &SentMark) -> Result<(), Error> {
        self.lock().check(&sent.sent)
    }

    /// Makes the full tensor of what arrived, on the stream that reads. `memory` is for the outputs that have their own.
    fn post(
        &self,
        py: Python<'_>,
        device: DeviceArg,
        sent: &SentMark,
        arrived: Vec<MemoryArg>,
        memory: Vec<MemoryArg>,
    ) -> Result<(), Error> {
        let device = Device::new(&device)?;
        let arrived = arrived.into_iter().map(Memory::from).collect();
        let memory = memory.into_iter().map(Memory::from).collect();
        py.detach(|| self.lock().post(&device, &sent.sent, arrived, memory))
    }

    /// Makes the outputs that were left for later.
    fn derive(&self, py: Python<'_>, device: DeviceArg) -> Result<(), Error> {
        let device = Device::new(&device)?;
        py.detach(|| self.lock().derive(&device))
    }
}

//! [`Casts`]: casts of values whose addresses come again, such as activations and gathered weights, planned once for each
//! set of addresses.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lowp_format::Shape;
#[cfg(feature = "cuda")]
use lowp_kernels::Cuda;
use lowp_kernels::{Backend, Cpu, DecodeJob, StepScalars, Work};
use lowp_shard::{CastItem, LocalComm, Requantize, ScaleBook, ScaleBookBuilder};
use pyo3::prelude::*;

use crate::cast::orientation_of;
use crate::error::Error;
use crate::place::{Device, DeviceArg, MemoryArg, Place};
use crate::recipe::Recipe;
use crate::tensor::{Named, tensor};

/// What work is planned over: recipe and stream, shape, dtype or orientation, and addresses.
type Key = (String, (usize, usize), String, Vec<(u64, usize)>);

/// Planned casts of one device, up to a number of them; beyond it they are planned anew.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct Casts {
    most: usize,
    of: Mutex<Known>,
}

/// What is planned, by the device.
#[derive(Default)]
struct Known {
    cpu: On<Cpu>,
    #[cfg(feature = "cuda")]
    cuda: On<Cuda>,
}

struct On<B: Place> {
    encodes: HashMap<Key, Planned<B>>,
    decodes: HashMap<Key, B::Plan>,
}

impl<B: Place> Default for On<B> {
    fn default() -> Self {
        Self {
            encodes: HashMap::new(),
            decodes: HashMap::new(),
        }
    }
}

struct Planned<B: Place> {
    book: ScaleBook<B>,
    cast: Requantize<B>,
    comm: LocalComm<B>,
}

impl<B: Place> Planned<B> {
    fn new(
        backend: &B,
        recipe: &Recipe,
        shape: (usize, usize),
        (source, dtype): (MemoryArg, &str),
        buffers: Named,
    ) -> Result<Self, Error> {
        let source = backend.source(source.into(), dtype)?;
        let shape = Shape::new(shape.0, shape.1);
        let tensor = tensor(backend, recipe.recipe, shape, buffers)?;
        let mut book = ScaleBookBuilder::default();
        let item = CastItem::rows(&tensor, source, &mut book);
        let book = book.build(backend)?;
        let cast = Requantize::new(backend, &book, &[item])?;
        Ok(Self {
            book,
            cast,
            comm: LocalComm::solo(backend),
        })
    }

    fn run(&self) -> Result<(), Error> {
        Ok(self.cast.calibrate(&self.book, &self.comm)?)
    }
}

impl Casts {
    fn lock(&self) -> MutexGuard<'_, Known> {
        // Whoever failed in between left the plans as they were.
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Casts {
    /// No casts yet; `most` are kept.
    #[new]
    fn new(most: usize) -> Self {
        let of = Mutex::default();
        Self { most, of }
    }

    /// Casts `source` into `buffers`, with scales from the values.
    #[expect(clippy::too_many_arguments, reason = "one for each argument of Python")]
    fn encode(
        &self,
        py: Python<'_>,
        device: DeviceArg,
        recipe: &Recipe,
        shape: (usize, usize),
        source: MemoryArg,
        dtype: &str,
        buffers: Named,
    ) -> Result<(), Error> {
        let key = key(&device, recipe, shape, dtype, &source, &buffers);
        let source = (source, dtype);
        match &Device::new(&device)? {
            Device::Cpu(backend) => {
                let plan = || Planned::new(backend, recipe, shape, source, buffers);
                py.detach(|| found(&mut self.lock().cpu.encodes, self.most, key, plan)?.run())
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(backend) => {
                let plan = || Planned::new(backend, recipe, shape, source, buffers);
                py.detach(|| found(&mut self.lock().cuda.encodes, self.most, key, plan)?.run())
            }
        }
    }

    /// Decodes `orientation` of `buffers` to `out`, f32 in the order of rows.
    #[expect(clippy::too_many_arguments, reason = "one for each argument of Python")]
    fn decode(
        &self,
        py: Python<'_>,
        device: DeviceArg,
        recipe: &Recipe,
        shape: (usize, usize),
        buffers: Named,
        orientation: &str,
        out: MemoryArg,
    ) -> Result<(), Error> {
        let key = key(&device, recipe, shape, orientation, &out, &buffers);
        let none = StepScalars::default();
        match &Device::new(&device)? {
            Device::Cpu(backend) => {
                let plan = || decode(backend, recipe, shape, buffers, orientation, out);
                py.detach(|| {
                    let mut known = self.lock();
                    let plan = found(&mut known.cpu.decodes, self.most, key, plan)?;
                    Ok(backend.run(plan, &none)?)
                })
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(backend) => {
                let plan = || decode(backend, recipe, shape, buffers, orientation, out);
                py.detach(|| {
                    let mut known = self.lock();
                    let plan = found(&mut known.cuda.decodes, self.most, key, plan)?;
                    Ok(backend.run(plan, &none)?)
                })
            }
        }
    }

    /// How many casts are planned.
    fn __len__(&self) -> usize {
        let known = self.lock();
        let cpu = known.cpu.encodes.len() + known.cpu.decodes.len();
        #[cfg(feature = "cuda")]
        let cpu = cpu + known.cuda.encodes.len() + known.cuda.decodes.len();
        cpu
    }
}

fn key(
    device: &DeviceArg,
    recipe: &Recipe,
    shape: (usize, usize),
    how: &str,
    values: &MemoryArg,
    buffers: &Named,
) -> Key {
    let mut spans = vec![(values.0, values.1)];
    let of = |(_, (pointer, bytes, ..)): &(String, MemoryArg)| (*pointer, *bytes);
    spans.extend(buffers.iter().map(of));
    // The stream is a part of it: a cast belongs to one. So are the names: what serves both directions may lie elsewhere.
    let names: Vec<&str> = buffers.iter().map(|(name, _)| name.as_str()).collect();
    let what = format!("{:?} {:?} {names:?}", recipe.recipe, (device.1, device.2));
    (what, shape, how.to_owned(), spans)
}

/// What is planned for `key`, planned now if it is not there.
fn found<P>(
    known: &mut HashMap<Key, P>,
    most: usize,
    key: Key,
    plan: impl FnOnce() -> Result<P, Error>,
) -> Result<&P, Error> {
    use std::collections::hash_map::Entry;
    if known.len() >= most && !known.contains_key(&key) {
        known.clear();
    }
    match known.entry(key) {
        Entry::Occupied(entry) => Ok(entry.into_mut()),
        Entry::Vacant(entry) => Ok(entry.insert(plan()?)),
    }
}

fn decode<B: Place>(
    backend: &B,
    recipe: &Recipe,
    shape: (usize, usize),
    buffers: Named,
    orientation: &str,
    out: MemoryArg,
) -> Result<B::Plan, Error> {
    let tensor = tensor(
        backend,
        recipe.recipe,
        Shape::new(shape.0, shape.1),
        buffers,
    )?;
    let out = backend.wrap::<f32>(out.into())?;
    let job = DecodeJob::new(&tensor, orientation_of(orientation)?, out)?;
    Ok(backend.plan(Work::Decode(vec![job]))?)
}

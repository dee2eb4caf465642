//! [`Casts`]: casts of values whose addresses come again, such as activations and gathered weights, planned once for each
//! set of addresses.

use std::sync::{Arc, Mutex};

use lowp_comm::LocalComm;
use lowp_format::{AnyRecipe, Shape};
#[cfg(feature = "cuda")]
use lowp_kernels::Cuda;
use lowp_kernels::{Cpu, DecodeJob, StepScalars, Work};
use lowp_shard::{CastItem, Requantize, ScaleBook, ScaleBookBuilder};
use pyo3::prelude::*;

use crate::error::Error;
use crate::locks::lock;
use crate::place::{Device, DeviceArg, MemoryArg, Place, on_device};
use crate::recent::Recent;
use crate::recipe::{ByName, Recipe, orientation_of};
use crate::tensor::{Named, tensor};

/// What work is planned over.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    recipe: ByName,
    /// Device and stream: a cast belongs to one.
    place: (usize, u64),
    shape: (usize, usize),
    /// dtype of values that are cast, or orientation of codes that are decoded and the dtype of their values.
    how: String,
    /// Buffers: what serves both directions may lie elsewhere.
    names: Vec<String>,
    spans: Vec<(u64, usize)>,
}

/// Planned work by what it is over.
type Known<B> = Recent<Key, Arc<Planned<B>>>;

/// Planned casts of one device, up to a number of them; beyond it the one that was not used for longest goes.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct Casts {
    cpu: Mutex<Known<Cpu>>,
    #[cfg(feature = "cuda")]
    cuda: Mutex<Known<Cuda>>,
}

/// A backend whose plans [`Casts`] keeps.
trait Kept: Place {
    fn known(casts: &Casts) -> &Mutex<Known<Self>>;
}

impl Kept for Cpu {
    fn known(casts: &Casts) -> &Mutex<Known<Self>> {
        &casts.cpu
    }
}

#[cfg(feature = "cuda")]
impl Kept for Cuda {
    fn known(casts: &Casts) -> &Mutex<Known<Self>> {
        &casts.cuda
    }
}

/// Planned work.
enum Planned<B: Place> {
    Encode(Box<Encode<B>>),
    Decode(B::Plan),
}

impl<B: Place> Planned<B> {
    fn run(&self, backend: &B) -> Result<(), Error> {
        match self {
            Planned::Encode(encode) => encode.run(),
            Planned::Decode(plan) => Ok(backend.run(plan, &StepScalars::default())?),
        }
    }
}

/// A cast of values into codes.
pub(crate) struct Encode<B: Place> {
    book: ScaleBook<B>,
    cast: Requantize<B>,
    comm: LocalComm<B>,
}

impl<B: Place> Encode<B> {
    pub(crate) fn new(
        backend: &B,
        recipe: AnyRecipe,
        shape: (usize, usize),
        (source, dtype): (MemoryArg, &str),
        buffers: Named,
    ) -> Result<Self, Error> {
        let source = backend.source(source.into(), dtype)?;
        let shape = Shape::new(shape.0, shape.1);
        let tensor = tensor(backend, recipe, shape, buffers)?;
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

    pub(crate) fn run(&self) -> Result<(), Error> {
        Ok(self.cast.calibrate(&self.book, &self.comm)?)
    }
}

impl Casts {
    /// Runs what is planned for `key`, planned now if it is not there. The lock is held for neither.
    fn run<B: Kept>(
        &self,
        backend: &B,
        key: Key,
        plan: impl FnOnce() -> Result<Planned<B>, Error>,
    ) -> Result<(), Error> {
        let known = lock(B::known(self)).get(&key).cloned();
        let planned = match known {
            Some(planned) => planned,
            None => {
                let planned = Arc::new(plan()?);
                let gone = lock(B::known(self)).put(key, Arc::clone(&planned));
                drop(gone);
                planned
            }
        };
        planned.run(backend)
    }
}

#[pymethods]
impl Casts {
    /// No casts yet; `most` are kept.
    #[new]
    fn new(most: usize) -> Self {
        Self {
            cpu: Mutex::new(Recent::new(most)),
            #[cfg(feature = "cuda")]
            cuda: Mutex::new(Recent::new(most)),
        }
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
        let key = key(&device, recipe, shape, dtype.to_owned(), &source, &buffers);
        on_device!(&Device::new(&device)?, |backend| py.detach(|| {
            let plan = || Encode::new(backend, recipe.recipe, shape, (source, dtype), buffers);
            self.run(backend, key, || Ok(Planned::Encode(Box::new(plan()?))))
        }))
    }

    /// Decodes `orientation` of `buffers` to `out`, values of `dtype` in the order of rows.
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
        dtype: &str,
    ) -> Result<(), Error> {
        let how = format!("{orientation} {dtype}");
        let key = key(&device, recipe, shape, how, &out, &buffers);
        on_device!(&Device::new(&device)?, |backend| py.detach(|| {
            let plan = || decode(backend, recipe, shape, buffers, orientation, (out, dtype));
            self.run(backend, key, || Ok(Planned::Decode(plan()?)))
        }))
    }

    /// How many casts are planned.
    fn __len__(&self) -> usize {
        let len = lock(&self.cpu).len();
        #[cfg(feature = "cuda")]
        let len = len + lock(&self.cuda).len();
        len
    }
}

fn key(
    device: &DeviceArg,
    recipe: &Recipe,
    shape: (usize, usize),
    how: String,
    values: &MemoryArg,
    buffers: &Named,
) -> Key {
    let mut spans = vec![(values.0, values.1)];
    let of = |(_, (pointer, bytes, ..)): &(String, MemoryArg)| (*pointer, *bytes);
    spans.extend(buffers.iter().map(of));
    Key {
        recipe: ByName(recipe.recipe),
        place: (device.1, device.2),
        shape,
        how,
        names: buffers.iter().map(|(name, _)| name.clone()).collect(),
        spans,
    }
}

fn decode<B: Place>(
    backend: &B,
    recipe: &Recipe,
    shape: (usize, usize),
    buffers: Named,
    orientation: &str,
    (out, dtype): (MemoryArg, &str),
) -> Result<B::Plan, Error> {
    let tensor = tensor(
        backend,
        recipe.recipe,
        Shape::new(shape.0, shape.1),
        buffers,
    )?;
    let out = backend.source(out.into(), dtype)?;
    let job = DecodeJob::new(&tensor, orientation_of(orientation)?, out)?;
    Ok(backend.plan(Work::Decode(vec![job]))?)
}

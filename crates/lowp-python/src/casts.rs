//! [`Casts`]: casts of values whose addresses come again, such as activations and gathered weights, planned once for each
//! set of addresses.

use std::sync::Arc;

use lowp_comm::LocalComm;
use lowp_format::{AnyRecipe, Shape};
use lowp_kernels::{DecodeJob, StepScalars, Work};
use lowp_shard::{CastItem, CastPlan, ScaleBook, ScaleBookBuilder};
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{Device, DeviceArg, MemoryArg, Owned, Place, on_device};
use crate::planned::{Kept, Planned, Planning};
use crate::recipe::{ByName, Recipe, orientation_of};
use crate::tensor::{Named, tensor};

/// What work is planned over.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
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

/// Planned casts of one device, up to a number of them; beyond it the one that was not used for longest goes.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct Casts(Owned<Planned<Self>>);

impl Planning for Casts {
    type Key = Key;
    type Plan<B: Place> = Cast<B>;
}

/// A planned cast.
pub(crate) enum Cast<B: Place> {
    Encode(Box<Encode<B>>),
    Decode(B::Plan),
}

impl<B: Place> Cast<B> {
    fn run(&self, backend: &B) -> Result<(), Error> {
        match self {
            Cast::Encode(encode) => encode.run(),
            Cast::Decode(plan) => Ok(backend.run(plan, &StepScalars::default())?),
        }
    }
}

/// A cast of values into codes.
pub(crate) struct Encode<B: Place> {
    book: ScaleBook<B>,
    cast: CastPlan<B>,
    comm: LocalComm<B>,
}

impl<B: Place> Encode<B> {
    pub(crate) fn new(
        backend: &B,
        recipe: AnyRecipe,
        shape: Shape,
        source: MemoryArg,
        dtype: &str,
        buffers: Named,
    ) -> Result<Self, Error> {
        let source = backend.source(source.into(), dtype)?;
        let tensor = tensor(backend, recipe, shape, buffers)?;
        let mut book = ScaleBookBuilder::default();
        let item = CastItem::rows(&tensor, source, &mut book);
        let book = book.build(backend)?;
        let cast = CastPlan::new(backend, &book, &[item])?;
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
        plan: impl FnOnce() -> Result<Cast<B>, Error>,
    ) -> Result<(), Error> {
        let planned = match self.0.get(&key) {
            Some(planned) => planned,
            None => {
                let planned = Arc::new(plan()?);
                self.0.put(key, Arc::clone(&planned));
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
        Self(Owned::new(Planned::new(most)))
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
        let matrix = Shape::new(shape.0, shape.1);
        on_device!(&Device::new(&device)?, |backend| py.detach(|| {
            let plan = || Encode::new(backend, recipe.recipe, matrix, source, dtype, buffers);
            self.run(backend, key, || Ok(Cast::Encode(Box::new(plan()?))))
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
        let matrix = Shape::new(shape.0, shape.1);
        on_device!(&Device::new(&device)?, |backend| py.detach(|| {
            let plan = || decode(backend, recipe, matrix, buffers, orientation, out, dtype);
            self.run(backend, key, || Ok(Cast::Decode(plan()?)))
        }))
    }

    /// How many casts are planned.
    fn __len__(&self) -> usize {
        self.0.len()
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
    shape: Shape,
    buffers: Named,
    orientation: &str,
    out: MemoryArg,
    dtype: &str,
) -> Result<B::Plan, Error> {
    let tensor = tensor(backend, recipe.recipe, shape, buffers)?;
    let out = backend.source(out.into(), dtype)?;
    let job = DecodeJob::new(&tensor, orientation_of(orientation)?, out)?;
    Ok(backend.plan(Work::Decode(vec![job]))?)
}

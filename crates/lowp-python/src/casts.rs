//! [`Casts`]: casts of values whose addresses come again, such as activations, planned once for each set of addresses.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lowp_format::Shape;
use lowp_kernels::Cpu;
#[cfg(feature = "cuda")]
use lowp_kernels::Cuda;
use lowp_shard::{CastItem, LocalComm, Requantize, ScaleBook, ScaleBookBuilder};
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{Device, DeviceArg, MemoryArg, Place};
use crate::recipe::Recipe;
use crate::tensor::{Named, tensor};

/// What a cast is planned over: recipe, shape, dtype and addresses.
type Key = (String, (usize, usize), String, Vec<(u64, usize)>);

/// Planned casts, up to a number of them; beyond it they are planned anew.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct Casts {
    most: usize,
    of: Mutex<AnyCasts>,
}

enum AnyCasts {
    None,
    Cpu(HashMap<Key, Planned<Cpu>>),
    #[cfg(feature = "cuda")]
    Cuda(HashMap<Key, Planned<Cuda>>),
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
    fn lock(&self) -> MutexGuard<'_, AnyCasts> {
        // Whoever failed in between left the plans as they were.
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Casts {
    /// No casts yet; `most` are kept.
    #[new]
    fn new(most: usize) -> Self {
        let of = Mutex::new(AnyCasts::None);
        Self { most, of }
    }

    /// Casts `source` into `buffers`, with scales from the values.
    #[expect(clippy::too_many_arguments, reason = "one for each argument of Python")]
    fn run(
        &self,
        py: Python<'_>,
        device: DeviceArg,
        recipe: &Recipe,
        shape: (usize, usize),
        source: MemoryArg,
        dtype: &str,
        buffers: Named,
    ) -> Result<(), Error> {
        let mut spans = vec![(source.0, source.1)];
        spans.extend(
            buffers
                .iter()
                .map(|(_, (pointer, bytes, _))| (*pointer, *bytes)),
        );
        // The stream is a part of it: planned work belongs to one.
        let stream = format!("{:?} {}", recipe.recipe, device.2);
        let key = (stream, shape, dtype.to_owned(), spans);
        let source = (source, dtype);
        let device = Device::new(&device)?;
        let mut casts = self.lock();
        match &device {
            Device::Cpu(backend) => {
                if !matches!(*casts, AnyCasts::Cpu(_)) {
                    *casts = AnyCasts::Cpu(HashMap::new());
                }
                let AnyCasts::Cpu(known) = &mut *casts else {
                    return Ok(());
                };
                run(
                    py, self.most, known, key, backend, recipe, shape, source, buffers,
                )
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(backend) => {
                if !matches!(*casts, AnyCasts::Cuda(_)) {
                    *casts = AnyCasts::Cuda(HashMap::new());
                }
                let AnyCasts::Cuda(known) = &mut *casts else {
                    return Ok(());
                };
                run(
                    py, self.most, known, key, backend, recipe, shape, source, buffers,
                )
            }
        }
    }

    /// How many casts are planned.
    fn __len__(&self) -> usize {
        match &*self.lock() {
            AnyCasts::None => 0,
            AnyCasts::Cpu(known) => known.len(),
            #[cfg(feature = "cuda")]
            AnyCasts::Cuda(known) => known.len(),
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "what Casts::run was given")]
fn run<B: Place>(
    py: Python<'_>,
    most: usize,
    known: &mut HashMap<Key, Planned<B>>,
    key: Key,
    backend: &B,
    recipe: &Recipe,
    shape: (usize, usize),
    source: (MemoryArg, &str),
    buffers: Named,
) -> Result<(), Error> {
    py.detach(|| {
        if !known.contains_key(&key) {
            if known.len() >= most {
                known.clear();
            }
            let planned = Planned::new(backend, recipe, shape, source, buffers)?;
            known.insert(key.clone(), planned);
        }
        match known.get(&key) {
            Some(planned) => planned.run(),
            None => Ok(()),
        }
    })
}

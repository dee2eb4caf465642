//! A quantized model as tensors of floats.

use crate::behind::Later;
use crate::decoding::Decoding;
use crate::error::{Result, mend_file};
use crate::interchange::hub::Hub;
use crate::interchange::shards::{Group, Weights};
use crate::meta::{self, Quantized};
use crate::names::FloatName;
use crate::out::Out;
use crate::progress::Progress;
use crate::quantize::copied_metadata;
use crate::remedy::Remedy;
use crate::round;
use crate::spare::Turns;
use crate::unpack::{orientation, unpack};
use crate::write::{Item, ItemSource, Parts, Sink};
use lowp_format::Orientation;
use lowp_kernels::{Backend, CpuBuffer};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

/// A quantized model that is to be decoded.
#[derive(Debug)]
pub struct Dequantize<'a> {
    hub: &'a Hub,
    tensors: BTreeMap<String, Quantized>,
}

/// What was decoded.
#[derive(Debug)]
pub struct Dequantized {
    /// Tensors that were decoded.
    pub decoded: usize,
    /// Tensors that were written.
    pub tensors: usize,
    /// Bytes that were written.
    pub bytes: u64,
    /// Values that became infinite.
    pub overflows: Overflows,
}

impl<'a> Dequantize<'a> {
    /// The model in `hub`.
    ///
    /// # Errors
    /// It holds no quantized tensor.
    pub fn new(hub: &'a Hub) -> Result<Self> {
        let tensors = meta::quantized(&hub.model)?;
        if tensors.is_empty() {
            return Err(mend_file(
                hub.model.path(),
                "it holds no quantized tensor",
                Remedy::GiveQuantized,
            ));
        }
        Ok(Self { hub, tensors })
    }

    /// Writes its tensors to `out`, the quantized ones decoded on `backend` for `requested`, or for the first orientation there is, and
    /// rounded to `float`.
    ///
    /// # Errors
    /// A tensor cannot be read or decoded so, or the output cannot be written.
    pub fn write<B: Backend>(
        &self,
        backend: &B,
        (requested, float): (Option<Orientation>, FloatName),
        out: Out,
        progress: &dyn Progress,
    ) -> Result<Dequantized> {
        let Hub { model, beside, .. } = self.hub;
        let fields: BTreeSet<String> = self
            .tensors
            .values()
            .flat_map(|tensor| tensor.fields.iter().map(|field| field.name(&tensor.name)))
            .collect();
        let passed = model
            .tensors()
            .filter(|tensor| !fields.contains(tensor.name));
        let mut groups: Vec<Group<'_>> = passed
            .map(|tensor| Group::of(Item::input(tensor)))
            .collect();
        let mut jobs: Vec<(&Quantized, Orientation)> = Vec::new();
        for tensor in self.tensors.values() {
            let orientation = orientation(model, tensor, requested)?;
            groups.push(Group::of(Item {
                name: tensor.name.clone(),
                dtype: float.into(),
                shape: dims(tensor),
                bytes: tensor.shape.elements() * float.size(),
                source: ItemSource::Made {
                    job: jobs.len(),
                    part: 0,
                },
            }));
            jobs.push((tensor, orientation));
        }
        groups.sort_by(|a, b| a.name().cmp(b.name()));
        let (overflows, memory) = (Overflows::default(), Turns::default());
        let make = Box::new(|job: usize| {
            let (tensor, orientation) = jobs[job];
            Ok(Box::new(Decoding {
                backend,
                codes: unpack(backend, model, tensor, Some(orientation))?,
                orientation,
                float,
                name: &tensor.name,
                overflows: &overflows,
                memory: &memory,
            }) as Box<dyn Parts>)
        });
        let mut metadata = copied_metadata(model);
        metadata.remove(meta::FORMAT_KEY);
        let weights = Weights {
            groups,
            metadata,
            make,
            sources: Vec::new(),
        };
        weights.check()?;
        let bytes = out.write([model], &weights, progress, |target| {
            beside.copy_all(target)
        })?;
        let (decoded, tensors) = (self.tensors.len(), weights.groups.len());
        drop(weights);
        Ok(Dequantized {
            decoded,
            tensors,
            bytes,
            overflows,
        })
    }
}

/// Values that become bytes at a time.
const CHUNK: usize = 1 << 18;

/// The values of a tensor, its only part.
pub(crate) struct Decoded<'a, B: Backend> {
    pub(crate) backend: B,
    /// Held until all of them are written.
    pub(crate) values: Arc<B::Buffer<f32>>,
    pub(crate) float: FloatName,
    pub(crate) name: &'a str,
    pub(crate) overflows: &'a Overflows,
}

/// f32 values, whose bytes are those of the file.
struct Floats<B: Backend> {
    backend: B,
    values: Arc<B::Buffer<f32>>,
}

impl<B: Backend> Later for Floats<B> {
    fn len(&self) -> usize {
        self.backend.len::<f32>(&self.values) * size_of::<f32>()
    }

    fn each(&self, take: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let values: &dyn Any = &*self.values;
        if let Some(on_host) = values.downcast_ref::<CpuBuffer<f32>>()
            && cfg!(target_endian = "little")
        {
            let values = on_host.read().map_err(io::Error::other)?;
            return take(bytemuck::cast_slice(&values));
        }
        let (len, mut bytes) = (self.len() / size_of::<f32>(), Vec::new());
        let mut values = vec![0f32; CHUNK.min(len)];
        for start in (0..len).step_by(CHUNK) {
            let values = &mut values[..CHUNK.min(len - start)];
            let read = self.backend.read(&self.values, start, values);
            read.map_err(io::Error::other)?;
            bytes.clear();
            round::append(FloatName::F32, values, &mut bytes);
            take(&bytes)?;
        }
        Ok(())
    }
}

impl<B: Backend> Parts for Decoded<'_, B> {
    fn later(&self, _: usize) -> Option<Box<dyn Later>> {
        let is_long = self.backend.len::<f32>(&self.values) >= CHUNK;
        (is_long && self.float == FloatName::F32).then(|| -> Box<dyn Later> {
            Box::new(Floats {
                backend: self.backend.clone(),
                values: Arc::clone(&self.values),
            })
        })
    }

    fn write(&self, _: usize, sink: &mut Sink<'_>) -> Result<()> {
        let len = self.backend.len::<f32>(&self.values);
        let (mut values, mut bytes) = (vec![0f32; CHUNK.min(len)], Vec::new());
        for start in (0..len).step_by(CHUNK) {
            let values = &mut values[..CHUNK.min(len - start)];
            self.backend.read(&self.values, start, values)?;
            bytes.clear();
            let overflowed = round::append(self.float, values, &mut bytes);
            self.overflows.add(self.name, overflowed);
            sink(&bytes)?;
        }
        Ok(())
    }
}

/// Finite values that became infinite.
#[derive(Debug, Default)]
pub struct Overflows {
    count: Cell<usize>,
    /// The first tensor that has one.
    first: RefCell<Option<String>>,
}

impl Overflows {
    /// Counts `count` values of tensor `name`.
    pub(crate) fn add(&self, name: &str, count: usize) {
        if count > 0 {
            self.count.set(self.count.get() + count);
            self.first
                .borrow_mut()
                .get_or_insert_with(|| name.to_owned());
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count.get()
    }

    /// The first tensor that has one.
    pub fn first(&self) -> Option<String> {
        self.first.borrow().clone()
    }
}

/// The dimensions of what this file holds of the tensor.
pub(crate) fn dims(tensor: &Quantized) -> Vec<usize> {
    match tensor.shard {
        None => tensor.text.shape.clone(),
        Some(_) => vec![tensor.shape.rows, tensor.shape.cols],
    }
}

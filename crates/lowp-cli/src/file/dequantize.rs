//! `lowp dequantize`: a quantized model as tensors of floats.

use super::behind::Later;
use super::decoding::Decoding;
use super::fields::holding;
use super::input_error::file_error;
use super::interchange::hub::Hub;
use super::interchange::shards::{Group, Weights};
use super::meta::{self, Quantized};
use super::model::Model;
use super::names::{FloatName, OrientationName};
use super::out::OutArgs;
use super::progress::Progress;
use super::quantize::copied_metadata;
use super::round;
use super::spare::Turns;
use super::summary::{Summary, Verbosity};
use super::unpack::{served, unpack};
use super::write::{Item, ItemSource, Parts, Sink};
use crate::device::{Device, OnDevice};
use crate::output::{note, shown};
use anyhow::Result;
use lowp_format::{Orientation, Usage};
use lowp_kernels::{Backend, CpuBuffer};
use safetensors::Dtype;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Decode a quantized model to floats
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp dequantize q.safetensors -o back.safetensors
  lowp dequantize q.safetensors -o back.safetensors --usage columnwise
  lowp dequantize q.safetensors -o back.safetensors --dtype bf16

Every quantized tensor T is written under its own name with its own shape, as f32 or rounded once
from f32 to nearest, ties to even. Values beyond the range of a narrower float become infinite, and
a warning counts them. Tensors that passed through stay as they are.")]
pub(crate) struct Args {
    /// What `lowp quantize` or `lowp unshard` wrote, or a file of `lowp shard`: a .safetensors file, the .safetensors.index.json of
    /// a sharded model, or a folder
    input: PathBuf,

    #[command(flatten)]
    out: OutArgs,

    /// Orientation to decode [default: rowwise where it is there]
    #[arg(long, value_name = "USAGE")]
    usage: Option<OrientationName>,

    /// Dtype of the decoded tensors
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    dtype: FloatName,

    /// Where the values are decoded: `cpu`, `cuda` or `cuda:N`. They are the same
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,

    #[command(flatten)]
    verbosity: Verbosity,
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be read, or an output that cannot be written.
pub(super) fn main(args: &Args) -> Result<()> {
    args.device.run(args)
}

impl OnDevice for &Args {
    type Out = ();

    fn run<B: Backend>(self, backend: &B) -> Result<()> {
        let summary = Summary::begin(self.verbosity);
        let Hub { model, beside, .. } = Hub::open(&self.input)?;
        let tensors = meta::quantized(&model)?;
        if tensors.is_empty() {
            return Err(file_error(
                model.path(),
                "it holds no quantized tensor; give a file that `lowp quantize` wrote",
            ));
        }
        let out = self.out.open(model.files())?;
        let requested = self.usage.map(Into::into);
        let fields: BTreeSet<String> = tensors
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
        for tensor in tensors.values() {
            let orientation = orientation(&model, tensor, requested)?;
            groups.push(Group::of(Item {
                name: tensor.name.clone(),
                dtype: self.dtype.into(),
                shape: dims(tensor),
                bytes: tensor.shape.elements() * Dtype::from(self.dtype).bitsize() / 8,
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
                codes: unpack(backend, &model, tensor, Some(orientation))?,
                orientation,
                float: self.dtype,
                name: &tensor.name,
                overflows: &overflows,
                memory: &memory,
            }) as Box<dyn Parts>)
        });
        let mut metadata = copied_metadata(&model);
        metadata.remove(meta::FORMAT_KEY);
        let weights = Weights {
            groups,
            metadata,
            make,
            sources: Vec::new(),
        };
        weights.check()?;
        let progress = Progress::new("dequantize");
        let written = out.write([&model], &weights, &progress, |target| {
            beside.copy_all(target)
        })?;
        progress.finish();
        if summary.is_told() {
            beside.tell();
        }
        overflows.warn(self.dtype, "--dtype f32");
        let (made, all) = (tensors.len(), weights.groups.len());
        let what = format!("dequantized {made} of {all} tensors");
        summary.done(&what, model.bytes(), written);
        Ok(())
    }
}

/// Values that become bytes at a time.
const CHUNK: usize = 1 << 18;

/// The values of a tensor, its only part.
pub(super) struct Decoded<'a, B: Backend> {
    pub(super) backend: B,
    /// Held until all of them are written.
    pub(super) values: Arc<B::Buffer<f32>>,
    pub(super) float: FloatName,
    pub(super) name: &'a str,
    pub(super) overflows: &'a Overflows,
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
pub(super) struct Overflows {
    count: Cell<usize>,
    /// The first tensor that has one.
    first: RefCell<Option<String>>,
}

impl Overflows {
    /// Counts `count` values of tensor `name`.
    pub(super) fn add(&self, name: &str, count: usize) {
        if count > 0 {
            self.count.set(self.count.get() + count);
            self.first
                .borrow_mut()
                .get_or_insert_with(|| name.to_owned());
        }
    }

    /// Says so, where there are any.
    pub(super) fn warn(&self, float: FloatName, keep: &str) {
        if let Some(name) = self.first.borrow().as_deref() {
            note(&format!(
                "warning: {} values are beyond the range of {} and became infinite, the first in '{}'; {keep} \
                 keeps them",
                self.count.get(),
                Dtype::from(float),
                shown(name)
            ));
        }
    }
}

/// The dimensions of what this file holds of the tensor.
pub(super) fn dims(tensor: &Quantized) -> Vec<usize> {
    match tensor.shard {
        None => tensor.text.shape.clone(),
        Some(_) => vec![tensor.shape.rows, tensor.shape.cols],
    }
}

/// The orientation to decode: the one that is requested, or the first there is.
pub(super) fn orientation(
    model: &Model,
    tensor: &Quantized,
    requested: Option<Orientation>,
) -> Result<Orientation> {
    // A buffer for both orientations may have been asked for and written for one of them only.
    let there = |o: &Orientation| {
        let serving = tensor
            .specs
            .iter()
            .filter(|spec| spec.key.usage.contains(o.usage()));
        served(tensor).contains(o.usage())
            && serving
                .into_iter()
                .all(|spec| holding(&tensor.fields, spec.key, *o).is_some())
    };
    match requested {
        Some(requested) if !there(&requested) => {
            let name = shown(&tensor.name);
            let usage = served(tensor) & tensor.usage;
            Err(file_error(
                model.path(),
                format!(
                    "'{name}' was quantized for {usage} and cannot be decoded {requested}; leave out --usage, or quantize it for both"
                ),
            ))
        }
        Some(requested) => Ok(requested),
        None => Orientation::ALL.into_iter().find(there).ok_or_else(|| {
            file_error(
                model.path(),
                format!("'{}' has no usage {}", shown(&tensor.name), Usage::BOTH),
            )
        }),
    }
}

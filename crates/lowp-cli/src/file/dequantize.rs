//! `lowp dequantize`: a quantized model as f32 tensors.

use super::fields::holding;
use super::meta::{self, Quantized};
use super::model::Model;
use super::names::OrientationName;
use super::progress::Progress;
use super::quantize::copied_metadata;
use super::refuse::refuse_file;
use super::summary::{Summary, Verbosity};
use super::target::FileTarget;
use super::unpack::{decode, served, unpack};
use super::write::{From, Item, Outputs, Parts, Sink};
use crate::device::{Device, OnDevice};
use crate::output::shown;
use anyhow::Result;
use lowp_format::{Orientation, Usage};
use lowp_kernels::Backend;
use safetensors::Dtype;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Decode a quantized model to f32
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp dequantize q.safetensors -o back.safetensors
  lowp dequantize q.safetensors -o back.safetensors --usage columnwise

Every quantized tensor T comes back under its own name with its own shape. Tensors that passed
through stay as they are.")]
pub(crate) struct Args {
    /// A file that `lowp quantize`, `lowp unshard` or `lowp shard` wrote
    input: PathBuf,

    /// The file to write
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,

    /// Orientation to decode [default: rowwise where it is there]
    #[arg(long, value_name = "USAGE")]
    usage: Option<OrientationName>,

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
        let model = Model::open(&self.input)?;
        let tensors = meta::quantized(&model)?;
        if tensors.is_empty() {
            return Err(refuse_file(
                model.path(),
                "it holds no quantized tensor; give a file that `lowp quantize` wrote",
            ));
        }
        let target = FileTarget::new(&self.output, model.files())?;
        let wanted = self.usage.map(Into::into);
        let fields: BTreeSet<String> = tensors
            .values()
            .flat_map(|tensor| tensor.fields.iter().map(|field| field.name(&tensor.name)))
            .collect();
        let passed = model
            .tensors()
            .filter(|tensor| !fields.contains(tensor.name));
        let mut items: Vec<Item<'_>> = passed.map(Item::input).collect();
        let mut jobs: Vec<(&Quantized, Orientation)> = Vec::new();
        for tensor in tensors.values() {
            let orientation = orientation(&model, tensor, wanted)?;
            items.push(Item {
                name: tensor.name.clone(),
                dtype: Dtype::F32,
                shape: dims(tensor),
                bytes: tensor.shape.elements() * size_of::<f32>(),
                from: From::Made {
                    job: jobs.len(),
                    part: 0,
                    number: false,
                },
            });
            jobs.push((tensor, orientation));
        }
        let make = Box::new(|job: usize, _| {
            let (tensor, orientation) = jobs[job];
            let codes = unpack(backend, &model, tensor, Some(orientation))?;
            let values = decode(backend, &codes, orientation)?;
            let backend = backend.clone();
            Ok(Box::new(Decoded { backend, values }) as Box<dyn Parts>)
        });
        let mut metadata = copied_metadata(&model);
        metadata.remove(meta::FORMAT_KEY);
        let outputs = Outputs {
            items,
            metadata,
            make,
            sources: Vec::new(),
        };
        outputs.check()?;
        let progress = Progress::new("dequantize");
        progress.begin(outputs.work());
        let written = target.fill(|draft| outputs.write(draft, &progress))?;
        progress.finish();
        let (made, all) = (tensors.len(), outputs.items.len());
        let what = format!("dequantized {made} of {all} tensors");
        summary.done(&what, model.bytes(), written);
        Ok(())
    }
}

/// Values that become bytes at a time.
const CHUNK: usize = 1 << 18;

/// The values of a tensor, its only part.
struct Decoded<B: Backend> {
    backend: B,
    values: B::Buffer<f32>,
}

impl<B: Backend> Parts for Decoded<B> {
    fn write(&self, _: usize, sink: &mut Sink<'_>) -> Result<()> {
        let len = self.backend.len::<f32>(&self.values);
        let (mut values, mut bytes) = (vec![0f32; CHUNK.min(len)], Vec::new());
        for start in (0..len).step_by(CHUNK) {
            let values = &mut values[..CHUNK.min(len - start)];
            self.backend.read(&self.values, start, values)?;
            bytes.clear();
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            sink(&bytes)?;
        }
        Ok(())
    }
}

/// The dimensions of what this file holds of the tensor.
fn dims(tensor: &Quantized) -> Vec<usize> {
    match tensor.shard {
        None => tensor.text.shape.clone(),
        Some(_) => vec![tensor.shape.rows, tensor.shape.cols],
    }
}

/// The orientation to decode: the one that is wanted, or the first there is.
pub(super) fn orientation(
    model: &Model,
    tensor: &Quantized,
    wanted: Option<Orientation>,
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
    match wanted {
        Some(wanted) if !there(&wanted) => {
            let name = shown(&tensor.name);
            let usage = served(tensor) & tensor.usage;
            Err(refuse_file(
                model.path(),
                format!(
                    "'{name}' was quantized for {usage} and cannot be decoded {wanted}; leave out --usage, or quantize it for both"
                ),
            ))
        }
        Some(wanted) => Ok(wanted),
        None => Orientation::ALL.into_iter().find(there).ok_or_else(|| {
            refuse_file(
                model.path(),
                format!("'{}' has no usage {}", shown(&tensor.name), Usage::BOTH),
            )
        }),
    }
}

//! `lowp dequantize`: a quantized model as tensors of floats, by [`Dequantize`].

use super::names::{FLOATS, ORIENTATIONS};
use super::out::OutArgs;
use super::progress::Bar;
use super::summary::{Summary, Verbosity, left_out, warn_of_overflows};
use crate::device::{Device, OnDevice};
use crate::one_of::one_of;
use anyhow::Result;
use lowp_file::Hub;
use lowp_file::dequantize::Dequantize;
use lowp_file::dtypes::OutputDtype;
use lowp_format::Orientation;
use lowp_kernels::Backend;
use std::path::PathBuf;

/// Decode a quantized model to floats
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp dequantize q.safetensors -o back.safetensors
  lowp dequantize q.safetensors -o back.safetensors --usage columnwise
  lowp dequantize q.safetensors -o back.safetensors --dtype bf16

Every quantized tensor T is written under its own name with its own shape, as f32 or rounded once
from f32 to nearest, ties to even. Values beyond the range of a narrower float become infinite, and
a warning counts them. Tensors that were not quantized are copied unchanged.")]
pub(crate) struct Args {
    /// Output of `lowp quantize` or `lowp unshard`, or a file of `lowp shard`: a .safetensors file, the .safetensors.index.json of
    /// a sharded model, or a folder
    input: PathBuf,

    #[command(flatten)]
    out: OutArgs,

    /// Orientation to decode [default: rowwise if the file has it]
    #[arg(long, value_parser = one_of(ORIENTATIONS))]
    usage: Option<Orientation>,

    /// Dtype of the decoded tensors
    #[arg(long, default_value = "f32", value_parser = one_of(FLOATS))]
    dtype: OutputDtype,

    /// Device that decodes the values: `cpu`, `cuda` or `cuda:N`. All devices give the same values
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,

    #[command(flatten)]
    verbosity: Verbosity,
}

pub(super) fn main(args: &Args) -> Result<()> {
    args.device.run(args)
}

impl OnDevice for &Args {
    fn run<B: Backend>(self, backend: &B) -> Result<()> {
        let summary = Summary::begin(self.verbosity);
        let hub = Hub::open(&self.input)?;
        let model = Dequantize::new(&hub)?;
        let out = self.out.open(hub.model.files())?;
        let bar = Bar::new("dequantize");
        let done = model.write(backend, self.usage, self.dtype, out, &bar)?;
        bar.finish();
        left_out(&summary, &hub.other_files);
        warn_of_overflows(&done.overflows, self.dtype, "--dtype f32");
        let what = format!("dequantized {} of {} tensors", done.decoded, done.tensors);
        summary.done(&what, hub.model.bytes(), done.bytes);
        Ok(())
    }
}

//! `lowp quantize`: a model with its matrices in a low-precision recipe, by [`lowp_file::quantize()`].

use super::args::{RecipeArgs, example};
use super::names::DtypesArgs;
use super::out::OutArgs;
use super::progress::Bar;
use super::summary::{Summary, Verbosity, left_out};
use crate::device::{Device, OnDevice};
use crate::usage::input_error;
use anyhow::Result;
use lowp_file::quantize::FlatCuts;
use lowp_file::{FileError, Hub, Setup};
use lowp_kernels::Backend;
use std::path::PathBuf;

/// Quantize the matrices of a safetensors model
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:
  lowp quantize model.safetensors -o q.safetensors --recipe {recipe}
  lowp quantize model-folder -o quantized --recipe {recipe} --keep-unfit --max-shard-size 2GB
  lowp quantize in.safetensors -o q.safetensors --recipe {recipe} --tensors '*.weight'
  lowp quantize in.safetensors -o q.safetensors --recipe {recipe} --ignore 'lm_head*'
  lowp quantize in.safetensors -o q.safetensors --recipe {recipe} --flat-cuts 1000,5001

A tensor T of two or more dimensions (F32, BF16, F16; leading ones flatten to rows) becomes
T.rowwise_data, T.rowwise_scale_inv, T.columnwise_data, T.columnwise_scale_inv and, where the
recipe looks at the tensor's amax, T.amax (of rows: T.amax, of columns: T.amax_columnwise). FP8
codes are E4M3 unless --format says otherwise. Others pass through unchanged, integers of any shape
among them. The file's metadata say under lowp.tensor.T what T was and how it was quantized.

A file that is replaced keeps its permissions; its owner is who runs the command.", recipe = example()))]
pub(crate) struct Args {
    /// A .safetensors file, the .safetensors.index.json of a sharded model, or a folder as Hugging Face keeps models
    input: PathBuf,

    #[command(flatten)]
    out: OutArgs,

    #[command(flatten)]
    dtypes: DtypesArgs,

    /// Where the cast runs: `cpu`, `cuda` or `cuda:N`. The bytes are the same
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,

    /// Cast as ranks of ZeRO-1 do, which cut the flattened elements of every tensor at these offsets, anywhere: the
    /// same bytes. Offsets beyond the end of a tensor leave the later ranks none of it
    #[arg(long, value_name = "A,B,C", value_delimiter = ',')]
    flat_cuts: Vec<usize>,

    #[command(flatten)]
    recipe: RecipeArgs,

    #[command(flatten)]
    verbosity: Verbosity,
}

pub(super) fn main(args: &Args) -> Result<()> {
    args.device.run(args)
}

impl OnDevice for &Args {
    fn run<B: Backend>(self, backend: &B) -> Result<()> {
        let setup = Setup {
            dtypes: self.dtypes.dtypes,
            ..self.recipe.setup()?
        };
        let select = self.recipe.select()?;
        let cuts = FlatCuts::new(&self.flat_cuts).map_err(of_flat_cuts)?;
        let summary = Summary::begin(self.verbosity);
        let hub = Hub::open(&self.input)?;
        let chosen = select.choose(&hub.model, &setup)?;
        if let Some(cuts) = &cuts {
            cuts.check(&chosen.choices).map_err(of_flat_cuts)?;
        }
        let out = self.out.open(hub.model.files())?;
        let bar = Bar::new("quantize");
        let written = lowp_file::quantize(backend, &hub, &chosen.choices, cuts, out, &bar)?;
        bar.finish();
        left_out(&summary, &hub.other_files);
        chosen.tell("quantized", &summary, hub.model.bytes(), written);
        Ok(())
    }
}

/// What is wrong with `--flat-cuts`.
fn of_flat_cuts(error: FileError) -> anyhow::Error {
    input_error(format!("--flat-cuts: {error}"))
}

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
  lowp quantize model-folder -o q --recipe {recipe} --skip-unsupported --max-shard-size 2GB
  lowp quantize in.safetensors -o q.safetensors --recipe {recipe} --tensors '*.weight'
  lowp quantize in.safetensors -o q.safetensors --recipe {recipe} --ignore 'lm_head*'
  lowp quantize in.safetensors -o q.safetensors --recipe {recipe} --flat-cuts 1000,5001

A tensor T of two or more dimensions (F32, BF16, F16; leading ones flatten to rows) becomes
T.rowwise_data, T.rowwise_scale_inv, T.columnwise_data, T.columnwise_scale_inv and, if the
recipe uses the tensor's amax, T.amax (per row: T.amax, per column: T.amax_columnwise). FP8 codes
are E4M3 unless --format says otherwise. Other tensors pass through unchanged, also integers of any
shape. The key lowp.tensor.T in the file's metadata records what T was and how it was quantized.

If the output replaces a file, it keeps the permissions of that file; its owner is the user who runs
the command.", recipe = example()))]
pub(crate) struct Args {
    /// A .safetensors file, the .safetensors.index.json of a sharded model, or a Hugging Face model folder
    input: PathBuf,

    #[command(flatten)]
    out: OutArgs,

    #[command(flatten)]
    dtypes: DtypesArgs,

    /// Device of the cast: `cpu`, `cuda` or `cuda:N`. All devices give the same bytes
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,

    /// Cast like ranks of ZeRO-1: cut the flattened elements of every tensor at these offsets, one part per rank. The
    /// bytes are the same for any offsets. After an offset beyond the end of a tensor, the later ranks have no part of it
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

fn of_flat_cuts(error: FileError) -> anyhow::Error {
    input_error(format!("--flat-cuts: {error}"))
}

//! `lowp import`: quantized weights of other programs as lowp's own files, or decoded, by [`Import`].

use super::names::DtypesArgs;
use super::out::OutArgs;
use super::progress::Bar;
use super::summary::{Summary, Verbosity, warn_of_overflows};
use crate::one_of::{Named, one_of};
use crate::output::note;
use anyhow::Result;
use lowp_file::dtypes::OutputDtype;
use lowp_file::{Hub, Import};
use std::path::PathBuf;

/// Convert a quantized model of another program to files of lowp
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp import hub -o q.safetensors
  lowp import hub -o folder --max-shard-size 2GB
  lowp import DeepSeek-V3 -o decoded --to bf16

IN is a Hugging Face folder, a safetensors file or the index of a sharded model, in a format of
compressed-tensors, ModelOpt or DeepSeek, or with the names of TransformerEngine. If `lowp export`
wrote it, the result is byte for byte the exported model, except for what the target does not
store: columnwise operands that do not follow from the rowwise ones, and for `te` the form of
scales, which are padded. Otherwise the recipe is the first one with these codes and scales, with
its default options, and the amax of a tensor is the nearest one that gives the stored scale
(docs/decisions/0017-interchange.md).

If IN is a folder, the quantization section of its config.json is removed.")]
pub(crate) struct Args {
    /// A quantized model
    #[arg(value_name = "IN")]
    input: PathBuf,

    #[command(flatten)]
    out: OutArgs,

    #[command(flatten)]
    dtypes: DtypesArgs,

    /// Decode the weights instead
    #[arg(long, value_name = "FLOAT", value_parser = one_of(FLOATS))]
    to: Option<OutputDtype>,

    #[command(flatten)]
    verbosity: Verbosity,
}

const FLOATS: &[Named<OutputDtype>] = &[
    ("fp32", "F32", OutputDtype::F32),
    ("bf16", "BF16, rounded to nearest even", OutputDtype::Bf16),
];

pub(super) fn main(args: &Args) -> Result<()> {
    let summary = Summary::begin(args.verbosity);
    let hub = Hub::open(&args.input)?;
    let import = Import::new(&hub, args.to, args.dtypes.dtypes)?;
    let out = args.out.open(hub.model.files())?;
    let bar = Bar::new("import");
    let (written, overflows) = import.write(out, &bar)?;
    bar.finish();
    if let Some(float) = args.to {
        warn_of_overflows(&overflows, float, "--to fp32");
    }
    let foreign = import.foreign();
    if summary.is_watched() && foreign > 0 && args.to.is_none() {
        note(&format!(
            "note: {foreign} weights do not record their recipe; lowp uses the first recipe that decodes them, with its default options"
        ));
    }
    let what = format!("imported {} weights", import.weights());
    summary.done(&what, hub.model.bytes(), written);
    Ok(())
}

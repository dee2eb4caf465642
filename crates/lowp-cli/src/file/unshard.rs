//! `lowp unshard`: rank files gathered into the file that `lowp quantize` would have written, by [`RankFiles`].

use super::args::example;
use super::names::DtypesArgs;
use super::out::OutArgs;
use super::progress::Bar;
use super::summary::{Summary, Verbosity, left_out};
use anyhow::Result;
use lowp_file::ranks::RankFiles;
use std::path::PathBuf;

/// Gather rank files into one quantized model
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:
  lowp shard model.safetensors -o ranks --world-size 4 --recipe {recipe}
  lowp unshard ranks -o q.safetensors

Every tensor of the result equals that of `lowp quantize` with the same options, byte for byte.", recipe = example()))]
pub(crate) struct Args {
    /// The folder that `lowp shard` wrote
    input: PathBuf,

    #[command(flatten)]
    out: OutArgs,

    #[command(flatten)]
    dtypes: DtypesArgs,

    #[command(flatten)]
    verbosity: Verbosity,
}

pub(super) fn main(args: &Args) -> Result<()> {
    let summary = Summary::begin(args.verbosity);
    let rank_files = RankFiles::open(&args.input)?;
    let out = args.out.open(rank_files.files())?;
    let bar = Bar::new("unshard");
    let (written, other_files) = rank_files.write(args.dtypes.dtypes, out, &bar)?;
    bar.finish();
    left_out(&summary, &other_files);
    let what = format!(
        "gathered {} tensors of {} ranks",
        rank_files.tensors(),
        rank_files.ranks()
    );
    summary.done(&what, rank_files.bytes(), written);
    Ok(())
}

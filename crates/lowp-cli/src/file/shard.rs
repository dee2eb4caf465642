//! `lowp shard`: one file per rank, each with its own rows, by [`lowp_file::ranks::shard`].

use super::args::{RecipeArgs, example};
use super::progress::Bar;
use super::summary::{Summary, Verbosity, left_out};
use crate::usage::input_error;
use anyhow::Result;
use lowp_file::Hub;
use lowp_file::ranks::MAX_WORLD;
use std::path::PathBuf;

/// Cut a model into one quantized file per rank
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:
  lowp shard model.safetensors -o ranks --world-size 4 --recipe {recipe}
  lowp unshard ranks -o q.safetensors

Every rank quantizes its own rows. All ranks agree on scales that depend on other rows, too, so
`lowp unshard` writes the bytes that `lowp quantize` with the same options writes. Rank files
have scales in the compact form, and no buffer that follows from another; --usage and --scales
define what unshard writes. Tensors that are not quantized are in the file of rank 0. Other files
of an input folder are copied.", recipe = example()))]
pub(crate) struct Args {
    /// A .safetensors file, the .safetensors.index.json of a sharded model, or a Hugging Face model folder
    input: PathBuf,

    /// The folder to write: absent, or empty
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,

    /// Number of ranks
    #[arg(long, value_name = "N")]
    world_size: usize,

    #[command(flatten)]
    recipe: RecipeArgs,

    #[command(flatten)]
    verbosity: Verbosity,
}

pub(super) fn main(args: &Args) -> Result<()> {
    let summary = Summary::begin(args.verbosity);
    let setup = args.recipe.setup()?;
    let select = args.recipe.select()?;
    let world = args.world_size;
    if !(1..=MAX_WORLD).contains(&world) {
        return Err(input_error(format!(
            "--world-size {world}: give a number from 1 to {MAX_WORLD}"
        )));
    }
    let hub = Hub::open(&args.input)?;
    let chosen = select.choose(&hub.model, &setup)?;
    let bar = Bar::new("shard");
    let written = lowp_file::ranks::shard(&hub, &chosen.choices, world, &args.output, &bar)?;
    bar.finish();
    left_out(&summary, &hub.other_files);
    chosen.tell("sharded", &summary, hub.model.bytes(), written);
    Ok(())
}

//! `lowp export`: a quantized model in the files of other programs, by [`Export`].

mod fused;
mod target;
#[cfg(test)]
mod tests;

use super::checkpoint_of::checkpoint_of;
use super::progress::Bar;
use super::size::bytes;
use super::summary::{Summary, Verbosity, left_out, warn_of_overflows};
use crate::one_of::one_of;
use crate::output::{note, shown};
use crate::usage::{AMAX_GROUP, input_error, of_patterns};
use anyhow::Result;
use fused::OnFused;
use lowp_file::export::{Export, ExportTarget, TrainedCheckpoint};
use lowp_file::{Hub, patterns};
use std::path::PathBuf;
use target::{TARGETS, table};

/// Write a quantized model in the form of other programs
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:
  lowp export q.safetensors -o hub --to compressed-tensors
  lowp export model-folder -o hub --to modelopt --max-shard-size 2GB
  lowp export checkpoints/run-seed0 -o hub --to bf16

IN is a file that `lowp quantize` wrote, the index of such a model, a Hugging Face folder, a folder
of checkpoints of `lowp train --save`, of which the latest is used, or the folder of --save itself,
if it has one run. The output folder has model.safetensors, or several files and their index, and
config.json; tokenizers and all other files of IN's folder are copied.

Codes and scales are the bytes of IN; if the blocks of IN are larger than those of the target, their
scales are repeated. Only the rowwise operand is stored, except by te, which has both; fp32 and bf16
have decoded values (of a checkpoint: its masters). `lowp import` reverses the export. The
targets of each recipe, with the target's name of the format:

{}
Every recipe goes to fp32, bf16 and te. A recipe with FP8 codes of E5M2 (--format e5m2) or one amax
per row (--row-scaled) goes only to these three.", table()))]
pub(crate) struct Args {
    /// A quantized model, or a checkpoint
    #[arg(value_name = "IN")]
    input: PathBuf,

    /// The folder to write: absent, or empty
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,

    /// What reads it
    #[arg(long, value_name = "TARGET", value_parser = one_of(TARGETS))]
    to: ExportTarget,

    /// Weights that a pattern matches and that differ only inside its braces must have one amax, as TARGET's readers want of layers which
    /// they run as one: '*.{q,k,v}_proj.weight,*.{gate,up}_proj.weight'
    #[arg(long, value_name = "GLOB,..")]
    amax_group: Vec<String>,

    /// Layers that engines run as one (query, key and value; gate and up) and that have scales of the tensor of their own, of
    /// which engines take one for all
    #[arg(long, value_name = "WHAT", default_value = "warn")]
    fused: OnFused,

    /// Maximum bytes of tensors per file; a tensor and its scales stay together
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = bytes)]
    max_shard_size: u64,

    #[command(flatten)]
    verbosity: Verbosity,
}

pub(super) fn main(args: &Args) -> Result<()> {
    let to = args.to;
    if let Some(run) = checkpoint_of(&args.input)? {
        let values = matches!(to, ExportTarget::Fp32 | ExportTarget::Bf16);
        let trained = TrainedCheckpoint::open(&run, values)?;
        return export(
            Export::of_checkpoint(&trained, to)?,
            args,
            None,
            trained.bytes(),
        );
    }
    let hub = Hub::open(&args.input)?;
    export(
        Export::of_model(&hub, to)?,
        args,
        Some(&hub),
        hub.model.bytes(),
    )
}

fn export(export: Export<'_>, args: &Args, hub: Option<&Hub>, read: u64) -> Result<()> {
    let summary = Summary::begin(args.verbosity);
    let to = args.to;
    check_amaxes(&export, &args.amax_group)?;
    args.fused.check(&export, to)?;
    let bar = Bar::new("export");
    let done = export.write(&args.output, args.max_shard_size, &bar)?;
    bar.finish();
    if let Some(float) = to.float() {
        warn_of_overflows(&done.overflows, float, "--to fp32");
    }
    if !to.takes_all()
        && let Some(module) = &done.embedding
    {
        note(&format!(
            "warning: '{}' is quantized and looks like an embedding; readers of {} quantize linear layers alone, so \
             leave it out when you quantize (--ignore '*embed*')",
            shown(module),
            to.name()
        ));
    }
    if summary.is_watched() && done.lost > 0 {
        note(&format!(
            "note: {} weights have a columnwise operand of their own, which {} has no place for",
            done.lost,
            to.name()
        ));
    }
    if let Some(hub) = hub {
        left_out(&summary, &hub.other_files);
    }
    let what = format!(
        "exported {} tensors, {} of them quantized",
        done.tensors, done.quantized
    );
    summary.done(&what, read, done.bytes);
    Ok(())
}

/// Checks that weights of the groups that the patterns `asked` for make have one amax and one scale.
fn check_amaxes(export: &Export<'_>, asked: &[String]) -> Result<()> {
    if asked.is_empty() {
        return Ok(());
    }
    let names = export.scaled();
    let groups = patterns::groups(asked, &names, || {
        format!(
            "{} weights are written with a scale that follows from the amax of the tensor",
            names.len()
        )
    });
    let groups = groups.map_err(of_patterns(AMAX_GROUP))?;
    match export.first_unlike(&groups)? {
        None => Ok(()),
        Some([first, other]) => Err(input_error(format!(
            "{AMAX_GROUP}: '{}' and '{}' have amaxes of their own; quantize or train them with {AMAX_GROUP}, or leave it out",
            shown(first),
            shown(other)
        ))),
    }
}

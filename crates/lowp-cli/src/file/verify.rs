//! `lowp verify`: whether two models hold the same bytes, and where they differ first.

use super::difference::{Byte, Pair};
use super::input_error::input_error;
use super::interchange::hub::Hub;
use super::meta::{self, Quantized};
use super::model::{Model, PIECE, Tensor};
use super::progress::Progress;
use super::verify_source::SourceCheck;
use super::{ranks, saved};
use crate::device::Device;
use crate::output::shown;
use anyhow::{Result, anyhow, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Compare two models byte by byte, or a quantized model with its source
#[derive(Clone, Debug, clap::Args)]
#[command(
    override_usage = "lowp verify <A> <B>
       lowp verify <A> --source <MODEL> [--device <DEVICE>]",
    after_help = "Examples:
  lowp verify q.safetensors gathered.safetensors
  lowp verify ranks other-ranks
  lowp verify runs/RECIPE-seed0 other-runs/RECIPE-seed0
  lowp verify q.safetensors --source model.safetensors --device cuda

With --source, every quantized tensor of A is made again from the tensor of MODEL as A's metadata
say, and every other tensor is compared with that of MODEL.

Exit code: 0 where every tensor has the same dtype, shape, bytes and meaning in both; 1 at the
first difference, which is named with its tensor, block and byte; 2 where an input cannot be
read."
)]
pub(crate) struct Args {
    /// A .safetensors file, the .safetensors.index.json of a sharded model, a folder as Hugging Face keeps models or of rank files,
    /// or a checkpoint, which is compared whatever ranks saved it
    a: PathBuf,

    /// The other
    #[arg(required_unless_present = "source", conflicts_with = "source")]
    b: Option<PathBuf>,

    /// The model that A was quantized from: whether `lowp quantize` makes A of it, byte for byte
    #[arg(long, value_name = "MODEL")]
    source: Option<PathBuf>,

    /// Where MODEL is quantized again: `cpu`, `cuda` or `cuda:N` [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
}

/// Runs the command.
///
/// # Errors
/// The models differ, or cannot be read.
pub(super) fn main(args: &Args) -> Result<()> {
    match (&args.b, &args.source, args.device) {
        (_, Some(source), device) => device.unwrap_or(Device::Cpu).run(SourceCheck {
            quantized: &args.a,
            source,
        }),
        (_, None, Some(_)) => Err(input_error(
            "--device says where a model is quantized again, and two models are compared without that; add --source MODEL, or leave out --device",
        )),
        (Some(b), None, None) => verify(&args.a, b),
        // clap asks for one of them.
        (None, None, None) => Err(input_error("give another model, or --source MODEL")),
    }
}

fn verify(path_a: &Path, path_b: &Path) -> Result<()> {
    match [path_a, path_b].map(saved::is_saved) {
        [true, true] => return crate::output::print(&saved::verify(path_a, path_b)?),
        [false, false] => {}
        _ => {
            return Err(input_error(
                "one is a checkpoint of `lowp train` and the other is not; give two of either",
            ));
        }
    }
    let of_ranks = ranks::is_folder(path_a);
    if of_ranks != ranks::is_folder(path_b) {
        return Err(input_error(
            "one is a folder of rank files and the other is not; gather the folder with `lowp unshard` first",
        ));
    }
    let (a, b) = (files(path_a)?, files(path_b)?);
    if a.len() != b.len() {
        bail!(
            "{} has {} ranks and {} has {}",
            path_a.display(),
            a.len(),
            path_b.display(),
            b.len()
        );
    }
    let (mut tensors, mut bytes) = (0, 0);
    for (rank, (a, b)) in a.iter().zip(&b).enumerate() {
        let (x, y) = (Hub::open(a)?.model, Hub::open(b)?.model);
        let label = format!("verify rank {rank}");
        let progress = Progress::new(if of_ranks { &label } else { "verify" });
        let size: usize = x.tensors().map(|tensor| tensor.len()).sum();
        progress.begin(size);
        x.steady(y.steady(compare(&x, &y, &progress)))?;
        progress.finish();
        (tensors, bytes) = (tensors + x.tensors().count(), bytes + size);
    }
    crate::output::print(&format!("equal: {tensors} tensors, {bytes} bytes\n"))
}

/// The files to compare, each with that of the other side.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if ranks::is_folder(path) {
        ranks::paths(path)
    } else {
        Ok(vec![path.to_owned()])
    }
}

/// Stops at the first difference, in the order of names.
fn compare(a: &Model, b: &Model, progress: &Progress) -> Result<()> {
    // Also rejects quantized tensors that lack a part.
    let quantized = [meta::quantized(a)?, meta::quantized(b)?];
    let pair = Pair {
        a: &a.path().display().to_string(),
        b: &b.path().display().to_string(),
        tensors: &quantized[0],
    };
    let names: BTreeSet<&str> = a
        .tensors()
        .chain(b.tensors())
        .map(|tensor| tensor.name)
        .collect();
    for name in names {
        let (x, y) = match (a.get(name), b.get(name)) {
            (Some(x), Some(y)) => (x, y),
            (Some(_), None) => return Err(pair.only_in_a(name)),
            _ => return Err(pair.only_in_b(name)),
        };
        if (x.dtype, x.shape) != (y.dtype, y.shape) {
            return Err(pair.kinds(name, (x.dtype, x.shape), (y.dtype, y.shape)));
        }
        if let Some(byte) = first_difference(&x, &y, progress)? {
            return Err(pair.bytes(name, byte));
        }
    }
    let names: BTreeSet<&String> = quantized.iter().flat_map(BTreeMap::keys).collect();
    for name in names {
        let text = |of: &BTreeMap<String, Quantized>| -> Result<Option<String>> {
            let found = of
                .get(name)
                .map(|tensor| serde_json::to_string(&tensor.text));
            Ok(found.transpose()?)
        };
        let shown = shown(name);
        let lacks = |with: &str, without: &str| {
            anyhow!(
                "'{shown}' has the same bytes, but only {with} says what they mean: {without} lacks its metadata; \
                 copy both, or write that file again"
            )
        };
        match (text(&quantized[0])?, text(&quantized[1])?) {
            (Some(x), Some(y)) if x != y => bail!(
                "'{shown}' has the same bytes and another meaning: {x} in {}, {y} in {}",
                pair.a,
                pair.b
            ),
            (Some(_), None) => return Err(lacks(pair.a, pair.b)),
            (None, Some(_)) => return Err(lacks(pair.b, pair.a)),
            _ => {}
        }
    }
    Ok(())
}

/// The first byte that differs.
fn first_difference(a: &Tensor<'_>, b: &Tensor<'_>, progress: &Progress) -> Result<Option<Byte>> {
    for start in (0..a.len()).step_by(PIECE) {
        let range = start..a.len().min(start + PIECE);
        let (x, y) = (a.bytes_at(range.clone())?, b.bytes_at(range)?);
        if let Some(byte) = Byte::first(start, &x, &y) {
            return Ok(Some(byte));
        }
        progress.add(x.len());
    }
    Ok(None)
}

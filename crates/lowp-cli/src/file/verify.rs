//! `lowp verify`: whether two models hold the same bytes, and where they differ first, by [`lowp_file::verify::verify`] and
//! [`verify_source`].

use super::checkpoint_of::checkpoint_of;
use super::progress::Bar;
use crate::device::{Device, OnDevice};
use crate::output;
use crate::usage::input_error;
use anyhow::{Result, bail};
use lowp_file::verify::{Equal, verify_source};
use lowp_file::{Hub, checkpoint, ranks};
use lowp_kernels::Backend;
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

With --source, every quantized tensor of A is made again from the tensor of MODEL, with the recipe
and options in A's metadata. Every other tensor is compared with that of MODEL.

Exit code: 0 if every tensor has the same dtype, shape, bytes and meaning in both; 1 at the first
difference, which is reported with its tensor, block and byte; 2 if an input cannot be read."
)]
pub(crate) struct Args {
    /// A .safetensors file, the .safetensors.index.json of a sharded model, a Hugging Face model folder, a folder of rank files,
    /// a checkpoint, or the folder of --save of one run; checkpoints of different numbers of ranks can be compared
    a: PathBuf,

    /// The model that A is compared with
    #[arg(required_unless_present = "source", conflicts_with = "source")]
    b: Option<PathBuf>,

    /// The model that A was quantized from: check that `lowp quantize` makes A of it, byte for byte
    #[arg(long, value_name = "MODEL")]
    source: Option<PathBuf>,

    /// Device that quantizes MODEL again: `cpu`, `cuda` or `cuda:N` [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    match (&args.b, &args.source, args.device) {
        (_, Some(source), device) => device.unwrap_or(Device::Cpu).run(SourceCheck {
            quantized: &args.a,
            source,
        }),
        (_, None, Some(_)) => Err(input_error(
            "--device is only used to quantize a model again; add --source MODEL, or leave out --device",
        )),
        (Some(b), None, None) => verify(&args.a, b),
        // clap asks for one of them.
        (None, None, None) => Err(input_error("give another model, or --source MODEL")),
    }
}

fn verify(path_a: &Path, path_b: &Path) -> Result<()> {
    match [checkpoint_of(path_a)?, checkpoint_of(path_b)?] {
        [Some(a), Some(b)] => return equal(checkpoint::verify(&a, &b)?),
        [None, None] => {}
        _ => {
            return Err(input_error(
                "one is a checkpoint of `lowp train` and the other is not; give two checkpoints, or two models",
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
        let bar = Bar::new(if of_ranks { &label } else { "verify" });
        let found = lowp_file::verify::verify(&x, &y, &bar)?;
        bar.finish();
        (tensors, bytes) = (tensors + found.tensors, bytes + found.bytes);
    }
    equal(Equal { tensors, bytes })
}

fn equal(Equal { tensors, bytes }: Equal) -> Result<()> {
    output::print(&format!("equal: {tensors} tensors, {bytes} bytes\n"))
}

/// The files of all ranks, or the only one.
pub(super) fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if ranks::is_folder(path) {
        Ok(ranks::paths(path)?)
    } else {
        Ok(vec![path.to_owned()])
    }
}

/// The check of a quantized file against its source: the model is quantized as the file says, and compared.
struct SourceCheck<'a> {
    quantized: &'a Path,
    source: &'a Path,
}

impl OnDevice for SourceCheck<'_> {
    fn run<B: Backend>(self, backend: &B) -> Result<()> {
        let bar = Bar::new("verify");
        let (found, again) = verify_source(backend, self.quantized, self.source, &bar)?;
        bar.finish();
        output::print(&format!(
            "equal: {} tensors, {} bytes; {again} quantized again\n",
            found.tensors, found.bytes
        ))
    }
}

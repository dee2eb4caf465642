//! `lowp inspect`: what a file, a sharded model or a folder of rank files holds, by [`lowp_file::inspect::inspect`]; checkpoints by
//! [`checkpoint::inspect`].

mod table;

use super::checkpoint_of::checkpoint_of;
use super::verify::files;
use crate::output;
use crate::usage::input_error;
use anyhow::Result;
use lowp_file::inspect::Report;
use lowp_file::{Hub, checkpoint};
use serde::Serialize;
use std::path::PathBuf;

/// Show the tensors of a model: recipes, bytes, scales, errors
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp inspect q.safetensors
  lowp inspect q.safetensors --reference model.safetensors
  lowp inspect ranks
  lowp inspect runs/RECIPE-seed0

Columns: `scales` is the number of scales, `min` and `max` are the stored values of block scales
(of the tensor's scale where there are none). `zeros` and `saturated` count elements that are 0,
and elements at the largest magnitude of their code. With --reference, `rel error` is the root
of the squared error over the squared reference, `max error` the largest absolute error; both skip
elements of the reference that are infinite or NaN, and `non-finite` counts these.

JSON: {\"files\": [..]}, one entry per file with its `path`, `bytes`, `elements`,
`bits_per_element` and `tensors`. A tensor has `name`, `dtype`, `shape`, `bytes`,
`bits_per_element`, of rank files `rows`, and, if it is quantized, `quantized`: `recipe`,
`elements` (their code), `options`, `usage`, `scales` and `orientations` with the columns above.
Numbers that are absent or not finite are null. A checkpoint is one object: `path`, `step`, `ranks`,
`recipe`, `config`, `bytes`, and `tensors` with `name`, `dtype`, `shape`, `bytes` and `pieces`.")]
pub(crate) struct Args {
    /// A .safetensors file, the .safetensors.index.json of a sharded model, a Hugging Face model folder, a folder of rank files,
    /// a checkpoint, or the folder of --save of one run
    input: PathBuf,

    /// The model before it was quantized; adds the quantization errors to the tables
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,

    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
}

/// The document of `--json`.
#[derive(Serialize)]
struct Document {
    files: Vec<Report>,
}

pub(super) fn main(args: &Args) -> Result<()> {
    if let Some(run) = checkpoint_of(&args.input)? {
        if let Some(reference) = &args.reference {
            return Err(input_error(format!(
                "--reference {}: the errors of a checkpoint are measured against its own masters; leave the option out",
                reference.display()
            )));
        }
        let report = checkpoint::inspect(&run)?;
        return output::print(&match args.json {
            true => output::json(&report)?,
            false => table::render_checkpoint(&report),
        });
    }
    let files = files(&args.input)?;
    let reference = args
        .reference
        .as_ref()
        .map(|path| Hub::open(path))
        .transpose()?;
    let mut document = Document { files: Vec::new() };
    for (i, file) in files.iter().enumerate() {
        let (model, reference) = (Hub::open(file)?.model, reference.as_ref());
        let reference = reference.map(|hub| &hub.model);
        let report = lowp_file::inspect::inspect(&model, reference)?;
        if args.json {
            document.files.push(report);
            continue;
        }
        let gap = if i == 0 { "" } else { "\n" };
        let text = table::render(&report, reference.is_some());
        output::print(&format!("{gap}{text}"))?;
    }
    if args.json {
        output::print(&output::json(&document)?)?;
    }
    Ok(())
}

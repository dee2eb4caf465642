//! `lowp shard`: one file per rank, each with its own rows, quantized by itself with agreed scales.

use super::args::{RecipeArgs, Setup, example};
use super::cast::{cast, empty};
use super::fields::{self, Field};
use super::meta::{self, MAX_WORLD, ShardText};
use super::model::{Model, Tensor};
use super::names::Named;
use super::pack::{Packed, wanted};
use super::progress::Progress;
use super::quantize::{copied_metadata, made_items, text};
use super::ranks::file_name;
use super::refuse::refuse;
use super::select::{Choice, Matrix};
use super::source::load;
use super::target::FolderTarget;
use super::write::{Item, Outputs, Parts, Want};
use anyhow::Result;
use lowp_format::{Form, Part, Recipe, Usage};
use lowp_kernels::Cpu;
use lowp_shard::{Communicator, ShardSpec, run_ranks};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Longest that a rank waits for the others to finish a tensor.
const PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

/// Cut a model into one quantized file per rank
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:
  lowp shard model.safetensors -o ranks --world-size 4 --recipe {recipe}
  lowp unshard ranks -o q.safetensors

Every rank quantizes its own rows. Scales that depend on more than those are agreed by all
ranks, so that `lowp unshard` gives what `lowp quantize` with the same options gives, byte for
byte. Rank files hold scales in the compact form, and no buffer that follows from another;
--usage and --scales say what unshard writes. Tensors that pass through are in the file of
rank 0.", recipe = example()))]
pub(crate) struct Args {
    /// A .safetensors file, or the .safetensors.index.json of a sharded model
    input: PathBuf,

    /// The folder to write: absent, or empty
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,

    /// Number of ranks
    #[arg(long, value_name = "N")]
    world_size: usize,

    #[command(flatten)]
    recipe: RecipeArgs,
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be read or taken, or a folder that cannot be written.
pub(super) fn main(args: &Args) -> Result<()> {
    let setup = args.recipe.setup()?;
    let select = args.recipe.select()?;
    let world = args.world_size;
    if !(1..=MAX_WORLD).contains(&world) {
        return Err(refuse(format!(
            "--world-size {world}: give a number from 1 to {MAX_WORLD}"
        )));
    }
    let model = Model::open(&args.input)?;
    let choices = select.choose(&model, &setup)?;
    // What unshard will write must be possible, too.
    for Choice { tensor, matrix } in &choices {
        if let Some(Matrix { shape, .. }) = *matrix {
            let specs = setup.recipe.buffers(setup.usage);
            fields::fields(&setup.recipe, &specs, shape, setup.usage, setup.form)
                .map_err(|e| refuse(format!("'{}': {e}", tensor.name)))?;
        }
    }
    let target = FolderTarget::new(&args.output)?;
    let progress = Progress::new(
        "shard",
        choices.iter().map(|choice| choice.tensor.len()).sum(),
    );
    let ranks = run_ranks(&Cpu, world, PATIENCE, |rank, comm| {
        let outputs = outputs(&model, &choices, setup, rank, &comm)?;
        outputs.check()?;
        target.fill_file(&file_name(rank, world), |draft| {
            outputs.write(draft, &progress)
        })
    });
    ranks.map_err(|failed| failed.cause)?;
    target.publish()
}

/// The tensors of one rank's file.
fn outputs<'a>(
    model: &Model,
    choices: &[Choice<'a>],
    setup: Setup,
    rank: usize,
    comm: &Arc<dyn Communicator<Cpu>>,
) -> Result<Outputs<'a>> {
    let comm = Arc::clone(comm);
    let stored = setup.recipe.stored(setup.usage);
    let data = stored.iter().filter(|spec| spec.key.part == Part::Data);
    let held = data.fold(Usage::empty(), |usage, spec| usage | spec.key.usage);
    let mut metadata = copied_metadata(model);
    let mut items = Vec::new();
    let mut jobs: Vec<(Tensor<'a>, ShardSpec, Vec<Field>)> = Vec::new();
    for &Choice { tensor, matrix } in choices {
        let Some(Matrix { shape: full, .. }) = matrix else {
            if rank == 0 {
                items.push(Item::input(tensor));
            }
            continue;
        };
        let world = comm.world_size();
        let spec = ShardSpec::for_usage(&setup.recipe, full, world, rank, setup.usage)?;
        let fields = fields::fields(
            &setup.recipe,
            &stored,
            spec.local_shape(),
            held,
            Form::Compact,
        )
        .map_err(|e| refuse(format!("'{}': {e}", tensor.name)))?;
        items.extend(made_items(jobs.len(), tensor.name, &fields));
        let rows = spec.rows();
        let shard = ShardText {
            rank,
            world,
            rows: [rows.start, rows.end],
            usage: setup.usage.label().to_owned(),
            scales: Named::label(setup.form).to_owned(),
        };
        let compact = Setup {
            form: Form::Compact,
            ..setup
        };
        let mut text = text(&compact, tensor, held);
        text.shard = Some(shard);
        metadata.insert(meta::key(tensor.name), serde_json::to_string(&text)?);
        jobs.push((tensor, spec, fields));
    }
    let make = Box::new(move |job: usize, want: Want| {
        let (tensor, spec, fields) = &jobs[job];
        let source = load(&Cpu, tensor, spec.elements())?;
        let local = empty(
            &Cpu,
            setup.recipe,
            spec.local_shape(),
            &wanted(&stored, want),
        )?;
        let amax = cast(&Cpu, &*comm, &local, source, setup.delayed_scale, want)?;
        let fields = fields.clone();
        Ok(Box::new(Packed {
            backend: Cpu,
            tensor: local,
            amax,
            fields,
        }) as Box<dyn Parts>)
    });
    Ok(Outputs {
        items,
        metadata,
        make,
    })
}

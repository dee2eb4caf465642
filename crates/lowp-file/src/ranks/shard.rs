//! One file per rank, each with its own rows, quantized by itself with agreed scales.

use crate::cast::{cast, empty};
use crate::dtypes::Named;
use crate::error::{Context, Result, input_error, of_tensor};
use crate::fields::{self, Field, worked};
use crate::groups::{Amaxes, Groups};
use crate::interchange::hub::Hub;
use crate::keys;
use crate::meta::{MAX_WORLD, ShardText};
use crate::model::{Model, Tensor};
use crate::output::path::{Draft, OutputFolder};
use crate::pack::Packed;
use crate::progress::Progress;
use crate::quantize::{copied_metadata, text};
use crate::rank_names::file_name;
use crate::select::{Choice, Choices, Matrix, Setup};
use crate::source::load;
use crate::write::{Item, ItemSource, Make, check_names, fill, header, sorted};
use lowp_comm::{Communicator, run_ranks};
use lowp_format::{BufferList, Form, Part as BufferPart, Recipe, Shape, Usage};
use lowp_kernels::Cpu;
use lowp_shard::ShardSpec;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Longest that a rank waits for the others to finish a tensor.
const PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

/// Writes what `choices` of the model in `hub` become to the folder `output`, absent or empty: a file for each of `world` ranks, from 1 to
/// [`MAX_WORLD`]. Returns the bytes that were written.
///
/// # Errors
/// A number of ranks that is none, choices of another model, a tensor that cannot be read or cast, or a folder that cannot be written.
pub fn shard(
    hub: &Hub,
    choices: &Choices<'_>,
    world: usize,
    output: &Path,
    progress: &dyn Progress,
) -> Result<u64> {
    if !(1..=MAX_WORLD).contains(&world) {
        return Err(input_error(format!(
            "{world} ranks; give a number from 1 to {MAX_WORLD}"
        )));
    }
    let Hub {
        model, other_files, ..
    } = hub;
    choices.are_of(model)?;
    let plan = Plan::new(choices, world)?;
    let target = OutputFolder::new(output, model.files())?;
    // One header at a time: each is as long as that of the whole model.
    let (mut drafts, mut work, mut items) = (Vec::new(), 0, Vec::new());
    for rank in 0..world {
        let (draft, of_rank) = plan.begin(rank, &target)?;
        work += of_rank.iter().map(|item| item.bytes).sum::<usize>();
        drafts.push(Mutex::new(Some(draft)));
        if rank == 0 {
            items = of_rank;
        }
    }
    let items = sorted(&items);
    // The rows of all ranks are the tensors.
    let sources: Vec<usize> = plan.jobs.iter().map(|job| job.tensor.len()).collect();
    progress.begin(work + sources.iter().sum::<usize>());
    let ranks = run_ranks(&Cpu, world, PATIENCE, |rank, comm| {
        let draft = drafts[rank]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let mut draft = draft.context("a rank runs once")?;
        plan.fill(&mut draft, &items, rank, &comm, progress)?;
        draft.finish()
    });
    let written = ranks.map_err(|failed| failed.cause)?;
    let written = written.iter().sum::<u64>() + other_files.copy_all(&target)?;
    model.steady(Ok(()))?;
    target.publish()?;
    Ok(written)
}

/// What all ranks do, held once whatever their number.
struct Plan<'a> {
    model: &'a Model,
    /// Those that pass through.
    passed: Vec<Tensor<'a>>,
    /// Those that are quantized, in the order of their names, and the groups that have one amax.
    jobs: Vec<QuantizeJob<'a>>,
    groups: Groups<'a>,
    setup: Setup,
    world: usize,
    /// The buffers that ranks store, and what their data serve.
    stored: BufferList,
    held: Usage,
}

/// A tensor that is quantized.
struct QuantizeJob<'a> {
    tensor: Tensor<'a>,
    /// Shape of the whole matrix.
    full: Shape,
    /// Its amax group.
    group: Option<usize>,
}

struct Part {
    spec: ShardSpec,
    fields: Vec<Field>,
}

impl<'a> Plan<'a> {
    fn new(choices: &Choices<'a>, world: usize) -> Result<Self> {
        let Choices {
            model, setup, all, ..
        } = choices;
        let (model, setup) = (*model, *setup);
        let stored = setup.recipe.stored(setup.usage);
        let data = stored
            .iter()
            .filter(|spec| spec.key.part == BufferPart::Data);
        let held = data.fold(Usage::empty(), |usage, spec| usage | spec.key.usage);
        let mut plan = Self {
            model,
            passed: Vec::new(),
            jobs: Vec::new(),
            groups: Groups::of(all),
            setup,
            world,
            stored,
            held,
        };
        for &Choice {
            tensor,
            matrix,
            group,
        } in all
        {
            let Some(Matrix { shape, .. }) = matrix else {
                plan.passed.push(tensor);
                continue;
            };
            // What unshard will write must be possible, too.
            setup.fields(shape).map_err(|e| of_tensor(tensor.name, e))?;
            plan.jobs.push(QuantizeJob {
                tensor,
                full: shape,
                group,
            });
        }
        Ok(plan)
    }

    fn part(&self, job: usize, rank: usize) -> Result<Part> {
        let QuantizeJob { tensor, full, .. } = self.jobs[job];
        let Setup { recipe, usage, .. } = self.setup;
        let spec = ShardSpec::for_usage(&recipe, full, self.world, rank, usage)?;
        let shape = spec.local_shape();
        let fields = fields::fields(&recipe, &self.stored, shape, self.held, Form::Compact)
            .map_err(|e| of_tensor(tensor.name, e))?;
        Ok(Part { spec, fields })
    }

    /// Makes the file of `rank` and writes its header. Returns what is to follow.
    fn begin(&self, rank: usize, target: &OutputFolder) -> Result<(Draft, Vec<Item<'a>>)> {
        let mut metadata = copied_metadata(self.model);
        let mut items = Vec::new();
        if rank == 0 {
            items.extend(self.passed.iter().copied().map(Item::input));
        }
        let compact = Setup {
            form: Form::Compact,
            ..self.setup
        };
        for (job, QuantizeJob { tensor, group, .. }) in self.jobs.iter().enumerate() {
            let Part { spec, fields } = self.part(job, rank)?;
            items.extend(Item::fields(job, tensor.name, &fields));
            let rows = spec.rows();
            let mut text = text(&compact, tensor.dtype, tensor.shape, self.held);
            text.amax_group = self.groups.names(*group);
            text.shard = Some(ShardText {
                rank,
                world: self.world,
                rows: [rows.start, rows.end],
                usage: self.setup.usage.label().to_owned(),
                scales: Named::label(self.setup.form).to_owned(),
            });
            metadata.insert(keys::key(tensor.name), serde_json::to_string(&text)?);
        }
        if rank == 0 {
            check_names(&items)?;
        }
        let mut draft = target.create_small(&file_name(rank, self.world))?;
        draft.write_at(0, &header(&sorted(&items), &metadata)?)?;
        Ok((draft, items))
    }

    /// Writes the tensors of `rank`, which are `items` of rank 0 with the rows of this one.
    fn fill(
        &self,
        draft: &mut Draft,
        items: &[&Item<'a>],
        rank: usize,
        comm: &Arc<dyn Communicator<Cpu>>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let amaxes = Amaxes::default();
        // Ranks agree on the amaxes of their rows.
        let own = |tensor: &Tensor<'_>| -> Result<Range<usize>> {
            // In the order of names.
            let job = self
                .jobs
                .binary_search_by(|job| job.tensor.name.cmp(tensor.name));
            let part = self.part(job.ok().context("it is quantized")?, rank)?;
            Ok(part.spec.elements())
        };
        let make: Make<'_> = Box::new(|job| {
            let Part { spec, fields } = self.part(job, rank)?;
            let QuantizeJob {
                tensor,
                full,
                group,
            } = &self.jobs[job];
            let source = load(&Cpu, tensor, spec.elements(), progress)?;
            let Setup {
                recipe,
                delayed_scale,
                ..
            } = self.setup;
            let shape = worked(spec.local_shape(), *full, &self.stored);
            let local = empty(&Cpu, recipe, shape, &self.stored)?;
            let shared = amaxes.of(&Cpu, &recipe, &self.groups, *group, own)?;
            let amax = cast(&Cpu, &**comm, &local, source, delayed_scale, shared)?;
            Ok(Packed::parts(&Cpu, local, amax, fields))
        });
        let bytes = |item: &Item<'_>| -> Result<Option<usize>> {
            Ok(match item.source {
                ItemSource::Input(_) if rank > 0 => None,
                ItemSource::Input(_) => Some(item.bytes),
                ItemSource::Made { job, part } => Some(self.part(job, rank)?.fields[part].bytes()),
            })
        };
        let begin = draft.len();
        fill(draft, begin, items, &make, progress, bytes)
    }
}

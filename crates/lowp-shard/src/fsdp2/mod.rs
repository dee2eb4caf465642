//! [`GatherHooks`]: gathers that another library does. Says what each rank sends, what arrives, and how the full
//! tensor comes of it.

use std::sync::Arc;

use lowp_format::{
    AnyRecipe, BufferKey, BufferSpec, FormatError, GatherPlan, GatherStep, Phase, PieceLayout,
    Recipe, RowCuts, Shape, Usage,
};

use crate::gather::check_derived;
use crate::{ShardError, ShardSpec};

mod buffers;
mod full;
mod send;
mod work;

pub use buffers::{HookInput, HookOutput, HookSource};
pub use full::FullTensor;
pub use send::{GatherTag, SendBuffers};

/// One gather of one parameter, for whoever moves the bytes: plain data, the same on every rank. Clones share it.
///
/// PyTorch's FSDP2, for example, asks a parameter for buffers (`fsdp_pre_all_gather`), gathers each of them, and hands
/// over what arrived (`fsdp_post_all_gather`). It gathers as many bytes from every rank, so pieces that are shorter are
/// padded. What is derivable (a byte or nibble transpose) does not travel, and what is equal on all ranks neither.
///
/// | call | when | needs |
/// |---|---|---|
/// | [`GatherHooks::new`] | once per parameter and phase | recipe and [`ShardSpec`]: no ranks, no device |
/// | [`GatherHooks::send_buffers`] | once per shard | the shard |
/// | [`SendBuffers::pre_all_gather`] | before each gather | the stream that sends |
/// | [`GatherTag::post_all_gather`] | after the first gather | the stream that reads, the shard, what arrived |
/// | [`GatherTag::post_all_gather_into`] | after each later one | the [`FullTensor`] of the first, besides |
///
/// # Example
///
/// Two ranks, gathered by hand: every rank's bytes, padded, in rank order.
///
/// ```
/// use lowp_format::{AnyRecipe, Phase, RecipeOptions, Shape, Usage};
/// use lowp_kernels::{Backend, Cpu, Source};
/// use lowp_shard::{GatherHooks, ShardError, ShardSpec, ShardedTensor, quantize};
///
/// let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default())?;
/// let shape = Shape::new(80, 64); // 64 rows and 16: the second piece is padded
/// let weights: Vec<f32> = (0..shape.elements()).map(|i| (i as f32).sin()).collect();
/// let mut ranks = Vec::new();
/// for rank in 0..2 {
///     let spec = ShardSpec::new(&recipe, shape, 2, rank)?;
///     let own = Source::F32(Cpu.upload(&weights[spec.elements()])?);
///     let rows = quantize(&Cpu, recipe, spec.local_shape(), Usage::BOTH, own, None)?;
///     let shard = ShardedTensor::<Cpu>::with_alloc(recipe, spec, |spec, _| {
///         Ok(rows.buffer(spec.key)?.storage.clone())
///     })?;
///     let hooks = GatherHooks::new(recipe, shard.spec(), Phase::Forward)?;
///     ranks.push((hooks.send_buffers(&Cpu, &shard)?, shard));
/// }
///
/// let sent = ranks.iter().map(|(send_buffers, _)| send_buffers.pre_all_gather(&Cpu));
/// let sent = sent.collect::<Result<Vec<_>, _>>()?;
/// let mut arrived = Vec::new();
/// for input in 0..sent[0].hooks().inputs().len() {
///     let pieces = ranks.iter().map(|(send_buffers, _)| Cpu.download(&send_buffers.buffers()[input]));
///     arrived.push(Cpu.upload(&pieces.collect::<Result<Vec<_>, _>>()?.concat())?);
/// }
///
/// let (_, shard) = &ranks[0];
/// let mut full = sent[0].post_all_gather(&Cpu, shard, &arrived)?;
/// let source = Source::F32(Cpu.upload(&weights)?);
/// let whole = quantize(&Cpu, recipe, shape, Usage::ROWWISE, source, None)?;
/// for (full, expected) in full.tensor()?.buffers().iter().zip(whole.buffers()) {
///     assert_eq!(Cpu.download(&full.storage)?, Cpu.download(&expected.storage)?);
/// }
/// // The next time, into the same memory.
/// sent[0].post_all_gather_into(&Cpu, shard, &arrived, &mut full)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct GatherHooks<R: Recipe = AnyRecipe> {
    planned: Arc<Planned<R>>,
}

#[derive(Debug)]
struct Planned<R> {
    recipe: R,
    usage: Usage,
    plan: GatherPlan,
    /// What is derived later, of buffers that `plan` left.
    delayed: Option<GatherPlan>,
    inputs: Vec<HookInput>,
    outputs: Vec<HookOutput>,
    /// Of which shards.
    shards: String,
    text: String,
}

/// What memory that is no output's is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Staged {
    /// The pieces of a buffer one after another, before they are interleaved.
    Pieces,
    /// A full buffer that others are made of.
    Source,
}

/// Memory of a [`FullTensor`] that is no output's.
struct StagedBuffer {
    content: Staged,
    key: BufferKey,
    bytes: usize,
}

impl<R: Recipe> GatherHooks<R> {
    /// Gathers what `phase` needs, and nothing else: for parameters that are gathered before each phase.
    ///
    /// # Errors
    /// Shards that cannot serve the phase, or cuts off the recipe's quantum.
    pub fn new(recipe: R, spec: &ShardSpec, phase: Phase) -> Result<Self, ShardError> {
        Self::with_usage(recipe, spec, phase.usage(), phase.usage())
    }

    /// Both phases, with inputs that agree: as many in one phase as in the other, of as many bytes. For sharders that
    /// keep the memory of the first gather for all later ones, as FSDP2 does by itself. Where a phase sends fewer buffers, such as
    /// no scales of rows, its last inputs have pieces of no bytes.
    ///
    /// # Errors
    /// As [`GatherHooks::new`].
    pub fn phases(recipe: R, spec: &ShardSpec) -> Result<[Self; 2], ShardError> {
        let hooks = |phase: Phase, other: &[HookInput]| {
            Self::padded(recipe, spec, phase.usage(), phase.usage(), other)
        };
        let forward = hooks(Phase::Forward, &[])?;
        let backward = hooks(Phase::Backward, forward.inputs())?;
        Ok([hooks(Phase::Forward, backward.inputs())?, backward])
    }

    /// Gathers what both phases need at once, for parameters that stay gathered between them
    /// (`reshard_after_forward=False`): what forward uses is there first, [`FullTensor::derive`] makes the rest.
    ///
    /// # Errors
    /// As [`GatherHooks::new`].
    pub fn kept(recipe: R, spec: &ShardSpec) -> Result<Self, ShardError> {
        Self::with_usage(recipe, spec, Usage::BOTH, Usage::ROWWISE)
    }

    /// Gathers what `usage` needs. What `first` uses of it is there at once, [`FullTensor::derive`] makes the rest.
    ///
    /// # Errors
    /// Shards that cannot serve `usage`, a `first` outside it, cuts off the recipe's quantum, or shards of tiles.
    pub fn with_usage(
        recipe: R,
        spec: &ShardSpec,
        usage: Usage,
        first: Usage,
    ) -> Result<Self, ShardError> {
        Self::padded(recipe, spec, usage, first, &[])
    }

    /// As [`GatherHooks::with_usage`], with at least as many inputs as `other`, of at least as many bytes.
    fn padded(
        recipe: R,
        spec: &ShardSpec,
        usage: Usage,
        first: Usage,
        other: &[HookInput],
    ) -> Result<Self, ShardError> {
        serves(spec.usage(), usage)?;
        serves(usage, first)?;
        if !spec.tiles().are_rows() {
            return Err(FormatError::ShardTiles {
                recipe: recipe.name(),
                full: spec.full(),
                cols: spec.tiles().tile().cols,
                why: "hooks gather whole rows".to_owned(),
            }
            .into());
        }
        let plan = |need, held: &[BufferKey]| {
            let plan = spec.plan(&recipe, usage, need, held)?;
            Ok::<_, FormatError>(scales_of_first(plan, spec))
        };
        let now = plan(first, &[])?;
        let held: Vec<BufferKey> = now.steps.iter().map(|step| step.spec().key).collect();
        let mut delayed = plan(usage, &held)?;
        delayed
            .steps
            .retain(|step| !held.contains(&step.spec().key));
        let delayed = (!delayed.steps.is_empty()).then_some(delayed);
        let plans = [Some(&now), delayed.as_ref()];
        for plan in plans.into_iter().flatten() {
            check_derived(&recipe, plan)?;
        }
        let mut inputs = inputs(&now);
        for (input, other) in inputs.iter_mut().zip(other) {
            input.padded = input.padded.max(other.padded);
        }
        let nothing = |other: &HookInput| HookInput {
            pieces: vec![0; other.pieces.len()],
            interleaved: false,
            transposed: false,
            ..other.clone()
        };
        let more = other.iter().skip(inputs.len()).map(nothing);
        inputs.extend(more.collect::<Vec<_>>());
        let outputs = outputs(&recipe, usage, &now, delayed.as_ref(), &inputs)?;
        let shards = describe(&recipe, spec);
        let mut text = format!("{shards}, gathered for {usage}, {first} first, each rank sends");
        for input in &inputs {
            text += &format!(" {}={}", input.spec.key, input.padded);
        }
        Ok(Self {
            planned: Arc::new(Planned {
                recipe,
                usage,
                plan: now,
                delayed,
                inputs,
                outputs,
                shards,
                text,
            }),
        })
    }

    /// What the full tensor serves once everything is derived.
    pub fn usage(&self) -> Usage {
        self.planned.usage
    }

    /// Shape of the full tensor.
    pub fn full(&self) -> Shape {
        self.planned.plan.full
    }

    /// Where the rows are cut.
    pub fn cuts(&self) -> &RowCuts {
        &self.planned.plan.cuts
    }

    /// What every rank sends, in this order.
    pub fn inputs(&self) -> &[HookInput] {
        &self.planned.inputs
    }

    /// The buffers of the full tensor, in the recipe's order.
    pub fn outputs(&self) -> &[HookOutput] {
        &self.planned.outputs
    }

    /// Bytes that a [`FullTensor`] allocates besides the memory of its outputs: for cuts whose padding lies between the
    /// pieces of an input that is interleaved or only transposed. 0 for cuts as [`RowCuts::new`] and FSDP2 make them.
    pub fn staged_bytes(&self) -> usize {
        self.staged().map(|staged| staged.bytes).sum()
    }

    /// Memory that is no output's: for pieces as they arrive without padding, or for a full buffer that is only a source.
    fn staged(&self) -> impl Iterator<Item = StagedBuffer> {
        self.inputs()
            .iter()
            .flat_map(|input| {
                let key = input.spec.key;
                let moved = input.interleaved || input.transposed;
                let compact = moved && input.joined().is_none();
                let kept = self.outputs().iter().any(|output| output.spec.key == key);
                let source = input.whole().is_none() && !kept;
                let staged = |content, wanted: bool| {
                    wanted.then(|| StagedBuffer {
                        content,
                        key,
                        bytes: input.pieces.iter().sum(),
                    })
                };
                [
                    staged(Staged::Pieces, compact),
                    staged(Staged::Source, source),
                ]
            })
            .flatten()
    }

    /// Everything that ranks must have in common, as text: ranks that compare it find out before they gather that
    /// they planned different things.
    pub fn text(&self) -> &str {
        &self.planned.text
    }
}

/// Whether both plan the same gather.
impl<R: Recipe> PartialEq for GatherHooks<R> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.planned, &other.planned) || self.planned.text == other.planned.text
    }
}

/// Checks that what serves `usage` serves `asked`.
fn serves(usage: Usage, asked: Usage) -> Result<(), FormatError> {
    match (asked - usage).orientations().next() {
        Some(orientation) => Err(FormatError::MissingUsage { orientation, usage }),
        None => Ok(()),
    }
}

/// The plan for shards that cut blocks with scales of the first rank, where some rank has no rows. A checkpoint has nothing for that
/// rank, so its scales may be those of before.
fn scales_of_first(mut plan: GatherPlan, shard: &ShardSpec) -> GatherPlan {
    let any_empty = shard.cuts().ranges().any(|range| range.is_empty());
    if !shard.cuts_blocks() || !any_empty {
        return plan;
    }
    for step in &mut plan.steps {
        if let GatherStep::Replicated { spec } = *step {
            let mut pieces = vec![0; shard.world()];
            pieces[0] = spec.bytes(shard.full());
            *step = GatherStep::Concat {
                spec,
                layout: PieceLayout::Rows,
                pieces,
                keep: true,
            };
        }
    }
    plan
}

fn inputs(plan: &GatherPlan) -> Vec<HookInput> {
    let input = |step: &GatherStep| match step {
        GatherStep::Concat {
            spec,
            layout,
            pieces,
            ..
        } => {
            let several = pieces.iter().filter(|&&bytes| bytes > 0).count() > 1;
            Some(HookInput {
                spec: *spec,
                padded: pieces.iter().copied().max().unwrap_or(0),
                pieces: pieces.clone(),
                interleaved: *layout == PieceLayout::Interleave && several,
                transposed: *layout == PieceLayout::Transpose,
            })
        }
        GatherStep::Derive { .. } | GatherStep::Replicated { .. } => None,
    };
    plan.steps.iter().filter_map(input).collect()
}

fn outputs<R: Recipe>(
    recipe: &R,
    usage: Usage,
    plan: &GatherPlan,
    delayed: Option<&GatherPlan>,
    inputs: &[HookInput],
) -> Result<Vec<HookOutput>, ShardError> {
    let output = |spec: &BufferSpec| {
        let of = |plan: &GatherPlan| {
            let mut steps = plan.steps.iter();
            steps.find(|step| step.spec().key == spec.key).cloned()
        };
        let (step, later) = match (of(plan), delayed.and_then(of)) {
            (Some(step), _) => (step, false),
            (None, Some(step)) => (step, true),
            (None, None) => {
                let (key, usage) = (spec.key, plan.usage);
                return Err(FormatError::MissingBuffer { key, usage }.into());
            }
        };
        let input = inputs.iter().position(|i| i.spec.key == spec.key);
        let source = match (step, input) {
            (GatherStep::Derive { from, .. }, _) => HookSource::TransposeOf(from),
            (_, None) => HookSource::Shard,
            (_, Some(input)) => match inputs[input].whole() {
                Some(bytes) => HookSource::Arrived { input, bytes },
                None => HookSource::Pieces { input },
            },
        };
        Ok(HookOutput {
            spec: *spec,
            bytes: spec.bytes(plan.full),
            source,
            delayed: later,
        })
    };
    recipe.buffers(usage).iter().map(output).collect()
}

/// Everything that the shards of all ranks have in common.
fn describe<R: Recipe>(recipe: &R, spec: &ShardSpec) -> String {
    let ends: Vec<usize> = spec.cuts().ranges().map(|range| range.end).collect();
    let (name, full, usage) = (recipe.name(), spec.full(), spec.usage());
    let mut text = name.to_owned();
    for (option, value) in recipe.options().iter() {
        text += &format!(" {option}={value}");
    }
    text + &format!(" {full}, shards for {usage} cut at {ends:?}")
}

//! What a run needs, checked once, before anything is read or allocated.

use super::args::Args;
use super::checkpoints::Checkpoints;
use super::memory::{self, Needed};
use super::model::{Arch, BYTES, GptConfig};
use super::recipes::{self, Run, has_tensor_scale};
use super::shapes;
use crate::amax_groups;
use crate::device::Device;
use crate::globs;
use crate::usage::UsageError;
use lowp_comm::{GradWire, Mesh};
use lowp_format::spelling::Variant;
use lowp_format::{ReshardAfterForward, Usage, lcm};
use lowp_fsdp::{LinearSpec, Passes, Sharding};
use lowp_optim::{Group, Schedule};
use lowp_shard::check_flat;

/// Most ranks that one process is asked to play.
pub(crate) const MAX_RANKS: usize = 64;
/// Most parameters of a model; each takes over 16 bytes in masters, moments and gradients.
const MAX_PARAMETERS: usize = 1 << 31;
/// Largest width of a model.
const MAX_DIM: usize = 1 << 14;
/// The longest block of any recipe, of whose length widths are multiples.
const BLOCK: usize = 32;
/// Most tokens of one batch.
const MAX_TOKENS: usize = 1 << 24;
/// Most steps of one run.
const MAX_STEPS: usize = 10_000_000;
/// Most tokens of a vocabulary.
const MAX_VOCABULARY: usize = 1 << 20;

/// The same for every run of one command, but for the seed.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) model: GptConfig,
    /// Where it runs; ranks that are threads have this GPU and those that follow.
    pub(crate) device: Device,
    pub(crate) mesh: Mesh,
    pub(crate) sharding: Sharding,
    pub(crate) reshard_after_forward: ReshardAfterForward,
    pub(crate) steps: usize,
    /// Micro-batches of a step.
    pub(crate) accumulate: usize,
    /// Whether blocks run forward again in backward.
    pub(crate) recompute: bool,
    /// Whether every gathered weight is compared with its masters at the end.
    pub(crate) audit: bool,
    /// Whether the last step is measured.
    pub(crate) profile: bool,
    /// Whether attention on a GPU runs by cuDNN where that is found.
    pub(crate) cudnn: bool,
    /// Whether GPUs agree on amaxes of operands.
    pub(crate) agree_amaxes: bool,
    /// Whether GPUs gather a block ahead.
    pub(crate) prefetch: bool,
    /// Steps at the end whose forward products run in bf16.
    pub(crate) tail_steps: usize,
    /// Names of the linear layers that stay in bf16, whatever the recipe.
    pub(crate) kept_in_bf16: Vec<String>,
    /// Names of linear layers that have one amax.
    pub(crate) amax_groups: Vec<Vec<String>>,
    pub(crate) seed: u64,
    /// Number of seeds, from `seed` up.
    pub(crate) seeds: usize,
    pub(crate) batch: usize,
    pub(crate) eval_batches: usize,
    pub(crate) grad_wire: GradWire,
    pub(crate) schedule: Schedule,
    pub(crate) group: Group,
    pub(crate) clip: f32,
    /// What is saved, and what runs go on behind.
    pub(crate) checkpoints: Checkpoints,
    /// What to run, the baseline first.
    pub(crate) runs: Vec<Run>,
}

impl Config {
    /// Checks the arguments against each other, and against the number of ranks that a launcher `started`.
    ///
    /// # Errors
    /// A [`UsageError`] that names the option and a value that would work.
    pub(crate) fn new(args: &Args, started: Option<usize>) -> Result<Self, UsageError> {
        let mesh = mesh(args, started)?;
        args.sizes.check()?;
        let model = args.model();
        check_counts(args, mesh, model)?;
        check_sizes(args, mesh.world(), model)?;
        let steps = steps(args, model)?;
        let warmup = args.warmup.unwrap_or((steps / 10).min(100));
        if warmup > steps {
            return Err(UsageError::new(format!(
                "--warmup {warmup} is longer than the {steps} steps: the learning rate would never be reached"
            )));
        }
        let final_lr = positive("--final-lr", args.final_lr, true)?;
        if final_lr > 1.0 {
            return Err(UsageError::new(format!(
                "--final-lr {final_lr:?} is above 1: the rate falls after warm-up"
            )));
        }
        let others = (args.seeds as u64).saturating_sub(1);
        if args.seed.checked_add(others).is_none() {
            return Err(UsageError::new(format!(
                "--seed {} with --seeds {}: the last seed is beyond 64 bits",
                args.seed, args.seeds
            )));
        }
        if let (Some(machine), Device::Cpu) = (memory::machine(), args.device) {
            let at_once = args.batch.div_ceil(args.accumulate);
            Needed::new(model, at_once, mesh.replicate, args.recompute).check(machine)?;
        }
        let sharding = Sharding::from(args.sharding);
        let reshard_after_forward = reshard(args.reshard_after_forward, sharding, mesh.shard)?;
        let kept_in_bf16 = kept_in_bf16(&args.keep_bf16, model)?;
        let runs = recipes::select(&args.recipe, &args.compare, !args.no_baseline)?;
        for run in &runs {
            shapes::check_shapes(run, model, &kept_in_bf16)?;
            check_sharding(run, sharding)?;
        }
        let config = Self {
            model,
            device: args.device,
            mesh,
            sharding,
            reshard_after_forward,
            steps,
            accumulate: args.accumulate,
            recompute: args.recompute,
            audit: !args.no_audit,
            profile: args.profile,
            cudnn: !args.no_cudnn,
            agree_amaxes: args.agree_amaxes,
            prefetch: !args.no_prefetch,
            tail_steps: tail_steps(args.precision_tail, steps)?,
            amax_groups: amax_groups(&args.amax_group, model, &runs, &kept_in_bf16)?,
            kept_in_bf16,
            seed: args.seed,
            seeds: args.seeds,
            batch: args.batch,
            eval_batches: args.eval_batches,
            grad_wire: grad_wire(&args.grad_wire),
            schedule: Schedule {
                warmup: warmup as u64,
                total: steps as u64,
                floor: final_lr,
            },
            group: Group {
                lr: positive("--lr", args.lr, false)?,
                weight_decay: positive("--weight-decay", args.weight_decay, true)?,
                ..Group::default()
            },
            clip: positive("--clip", args.clip, false)?,
            checkpoints: Checkpoints::new(args, steps)?,
            runs,
        };
        let of_gpus = [
            ("--profile", config.profile),
            ("--no-cudnn", !config.cudnn),
            ("--agree-amaxes", config.agree_amaxes),
            ("--no-prefetch", !config.prefetch),
        ];
        if let (Some((option, _)), Device::Cpu) =
            (of_gpus.iter().find(|(_, given)| *given), config.device)
        {
            return Err(UsageError::new(format!(
                "{option} is of GPUs: add --device cuda, or leave it out"
            )));
        }
        #[cfg(feature = "cuda")]
        if let Device::Cuda(_) = config.device {
            super::gpu::check(&config)?;
        }
        Ok(config)
    }

    /// The configuration of each seed, in order.
    pub(crate) fn each_seed(&self) -> impl Iterator<Item = Self> {
        (self.seed..=self.last_seed()).map(|seed| Self {
            seed,
            ..self.clone()
        })
    }

    /// The last of the seeds.
    pub(crate) fn last_seed(&self) -> u64 {
        self.seed + (self.seeds as u64).saturating_sub(1)
    }

    /// The recipe of `linear` in a run of `recipe`; in its tail, with forward products in bf16.
    pub(crate) fn recipe_of(&self, recipe: Variant, linear: &LinearSpec, tail: bool) -> Variant {
        let own = match self.kept_in_bf16.contains(&linear.name) {
            true => recipe.in_bf16(),
            false => recipe.of_block(linear.block, self.model.layers),
        };
        if tail { own.with_bf16_forward() } else { own }
    }

    /// How often layers run in a step.
    pub(crate) fn passes(&self) -> Passes {
        Passes {
            micro_batches: self.accumulate,
            recompute: self.recompute,
        }
    }

    /// How gradients travel, as the option says it.
    pub(crate) fn grad_wire_name(&self) -> &'static str {
        match self.grad_wire {
            GradWire::F32 => "f32",
            GradWire::Bf16 => "bf16",
        }
    }

    /// The linear layers, with the groups that have one amax.
    pub(crate) fn linears(&self) -> Vec<LinearSpec> {
        let mut linears = self.model.linears();
        for linear in &mut linears {
            let mut groups = self.amax_groups.iter();
            linear.amax_group = groups.position(|group| group.contains(&linear.name));
        }
        linears
    }
}

/// The policy that is asked for, among `shards` ranks that share out a replica.
///
/// # Errors
/// A [`UsageError`] where it says nothing, or its groups do not divide the ranks.
pub(crate) fn reshard(
    asked: Option<ReshardAfterForward>,
    sharding: Sharding,
    shards: usize,
) -> Result<ReshardAfterForward, UsageError> {
    if let (Sharding::Zero1, Some(policy)) = (sharding, asked) {
        return Err(UsageError::new(format!(
            "--reshard-after-forward {policy} says nothing with --sharding zero1, where every rank has the full weights; leave it out"
        )));
    }
    let policy = asked.unwrap_or_default();
    policy.among(shards).map_err(UsageError::from)?;
    Ok(policy)
}

/// The wire dtype of gradients by its name.
pub(crate) fn grad_wire(name: &str) -> GradWire {
    match name {
        "bf16" => GradWire::Bf16,
        _ => GradWire::F32,
    }
}

/// The mesh that is asked for, of as many ranks as there are.
fn mesh(args: &Args, started: Option<usize>) -> Result<Mesh, UsageError> {
    let ranks = args.world_size.or(started).unwrap_or(2);
    let mesh = args.mesh.unwrap_or(Mesh::sharded(ranks));
    match started {
        Some(started) if started != mesh.world() => Err(UsageError::new(format!(
            "{} is {} ranks, and the launcher started {started}; leave the option out, or start as many",
            args.mesh.map_or_else(
                || format!("--world-size {ranks}"),
                |mesh| format!("--mesh {mesh}")
            ),
            mesh.world()
        ))),
        _ => Ok(mesh),
    }
}

/// Every count by itself.
fn check_counts(args: &Args, mesh: Mesh, model: GptConfig) -> Result<(), UsageError> {
    let ranks = if args.mesh.is_some() {
        "--mesh: its number of ranks"
    } else {
        "--world-size"
    };
    let counts = [
        (ranks, mesh.world(), MAX_RANKS),
        ("--steps", args.steps.unwrap_or(1), MAX_STEPS),
        ("--accumulate", args.accumulate, 1 << 16),
        ("--seeds", args.seeds, 1000),
        ("--batch", args.batch, 1 << 16),
        ("--eval-batches", args.eval_batches, 1 << 16),
    ];
    check_ranges(&counts)?;
    check_model(model)
}

/// Every size of a model by itself.
///
/// # Errors
/// A [`UsageError`] that names the option and its range.
pub(crate) fn check_model(model: GptConfig) -> Result<(), UsageError> {
    check_ranges(&[
        ("--dim", model.dim, MAX_DIM),
        ("--layers", model.layers, 1 << 10),
        ("--heads", model.heads, 1 << 14),
        ("--seq", model.seq, 1 << 16),
    ])?;
    if !(BYTES..=MAX_VOCABULARY).contains(&model.vocab) {
        return Err(UsageError::new(format!(
            "--vocab must be from {BYTES}, one for each byte, to {MAX_VOCABULARY}, not {}",
            model.vocab
        )));
    }
    Ok(())
}

/// Numbers of options that are from 1 to a most.
///
/// # Errors
/// A [`UsageError`] that names the option and its range.
pub(crate) fn check_ranges(counts: &[(&str, usize, usize)]) -> Result<(), UsageError> {
    for &(option, value, most) in counts {
        if !(1..=most).contains(&value) {
            return Err(UsageError::new(format!(
                "{option} must be from 1 to {most}, not {value}"
            )));
        }
    }
    Ok(())
}

/// The number of steps that `--steps` or `--tokens` ask for.
fn steps(args: &Args, model: GptConfig) -> Result<usize, UsageError> {
    let Some(tokens) = args.tokens else {
        return Ok(args.steps.unwrap_or(200));
    };
    let each = args.batch * model.seq;
    let steps = tokens.div_ceil(each);
    if (1..=MAX_STEPS).contains(&steps) {
        return Ok(steps);
    }
    Err(UsageError::new(format!(
        "--tokens {tokens} are {steps} steps of {each} tokens, and from 1 to {MAX_STEPS} are possible; choose other tokens, or another --batch or \
         --seq"
    )))
}

/// The number of steps that are `fraction` of `steps`, at least one of any part.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "at most as many as there are, and not below zero"
)]
fn tail_steps(fraction: f64, steps: usize) -> Result<usize, UsageError> {
    if !(0.0..=1.0).contains(&fraction) {
        return Err(UsageError::new(format!(
            "--precision-tail {fraction:?}: expected a part of the steps, from 0 to 1"
        )));
    }
    let tail = (fraction * steps as f64).round() as usize;
    Ok(tail.max(usize::from(fraction > 0.0)))
}

/// The linear layers of `model` whose names match one of the patterns.
fn kept_in_bf16(patterns: &[String], model: GptConfig) -> Result<Vec<String>, UsageError> {
    let linears = model.linears();
    let names = weights_of(&linears);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let kept = globs::matching("--keep-bf16", patterns, &names, || {
        format!("no linear layer; {}", layers_are(&linears))
    })?;
    let kept = linears.into_iter().zip(kept).filter(|(_, kept)| *kept);
    Ok(kept.map(|(linear, _)| linear.name).collect())
}

/// The names of their weights, which patterns match.
fn weights_of(linears: &[LinearSpec]) -> Vec<String> {
    let names = linears.iter().map(|linear| globs::weight_of(&linear.name));
    names.collect()
}

/// The names of these linear layers, for who gave others.
fn layers_are(linears: &[LinearSpec]) -> String {
    let [first, last] = [linears.first(), linears.last()].map(|end| end.map_or(0, |end| end.block));
    let names = linears.iter().filter(|linear| linear.block == first);
    let names: Vec<&str> = names.map(|linear| linear.name.as_str()).collect();
    format!("they are {}, in blocks {first} to {last}", names.join(", "))
}

/// The linear layers of `model` that have one amax, by name.
fn amax_groups(
    patterns: &[String],
    model: GptConfig,
    runs: &[Run],
    kept: &[String],
) -> Result<Vec<Vec<String>>, UsageError> {
    let mut linears = model.linears();
    linears.retain(|linear| !kept.contains(&linear.name));
    // Those that engines run as one are the same for every recipe; patterns are of layers that have an amax.
    if amax_groups::are_patterns(patterns) {
        if !runs.iter().any(|run| has_tensor_scale(&run.recipe)) {
            let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
            return Err(UsageError::new(format!(
                "--amax-group: no scale of {} follows from the amax of a whole tensor; leave it out",
                names.join(" or ")
            )));
        }
        linears.retain(|linear| {
            let own = |run: &Run| run.recipe.of_block(linear.block, model.layers);
            runs.iter().any(|run| has_tensor_scale(&own(run)))
        });
        if linears.is_empty() {
            return Err(UsageError::new(
                "--amax-group: no linear layer has an amax, as --keep-bf16 or +bf16-ends keeps them in bf16; leave either out"
                    .to_owned(),
            ));
        }
    }
    let names = weights_of(&linears);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let groups = amax_groups::groups(patterns, &names, || layers_are(&linears))?;
    let named = |group: Vec<usize>| {
        let members = group.iter().map(|&member| linears[member].name.clone());
        members.collect()
    };
    Ok(groups.into_iter().map(named).collect())
}

/// The sizes of model and batch against each other.
fn check_sizes(args: &Args, ranks: usize, model: GptConfig) -> Result<(), UsageError> {
    if args.batch < ranks {
        return Err(UsageError::new(format!(
            "--batch {} over {ranks} ranks: every rank needs at least one sequence; choose --batch {ranks} or more, \
             or fewer ranks",
            args.batch
        )));
    }
    if args.batch / ranks < args.accumulate {
        return Err(UsageError::new(format!(
            "--batch {} over {ranks} ranks is not {} micro-batches of at least one sequence each; choose --batch {} or more, \
             or --accumulate {} or less",
            args.batch,
            args.accumulate,
            ranks * args.accumulate,
            args.batch / ranks
        )));
    }
    if args.batch * model.seq > MAX_TOKENS {
        return Err(UsageError::new(format!(
            "--batch {} of --seq {} is {} tokens a step; at most {MAX_TOKENS} are possible",
            args.batch,
            model.seq,
            args.batch * model.seq
        )));
    }
    check_heads(model)?;
    let GptConfig { dim, layers, .. } = model;
    if model.parameters() > MAX_PARAMETERS {
        return Err(UsageError::new(format!(
            "--dim {dim} and --layers {layers} make {} parameters; at most {MAX_PARAMETERS} are possible",
            model.parameters()
        )));
    }
    Ok(())
}

/// The width of a model against its heads.
///
/// # Errors
/// A [`UsageError`] with a width that would work.
pub(crate) fn check_heads(model: GptConfig) -> Result<(), UsageError> {
    let GptConfig { dim, heads, .. } = model;
    if !dim.is_multiple_of(heads) {
        return Err(UsageError::new(format!(
            "--dim {dim} is not divisible by --heads {heads}; {}",
            other_heads(model)
        )));
    }
    let Arch::Llama { kv_heads } = model.arch else {
        return Ok(());
    };
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(UsageError::new(format!(
            "--kv-heads {kv_heads} does not divide --heads {heads}; choose --kv-heads 1, {heads} or another divisor"
        )));
    }
    if !(dim / heads).is_multiple_of(2) {
        return Err(UsageError::new(format!(
            "--arch llama: --dim {dim} over --heads {heads} are heads of odd length, which rotary positions cannot turn; {}",
            other_heads(model)
        )));
    }
    Ok(())
}

/// The next width that the heads of `model` divide, and the next smaller number of heads for its width, where every recipe can block them.
fn other_heads(model: GptConfig) -> String {
    let GptConfig { dim, heads, .. } = model;
    // Rotary positions turn pairs.
    let each = match model.arch {
        Arch::Gpt => 1,
        Arch::Llama { .. } => 2,
    };
    let fits = |fewer: usize| {
        let kv_heads = match model.arch {
            // As many as heads, unless it is given.
            Arch::Llama { kv_heads } if kv_heads != heads => kv_heads,
            _ => fewer,
        };
        dim.is_multiple_of(each * fewer) && fewer.is_multiple_of(kv_heads)
    };
    let wider = dim.next_multiple_of(lcm(each * heads, BLOCK));
    let wider = (wider <= MAX_DIM).then(|| format!("--dim {wider}"));
    let blocks = dim.is_multiple_of(BLOCK);
    let fewer = (1..heads).rev().find(|&fewer| blocks && fits(fewer));
    let fewer = fewer.map(|fewer| format!("--heads {fewer}"));
    let choices: Vec<String> = wider.into_iter().chain(fewer).collect();
    match choices.is_empty() {
        true => "choose fewer heads".to_owned(),
        false => format!("choose {}", choices.join(" or ")),
    }
}

/// Checks that the weights of `run` can be sharded so.
///
/// # Errors
/// A [`UsageError`] with the sharding that would work.
pub(crate) fn check_sharding(run: &Run, sharding: Sharding) -> Result<(), UsageError> {
    if sharding == Sharding::Zero1 && check_flat(&run.recipe, Usage::BOTH).is_err() {
        return Err(UsageError::new(format!(
            "{}: --sharding zero1 cuts weights inside of blocks, and four over six compares the errors of whole blocks; \
             choose --sharding fsdp, or leave four over six out",
            run.name
        )));
    }
    Ok(())
}

/// `value` as the optimizer holds it: finite, and above zero unless `zero` is fine.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the check is made on the narrow value"
)]
fn positive(option: &str, value: f64, zero: bool) -> Result<f32, UsageError> {
    let narrow = value as f32;
    if narrow.is_finite() && (narrow > 0.0 || (zero && value == 0.0)) {
        return Ok(narrow);
    }
    let expected = if zero {
        "0 or a positive number"
    } else {
        "a positive number"
    };
    Err(UsageError::new(format!(
        "{option} {value:?}: expected {expected} in the range of f32"
    )))
}

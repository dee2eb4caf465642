//! [`Setup`]: the arguments of `lowp train` as a [`Config`] of lowp-train, with its runs and checkpoints; checked before anything is read.

use super::args::{Args, ScheduleName};
use super::folder::ModelFolder;
use super::{recipes, source};
use crate::device::Device;
use crate::output;
use crate::sharding::none_in_bf16;
use crate::usage::{AMAX_GROUP, UsageError, input_error, of_patterns};
use anyhow::Result;
use lowp_candle::transformer::Needed;
use lowp_comm::{Launch, Mesh};
use lowp_file::patterns::{self, are_patterns, weight_of};
use lowp_format::{ReshardAfterForward, has_tensor_scale};
use lowp_fsdp::cost::{MAX_RANKS, parameter_state};
use lowp_fsdp::{LinearSpec, Sharding};
use lowp_kernels::StateDtype;
use lowp_optim::{Decay, StateDtypes};
use lowp_train::summary::BASELINE;
use lowp_train::{
    Checkpoints, Config, MAX_BATCH, Mixture, Model, Optimizer, Run, TrainError, machine,
};
use lowp_transformer::{GptConfig, SizeError};
use std::sync::Arc;

/// Most with which a second moment in bf16 follows gradients (docs/numerics.md, 12.3).
const BETA2_OF_BF16: f32 = 0.99;

/// Most ranks that are threads of one process.
const MAX_THREADS: usize = 64;
/// Most tokens that a rank has at a time.
const MAX_TOKENS: usize = 1 << 24;
/// Most steps of one run.
pub(super) const MAX_STEPS: usize = 10_000_000;

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) config: Config<GptConfig>,
    /// What to run, the baseline first.
    pub(crate) runs: Vec<Run>,
    pub(crate) checkpoints: Checkpoints,
    /// The model that runs begin with.
    pub(crate) folder: Option<Arc<ModelFolder>>,
    /// What is trained on, where the number of steps follows from it.
    pub(crate) tokens: Option<Arc<Mixture>>,
    /// Where it runs; ranks that are threads have this GPU and those that follow.
    pub(crate) device: Device,
}

impl Setup {
    /// Checks the arguments against each other, and against the ranks that a launcher started.
    pub(crate) fn new(args: &Args, launch: Option<&Launch>) -> Result<Self> {
        let started = launch.map(|launch| launch.world);
        let mesh = mesh(args, started)?;
        args.sizes.check()?;
        let (folder, model) = model(args)?;
        let ranks = match args.sharded.mesh {
            Some(_) => "--mesh: its number of ranks",
            None => "--world-size",
        };
        let most = match started {
            Some(_) => MAX_RANKS,
            None => MAX_THREADS,
        };
        check_ranges(&[
            (ranks, mesh.world(), most),
            ("--batch", args.batch, MAX_BATCH),
        ])?;
        model.check().map_err(UsageError::from)?;
        if folder.is_none() {
            model.check_bytes().map_err(UsageError::from)?;
        }
        let parts = mesh.world().saturating_mul(args.sharded.accumulate);
        check_tokens(args.batch, parts, model.seq)?;
        if folder.is_none() {
            model.check_parameters().map_err(UsageError::from)?;
        }
        let (steps, tokens) = match args.epochs {
            Some(epochs) => source::steps(args, (model, folder.is_some()), epochs)?,
            None => (steps(args, model)?, None),
        };
        let optimizer = args.sharded.optimizer;
        let defaults = optimizer.defaults();
        // Of AdamW, where that updates variables.
        let of_matrices = optimizer.rule().is_of_matrices();
        let beta2 = match of_matrices {
            true => Optimizer::AdamW.defaults().betas.1,
            false => defaults.betas.1,
        };
        let tuned = folder.as_ref().is_some_and(|folder| folder.hub.is_some());
        let rate = |optimizer: Optimizer| match tuned {
            true => fine_tuning_rate(optimizer),
            false => optimizer.defaults().lr,
        };
        let var_lr = match of_matrices {
            true => rate(Optimizer::AdamW),
            false => Optimizer::AdamW.defaults().lr,
        };
        if args.var_lr.is_some() && !of_matrices {
            let name = optimizer.name();
            let text = format!("--var-lr has no meaning with --optimizer {name}; leave it out");
            return Err(UsageError::new(text).into());
        }
        if args.beta2.is_some() && !optimizer.has_beta2() {
            let name = optimizer.name();
            let text = format!("--beta2 has no meaning with --optimizer {name}; leave it out");
            return Err(UsageError::new(text).into());
        }
        let sharding = args.sharded.sharding;
        let warmup = args.warmup.unwrap_or((steps / 10).min(100)) as u64;
        let config = Config {
            model,
            batch: args.batch,
            accumulate: args.sharded.accumulate,
            reduce_every_micro_batch: args.sharded.reduce_every_micro_batch,
            recompute: args.sharded.recompute,
            kept_in_bf16: kept_in_bf16(&args.sharded.keep_bf16, model)?,
            amax_groups: Vec::new(),
            tail_steps: tail_steps(args.precision_tail, steps)?,
            steps,
            seed: args.seed,
            seeds: args.seeds,
            mesh,
            sharding,
            reshard_after_forward: reshard(
                args.sharded.reshard_after_forward,
                sharding,
                mesh.shard,
            )?,
            grad_wire: args.sharded.grad_wire,
            optimizer,
            optimizer_state: args.sharded.optimizer_state(),
            offload_optimizer: args.sharded.offload_optimizer,
            lr: or("lr", args.lr, rate(optimizer), false)?,
            var_lr: or("var_lr", args.var_lr, var_lr, false)?,
            warmup,
            schedule: schedule(args, steps as u64, warmup)?,
            final_lr: narrow("final_lr", args.final_lr, true)?,
            beta2: or("beta2", args.beta2, beta2, true)?,
            weight_decay: or(
                "weight_decay",
                args.weight_decay,
                defaults.weight_decay,
                true,
            )?,
            no_decay: no_decay(args, &folder, model)?,
            clip: narrow("clip", args.clip, false)?,
            z_loss: narrow("z_loss", args.z_loss, true)?,
            eval_batches: args.eval_batches,
            eval_every: args.eval_every,
        };
        config.check().map_err(UsageError::from)?;
        let is_first = launch.is_none_or(|launch| launch.rank == 0);
        let rounds_away = config.optimizer_state.exp_avg_sq == StateDtype::Bf16
            && config.beta2 > BETA2_OF_BF16
            && is_first;
        if rounds_away {
            output::note(&format!(
                "exp_avg_sq in bf16 does not follow gradients with a beta2 of {}; choose --beta2 {BETA2_OF_BF16} or less, or leave exp_avg_sq in f32",
                config.beta2
            ));
        }
        let baseline = !args.no_baseline && folder.is_none();
        let runs = recipes::select(&args.recipe, &args.compare, baseline)?;
        if let (Some(machine), Device::Cpu) = (machine::memory(), args.device) {
            let at_once = args.batch.div_ceil(args.sharded.accumulate);
            let here = launch.map_or(mesh.world(), |launch| launch.local_world);
            let keeping = if config.keeps_gradients() { here } else { 0 };
            let of_run = |run: &Run| {
                let state = states(&runs, run, config.optimizer_state);
                state.of_recipe(&run.recipe)
            };
            let bytes = |state: &StateDtypes| parameter_state(config.optimizer.rule(), *state, 1);
            let widest = runs.iter().map(of_run).max_by_key(bytes);
            let widest = widest.unwrap_or_default();
            Needed::new(model, at_once, mesh.replicate, args.sharded.recompute)
                .with_optimizer(model, config.optimizer, widest)
                .of_ranks(here, mesh.world())
                .keeping_gradients(model, keeping)
                .check(machine)
                .map_err(UsageError::from)?;
        }
        for run in &runs {
            let recipe = (run.name.as_str(), run.recipe);
            let fits = model.check_recipe(recipe, &config.kept_in_bf16);
            fits.map_err(|error| of_layer(error, folder.is_some()))?;
            run.check_sharding(sharding).map_err(UsageError::from)?;
            let linears = model.linears();
            let of = |linear| config.recipe_of(run, linear, (model.layers, false));
            let state = states(&runs, run, config.optimizer_state);
            let note = none_in_bf16(state, &run.name, linears.iter().map(of));
            if let Some(note) = note.filter(|_| is_first) {
                output::note(&note);
            }
        }
        let amax_groups = amax_groups(&args.amax_group, model, &runs, &config.kept_in_bf16)?;
        let checkpoints = args.checkpoints();
        checkpoints.check(steps).map_err(UsageError::from)?;
        check_device(args)?;
        check_ranges(&[("--log-codes", args.log_codes.unwrap_or(1), MAX_STEPS)])?;
        if let Some(peak) = args
            .peak_tflops
            .filter(|peak| !(peak.is_finite() && *peak > 0.0))
        {
            return Err(input_error(format!(
                "--peak-tflops {peak}: expected a positive number"
            )));
        }
        Ok(Self {
            config: Config {
                amax_groups,
                ..config
            },
            runs,
            checkpoints,
            folder,
            tokens,
            device: args.device,
        })
    }
}

impl Setup {
    /// Every run, with the configuration of its seed.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&Run, Config<GptConfig>)> {
        self.config.each_seed().flat_map(move |config| {
            self.runs.iter().map(move |run| {
                let optimizer_state = self.optimizer_state(run);
                let config = Config {
                    optimizer_state,
                    ..config.clone()
                };
                (run, config)
            })
        })
    }

    /// The dtypes of states in `run`.
    pub(super) fn optimizer_state(&self, run: &Run) -> StateDtypes {
        states(&self.runs, run, self.config.optimizer_state)
    }
}

/// The dtypes of states in `run`, one of `runs`: f32 in a baseline that others are compared with.
fn states(runs: &[Run], run: &Run, asked: StateDtypes) -> StateDtypes {
    match runs.len() > 1 && run.name == BASELINE {
        true => StateDtypes::default(),
        false => asked,
    }
}

/// The model of `--model`, or the one of the sizes.
fn model(args: &Args) -> Result<(Option<Arc<ModelFolder>>, GptConfig)> {
    let Some(path) = &args.model else {
        return Ok((None, args.byte_model()));
    };
    if let Some(option) = args.sizes.given().find(|option| *option != "--seq") {
        return Err(input_error(format!(
            "{option} changes a size of a preset, but --model defines its own sizes; leave the option out"
        )));
    }
    let (folder, model) = ModelFolder::open(path, args.sizes.seq, args.from_scratch)?;
    Ok((Some(folder.into()), model))
}

/// The error that a layer does not fit a recipe, whose remedy is a size only where sizes can be changed.
fn of_layer(error: SizeError, is_fixed: bool) -> UsageError {
    match error {
        SizeError::Layer { cause, .. } if is_fixed => UsageError::new(format!(
            "{cause}; keep the layer in bf16 with --keep-bf16, or choose another recipe"
        )),
        error => error.into(),
    }
}

/// How the learning rate falls.
fn schedule(args: &Args, steps: u64, warmup: u64) -> Result<Decay, UsageError> {
    match (args.schedule, args.decay_steps) {
        (ScheduleName::Cosine, None) => Ok(Decay::Cosine),
        (ScheduleName::Linear, None) => Ok(Decay::Linear),
        (ScheduleName::Wsd, decay) => {
            let decay = decay.unwrap_or(steps.div_ceil(5).min(steps.saturating_sub(warmup)));
            Ok(Decay::Stable { decay })
        }
        (_, Some(decay)) => Err(UsageError::new(format!(
            "--decay-steps {decay} only applies to --schedule wsd; add it, or leave the option out"
        ))),
    }
}

/// The matrices that stay in f32 and do not decay.
fn no_decay(
    args: &Args,
    folder: &Option<Arc<ModelFolder>>,
    model: GptConfig,
) -> Result<Vec<String>, UsageError> {
    let vars = model.vars().into_iter().filter(|var| var.decay);
    let names: Vec<String> = vars.map(|var| var.name).collect();
    let embedding = ["*embed_tokens*".to_owned()];
    let asked = match (&args.no_decay[..], folder) {
        ([], Some(_)) => &embedding[..],
        (asked, _) => asked,
    };
    let shown: Vec<&str> = names.iter().map(String::as_str).collect();
    let matching = patterns::matching(asked, &shown, || {
        format!("no matrix that stays in f32; they are {}", shown.join(", "))
    });
    let matching = matching.map_err(of_patterns("--no-decay"))?;
    let matched = names.iter().zip(matching).filter(|(_, matches)| *matches);
    Ok(matched.map(|(name, _)| name.clone()).collect())
}

/// Checks that options of GPUs are given where there are some.
fn check_device(args: &Args) -> Result<(), UsageError> {
    let of_gpus = [
        ("--profile", args.profile),
        ("--no-cudnn", args.sharded.no_cudnn.is_some()),
        (
            "--nondeterministic-attention",
            args.sharded.nondeterministic_attention,
        ),
        ("--agree-amaxes", args.agree_amaxes),
        ("--no-prefetch", args.sharded.no_prefetch),
        ("--offload-optimizer", args.sharded.offload_optimizer),
    ];
    match (of_gpus.iter().find(|(_, given)| *given), args.device) {
        (Some((option, _)), Device::Cpu) => Err(UsageError::new(format!(
            "{option} only applies to GPUs: add --device cuda, or leave it out"
        ))),
        _ => Ok(()),
    }
}

/// The policy that is asked for, among `shards` ranks that share out a replica.
pub(crate) fn reshard(
    asked: Option<ReshardAfterForward>,
    sharding: Sharding,
    shards: usize,
) -> Result<ReshardAfterForward, UsageError> {
    if let (Sharding::Zero1, Some(policy)) = (sharding, asked) {
        return Err(UsageError::new(format!(
            "--reshard-after-forward {policy} has no effect with --sharding zero1, where every rank has the full weights; leave it out"
        )));
    }
    let policy = asked.unwrap_or_default();
    policy.among(shards).map_err(UsageError::from)?;
    Ok(policy)
}

/// The mesh that is asked for, of as many ranks as there are.
fn mesh(args: &Args, started: Option<usize>) -> Result<Mesh, UsageError> {
    let ranks = args.world_size.or(started).unwrap_or(2);
    let mesh = args.sharded.mesh.unwrap_or(Mesh::sharded(ranks));
    match started {
        Some(started) if started != mesh.world() => Err(UsageError::new(format!(
            "{} means {} ranks, but the launcher started {started}; leave the option out, or start that many",
            args.sharded.mesh.map_or_else(
                || format!("--world-size {ranks}"),
                |mesh| format!("--mesh {mesh}")
            ),
            mesh.world()
        ))),
        _ => Ok(mesh),
    }
}

/// Numbers of options that are from 1 to a most.
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

/// Sequences that a GPU has at a time: micro-batches are equal there.
pub(crate) fn sequences_at_once(
    batch: usize,
    ranks: usize,
    accumulate: usize,
) -> Result<usize, UsageError> {
    let parts = ranks * accumulate;
    match batch.is_multiple_of(parts) && batch > 0 {
        true => Ok(batch / parts),
        false => Err(UsageError::new(format!(
            "--batch {batch} cannot be divided into {parts} equal micro-batches, as GPUs need ({ranks} ranks x --accumulate {accumulate}); give --batch {}",
            batch.max(1).next_multiple_of(parts)
        ))),
    }
}

/// The tokens that each rank has at a time, of a batch in as many `parts` as ranks have micro-batches.
pub(crate) fn check_tokens(batch: usize, parts: usize, seq: usize) -> Result<(), UsageError> {
    let tokens = batch.div_ceil(parts.max(1)) * seq;
    match tokens > MAX_TOKENS {
        true => Err(UsageError::new(format!(
            "--batch {batch} with --seq {seq} gives a rank {tokens} tokens at a time; the maximum is {MAX_TOKENS}; choose a smaller --batch or --seq, or add --accumulate"
        ))),
        false => Ok(()),
    }
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
        "--tokens {tokens} gives {steps} steps of {each} tokens; a run has 1 to {MAX_STEPS} steps; change --tokens, --batch or \
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
fn kept_in_bf16(keep: &[String], model: GptConfig) -> Result<Vec<String>, UsageError> {
    let linears = model.linears();
    let names = weights_of(&linears);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let kept = patterns::matching(keep, &names, || {
        format!("no linear layer; {}", layers_are(&linears))
    });
    let kept = kept.map_err(of_patterns("--keep-bf16"))?;
    let kept = linears.into_iter().zip(kept).filter(|(_, kept)| *kept);
    Ok(kept.map(|(linear, _)| linear.name).collect())
}

/// The names of their weights, which patterns match.
fn weights_of(linears: &[LinearSpec]) -> Vec<String> {
    let names = linears.iter().map(|linear| weight_of(&linear.name));
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
    asked: &[String],
    model: GptConfig,
    runs: &[Run],
    kept: &[String],
) -> Result<Vec<Vec<String>>, UsageError> {
    let mut linears = model.linears();
    linears.retain(|linear| !kept.contains(&linear.name));
    // Those that engines run as one are the same for every recipe; patterns are of layers that have an amax.
    if are_patterns(asked) {
        if !runs.iter().any(|run| has_tensor_scale(&run.recipe)) {
            let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
            return Err(UsageError::new(format!(
                "--amax-group: no scale of {} depends on the amax of a whole tensor; leave the option out",
                names.join(" or ")
            )));
        }
        linears.retain(|linear| {
            let own = |run: &Run| run.recipe.of_block(linear.block, model.layers);
            runs.iter().any(|run| has_tensor_scale(&own(run)))
        });
        if linears.is_empty() {
            return Err(UsageError::new(
                "--amax-group: no linear layer has an amax, since --keep-bf16 or +bf16-ends keeps them all in bf16; leave one of the options out"
                    .to_owned(),
            ));
        }
    }
    let names = weights_of(&linears);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let groups = patterns::amax_groups(asked, &names, || layers_are(&linears));
    let groups = groups.map_err(of_patterns(AMAX_GROUP))?;
    let named = |group: Vec<usize>| {
        let members = group.iter().map(|&member| linears[member].name.clone());
        members.collect()
    };
    Ok(groups.into_iter().map(named).collect())
}

/// `value` as the optimizer holds it: finite, and above zero unless `zero` is fine.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the check is made on the narrow value"
)]
fn narrow(field: &'static str, value: f64, zero: bool) -> Result<f32, UsageError> {
    let narrow = value as f32;
    if narrow.is_finite() && (narrow > 0.0 || (zero && value == 0.0)) {
        return Ok(narrow);
    }
    Err(TrainError::Number { field, value, zero }.into())
}

/// The same of an option that may be left out.
fn or(
    field: &'static str,
    value: Option<f64>,
    default: f32,
    zero: bool,
) -> Result<f32, UsageError> {
    value.map_or(Ok(default), |value| narrow(field, value, zero))
}

/// The learning rate with weights of a model that was trained: so much less than that of random weights.
fn fine_tuning_rate(optimizer: Optimizer) -> f32 {
    match optimizer {
        Optimizer::AdamW | Optimizer::Moonlight => 2e-5,
        Optimizer::Lion => 7e-6,
        Optimizer::Sgd => 7e-4,
        Optimizer::Muon => 1e-4,
    }
}

//! [`Setup`]: the arguments of `lowp train` as a [`Config`] of lowp-train, with its runs and checkpoints; checked before anything is read.

use super::args::Args;
use super::checks::{self, MAX_STEPS};
use super::folder::ModelFolder;
use super::optimizer::{defaults, narrow};
use super::{dependent, layers, recipes, source};
use crate::device::Device;
use crate::output;
use crate::sharding::none_in_bf16;
use crate::usage::UsageError;
use anyhow::Result;
use lowp_candle::transformer::Needed;
use lowp_comm::{Launch, Mesh};
use lowp_format::ReshardAfterForward;
use lowp_format::spelling::Variant;
use lowp_fsdp::Sharding;
use lowp_fsdp::cost::parameter_state;
use lowp_kernels::StateDtype;
use lowp_optim::StateDtypes;
use lowp_train::summary::BASELINE;
use lowp_train::{Checkpoints, Config, Mixture, Run, machine};
use lowp_transformer::{GptConfig, SizeError};
use std::sync::Arc;

/// Most with which a second moment in bf16 follows gradients (docs/numerics.md, 12.3).
const BETA2_OF_BF16: f32 = 0.99;

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
    /// Whether ranks are processes that a launcher started.
    pub(crate) is_launched: bool,
}

impl Setup {
    /// Reads and checks the arguments, of ranks that a launcher started or of threads. Each of these subjects relies on those before it: the mesh,
    /// options beside others, sizes, steps, how to train, runs with their memory and layers, checkpoints and logs.
    pub(crate) fn new(args: &Args, launch: Option<&Launch>) -> Result<Self> {
        let mesh = mesh(args, launch.map(|launch| launch.world))?;
        checks::options(args)?;
        let (folder, model) = model(args)?;
        let is_fixed = folder.is_some();
        checks::sizes(args, mesh, launch.is_some(), model, is_fixed)?;
        let (steps, tokens) = match args.epochs {
            Some(epochs) => source::steps(args, model, is_fixed, epochs)?,
            None => (steps(args, model)?, None),
        };
        let config = config(args, mesh, folder.as_deref(), model, steps)?;
        let baseline = !args.no_baseline && !is_fixed;
        let mut setup = Self {
            runs: recipes::select(&args.recipe, &args.compare, baseline)?,
            checkpoints: args.checkpoints(),
            config,
            folder,
            tokens,
            device: args.device,
            is_launched: launch.is_some(),
        };
        setup.check_memory(launch)?;
        for note in setup.check_runs()? {
            if launch.is_none_or(|launch| launch.rank == 0) {
                output::note(&note);
            }
        }
        let Self { config, runs, .. } = &setup;
        setup.config.amax_groups =
            layers::amax_groups(&args.amax_group, model, runs, &config.kept_in_bf16)?;
        setup.checkpoints.check(steps).map_err(UsageError::from)?;
        checks::log(args, steps)?;
        Ok(setup)
    }
}

/// How runs are trained: with so many `steps`, from the weights of `folder` if there is one.
fn config(
    args: &Args,
    mesh: Mesh,
    folder: Option<&ModelFolder>,
    model: GptConfig,
    steps: usize,
) -> Result<Config<GptConfig>, UsageError> {
    let (sharded, of) = (&args.sharded, &args.optimizer);
    let is_trained = folder.is_some_and(|folder| folder.hub.is_some());
    let (group, var_lr) = defaults(sharded.optimizer, is_trained);
    let or = |value: Option<f64>, default: f32| value.unwrap_or(default.into());
    let decay = or(of.weight_decay, group.weight_decay);
    let warmup = of.warmup.unwrap_or((steps / 10).min(100)) as u64;
    let policy = reshard(sharded.reshard_after_forward, sharded.sharding, mesh.shard)?;
    let config = Config {
        model,
        batch: args.batch,
        accumulate: sharded.accumulate,
        reduce_every_micro_batch: sharded.reduce_every_micro_batch,
        recompute: sharded.recompute,
        kept_in_bf16: layers::kept_in_bf16(&sharded.keep_bf16, model)?,
        amax_groups: Vec::new(),
        tail_steps: tail_steps(args.precision_tail, steps)?,
        steps,
        seed: args.seed,
        seeds: args.seeds,
        mesh,
        sharding: sharded.sharding,
        reshard_after_forward: policy,
        grad_wire: sharded.grad_wire,
        optimizer: sharded.optimizer,
        optimizer_state: sharded.optimizer_state(),
        offload_optimizer: sharded.offload_optimizer,
        lr: narrow("lr", or(of.lr, group.lr), false)?,
        var_lr: narrow("var_lr", or(of.var_lr, var_lr), false)?,
        warmup,
        schedule: of.decay(steps as u64, warmup),
        final_lr: narrow("final_lr", of.final_lr, true)?,
        beta2: narrow("beta2", or(of.beta2, group.betas.1), true)?,
        weight_decay: narrow("weight_decay", decay, true)?,
        no_decay: layers::no_decay(&of.no_decay, model, folder.is_some())?,
        clip: narrow("clip", of.clip, false)?,
        z_loss: narrow("z_loss", of.z_loss, true)?,
        eval_batches: args.eval_batches,
        eval_every: args.eval_every,
    };
    config.check()?;
    Ok(config)
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

    /// The recipes of the linear layers in `run`, before the tail.
    pub(super) fn recipes(&self, run: &Run) -> Vec<Variant> {
        let (linears, blocks) = (self.config.linears(), self.config.model.layers);
        let of = |linear| self.config.recipe_of(run, linear, blocks, false);
        linears.iter().map(of).collect()
    }

    /// The dtypes of states in `run`: f32 in a baseline that others are compared with.
    pub(super) fn optimizer_state(&self, run: &Run) -> StateDtypes {
        match self.runs.len() > 1 && run.name == BASELINE {
            true => StateDtypes::default(),
            false => self.config.optimizer_state,
        }
    }

    /// Checks that this machine has the memory of its ranks on a CPU.
    fn check_memory(&self, launch: Option<&Launch>) -> Result<(), UsageError> {
        let (Some(machine), Device::Cpu) = (machine::memory(), self.device) else {
            return Ok(());
        };
        let config = &self.config;
        let (model, mesh, rule) = (config.model, config.mesh, config.optimizer.rule());
        let at_once = config.batch.div_ceil(config.accumulate);
        let here = launch.map_or(mesh.world(), |launch| launch.local_world);
        let keeping = if config.keeps_gradients() { here } else { 0 };
        let of_run = |run: &Run| self.optimizer_state(run).of_recipe(&run.recipe);
        let bytes = |state: &StateDtypes| parameter_state(rule, *state, 1);
        let widest = self.runs.iter().map(of_run).max_by_key(bytes);
        Needed::new(model, at_once, mesh.replicate, config.recompute)
            .with_optimizer(model, config.optimizer, widest.unwrap_or_default())
            .of_ranks(here, mesh.world())
            .keeping_gradients(model, keeping)
            .check(machine)?;
        Ok(())
    }

    /// Checks what recipes need of the layers and of the optimizer. Returns notes on what works, but not as it may be expected to.
    fn check_runs(&self) -> Result<Vec<String>, UsageError> {
        let config = &self.config;
        let (model, state) = (config.model, config.optimizer_state);
        let mut notes = Vec::new();
        if !config.kept_in_bf16.is_empty()
            && self
                .runs
                .iter()
                .all(|run| run.recipe.in_bf16() == run.recipe)
        {
            let names: Vec<&str> = self.runs.iter().map(|run| &*run.name).collect();
            notes.push(format!(
                "--keep-bf16 changes nothing: the weights of {} have 16 bits or more, and stay as they are",
                names.join(" and ")
            ));
        }
        if state.exp_avg_sq == StateDtype::Bf16 && config.beta2 > BETA2_OF_BF16 {
            notes.push(format!(
                "exp_avg_sq in bf16 does not follow gradients with a beta2 of {}; choose --beta2 {BETA2_OF_BF16} or less, or leave exp_avg_sq in f32",
                config.beta2
            ));
        }
        for run in &self.runs {
            let fits = model.check_recipe(&run.name, run.recipe, &config.kept_in_bf16);
            fits.map_err(|error| of_layer(error, self.folder.is_some()))?;
            run.check_sharding(config.sharding)?;
            let (state, recipes) = (self.optimizer_state(run), self.recipes(run));
            notes.extend(none_in_bf16(state, &run.name, recipes));
        }
        Ok(notes)
    }
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

/// The model of `--model`, or the one of the sizes.
fn model(args: &Args) -> Result<(Option<Arc<ModelFolder>>, GptConfig)> {
    let Some(path) = &args.model else {
        return Ok((None, args.byte_model()));
    };
    let (folder, model) = ModelFolder::open(path, args.sizes.seq, args.from_scratch)?;
    Ok((Some(folder.into()), model))
}

/// The policy that is asked for, among `shards` ranks that share out a replica.
pub(crate) fn reshard(
    asked: Option<ReshardAfterForward>,
    sharding: Sharding,
    shards: usize,
) -> Result<ReshardAfterForward, UsageError> {
    if let Some(policy) = asked {
        let given = format!("--reshard-after-forward {policy}");
        dependent::check(&given, sharding.name())?;
    }
    let policy = asked.unwrap_or_default();
    let fits = policy.among(shards);
    fits.map_err(|e| UsageError::new(format!("--reshard-after-forward {policy}: {e}")))?;
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

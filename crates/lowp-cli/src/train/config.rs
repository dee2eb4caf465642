//! What a run needs, checked once.

use super::args::Args;
use super::recipes::{self, Run};
use crate::usage::UsageError;
use lowp_candle::GptConfig;
use lowp_optim::{Group, Schedule};
use lowp_shard::{GradWire, Mesh};
use serde::Serialize;

/// Most ranks that one process is asked to play.
const MAX_RANKS: usize = 64;

/// The same for every run of one command.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) model: GptConfig,
    pub(crate) mesh: Mesh,
    pub(crate) reshard_after_forward: bool,
    pub(crate) steps: usize,
    pub(crate) seed: u64,
    pub(crate) batch: usize,
    pub(crate) eval_batches: usize,
    pub(crate) grad_wire: GradWire,
    pub(crate) schedule: Schedule,
    pub(crate) group: Group,
    pub(crate) clip: f32,
    /// What to run, the baseline first.
    pub(crate) runs: Vec<Run>,
}

/// The configuration as it stands in the JSON file and the report.
#[derive(Debug, Serialize)]
pub(crate) struct ConfigRecord {
    dim: usize,
    layers: usize,
    heads: usize,
    seq: usize,
    batch: usize,
    steps: usize,
    seed: u64,
    mesh: [usize; 2],
    reshard_after_forward: bool,
    lr: f32,
    warmup: u64,
    weight_decay: f32,
    clip: f32,
    eval_batches: usize,
}

impl Config {
    /// Checks the arguments against each other.
    ///
    /// # Errors
    /// A [`UsageError`] that names the option and a value that would work.
    pub(crate) fn new(args: &Args) -> Result<Self, UsageError> {
        let mesh = args.mesh.unwrap_or(Mesh::sharded(args.ranks.unwrap_or(2)));
        let counts = [
            ("--ranks", mesh.world()),
            ("--steps", args.steps),
            ("--batch", args.batch),
            ("--dim", args.dim),
            ("--layers", args.layers),
            ("--heads", args.heads),
            ("--seq", args.seq),
            ("--eval-batches", args.eval_batches),
        ];
        if let Some((option, _)) = counts.iter().find(|(_, value)| *value == 0) {
            return Err(UsageError::new(format!("{option} must be at least 1")));
        }
        if mesh.world() > MAX_RANKS {
            return Err(UsageError::new(format!(
                "{} ranks: one process plays at most {MAX_RANKS}",
                mesh.world()
            )));
        }
        if args.batch < mesh.world() {
            return Err(UsageError::new(format!(
                "--batch {} over {} ranks: every rank needs at least one sequence",
                args.batch,
                mesh.world()
            )));
        }
        if !args.dim.is_multiple_of(args.heads) {
            return Err(UsageError::new(format!(
                "--dim {} is not divisible by --heads {}",
                args.dim, args.heads
            )));
        }
        for (option, value, above_zero) in [
            ("--lr", args.lr, true),
            ("--weight-decay", args.weight_decay, false),
            ("--clip", args.clip, true),
        ] {
            if !value.is_finite() || value < 0.0 || (above_zero && value == 0.0) {
                return Err(UsageError::new(format!(
                    "{option} {value}: expected a positive number"
                )));
            }
        }
        let warmup = args.warmup.unwrap_or((args.steps / 10).min(100));
        #[allow(clippy::cast_possible_truncation)] // options are f32 in the optimizer
        Ok(Self {
            model: GptConfig {
                dim: args.dim,
                layers: args.layers,
                heads: args.heads,
                seq: args.seq,
            },
            mesh,
            reshard_after_forward: args.reshard_after_forward,
            steps: args.steps,
            seed: args.seed,
            batch: args.batch,
            eval_batches: args.eval_batches,
            grad_wire: match args.grad_wire.as_str() {
                "bf16" => GradWire::Bf16,
                _ => GradWire::F32,
            },
            schedule: Schedule {
                warmup: warmup as u64,
                total: args.steps as u64,
                floor: 0.1,
            },
            group: Group {
                lr: args.lr as f32,
                weight_decay: args.weight_decay as f32,
                ..Group::default()
            },
            clip: args.clip as f32,
            runs: recipes::select(&args.recipe, &args.compare)?,
        })
    }

    /// The part of it that goes into result files.
    pub(crate) fn record(&self) -> ConfigRecord {
        ConfigRecord {
            dim: self.model.dim,
            layers: self.model.layers,
            heads: self.model.heads,
            seq: self.model.seq,
            batch: self.batch,
            steps: self.steps,
            seed: self.seed,
            mesh: [self.mesh.replicate, self.mesh.shard],
            reshard_after_forward: self.reshard_after_forward,
            lr: self.group.lr,
            warmup: self.schedule.warmup,
            weight_decay: self.group.weight_decay,
            clip: self.clip,
            eval_batches: self.eval_batches,
        }
    }
}

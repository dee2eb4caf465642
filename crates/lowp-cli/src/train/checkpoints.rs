//! Where checkpoints of runs go, when they are saved, and which one a run goes on behind.

use super::args::Args;
use super::config::Config;
use super::corpus::Corpus;
use super::recipes::Run;
use crate::usage::UsageError;
use anyhow::Result;
use lowp_checkpoint::{Block, Checkpoint, is_checkpoint, latest};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The tensor of the losses of all steps.
pub(super) const LOSSES: &str = "train.losses";

/// What must be the same for a run to go on: by key of the configuration, and the option that says it.
const OF_THE_MODEL: [(&str, &str); 7] = [
    ("arch", "--arch"),
    ("kv_heads", "--kv-heads"),
    ("dim", "--dim"),
    ("layers", "--layers"),
    ("heads", "--heads"),
    ("seq", "--seq"),
    ("vocab", "--vocab"),
];
const OF_THE_RUN: [(&str, &str); 10] = [
    ("seed", "--seed"),
    ("batch", "--batch"),
    ("steps", "--steps"),
    ("lr", "--lr"),
    ("warmup", "--warmup"),
    ("final_lr", "--final-lr"),
    ("weight_decay", "--weight-decay"),
    ("clip", "--clip"),
    ("tail_steps", "--precision-tail"),
    ("kept_in_bf16", "--keep-bf16"),
];

/// What the options say of checkpoints.
#[derive(Clone, Debug, Default)]
pub(crate) struct Checkpoints {
    save: Option<PathBuf>,
    every: Option<usize>,
    pub(super) keep: Option<usize>,
    resume: Option<PathBuf>,
    stop_after: Option<usize>,
}

impl Checkpoints {
    /// Those of `args`, whose schedule has `steps` steps.
    ///
    /// # Errors
    /// Numbers that make no sense.
    pub(super) fn new(args: &Args, steps: usize) -> Result<Self, UsageError> {
        let counts = [
            ("--save-every", args.save_every, steps),
            ("--stop-after", args.stop_after, steps),
            ("--keep", args.keep, usize::MAX),
        ];
        for (option, value, most) in counts {
            if value.is_some_and(|value| !(1..=most).contains(&value)) {
                let (value, most) = (
                    value.unwrap_or(0),
                    if most == usize::MAX { 1 } else { most },
                );
                return Err(UsageError::new(match option {
                    "--keep" => format!("--keep {value}: at least 1 checkpoint is kept"),
                    _ => format!(
                        "{option} must be from 1 to {most}, the number of steps, not {value}"
                    ),
                }));
            }
        }
        Ok(Self {
            save: args.save.clone(),
            every: args.save_every,
            keep: args.keep,
            resume: args.resume.clone(),
            stop_after: args.stop_after,
        })
    }

    /// The step that the run ends behind, of `steps` steps.
    pub(super) fn last_step(&self, steps: usize) -> usize {
        self.stop_after.unwrap_or(steps).min(steps)
    }

    /// Whether a checkpoint is saved when `done` steps are done of those up to `last`.
    pub(super) fn saves_at(&self, done: usize, last: usize) -> bool {
        let regular = self.every.is_some_and(|every| done.is_multiple_of(every));
        regular || done == last
    }

    /// Checks that a run which begins anew does not save among the checkpoints of another one.
    fn check_new(&self, run: &Run, seed: u64) -> Result<()> {
        let Some(folder) = self.folder_of(run, seed) else {
            return Ok(());
        };
        match latest(&folder) {
            Err(_) => Ok(()),
            Ok(found) => {
                let (found, save) = (found.display(), self.save.as_deref().unwrap_or(&folder));
                let save = save.display();
                Err(UsageError::new(format!(
                    "--save {save}: there is {found} of an earlier run; go on behind it with --resume {save}, or name another folder"
                ))
                .into())
            }
        }
    }

    /// The folder of the checkpoints of a run.
    pub(super) fn folder_of(&self, run: &Run, seed: u64) -> Option<PathBuf> {
        Some(self.save.as_ref()?.join(label(run, seed)))
    }
}

/// The name of a run's folder.
fn label(run: &Run, seed: u64) -> String {
    format!("{}-seed{seed}", run.name)
}

/// The checkpoint that a run goes on behind.
pub(super) struct Resumed {
    checkpoint: Checkpoint,
}

impl Resumed {
    /// That of `run`: its own in the folder of `--resume`, or the one that the folder is or holds.
    ///
    /// # Errors
    /// There is none, it is damaged, or it is of another model; it is of this recipe, and of a run with other options.
    pub(super) fn find(config: &Config, run: &Run, corpus: &Corpus) -> Result<Option<Self>> {
        let Some(folder) = &config.checkpoints.resume else {
            return config
                .checkpoints
                .check_new(run, config.seed)
                .map(|()| None);
        };
        let own = folder.join(label(run, config.seed));
        let any = is_checkpoint(folder) || folder.join("latest").is_file();
        let folder = if own.is_dir() || !any {
            own
        } else {
            folder.clone()
        };
        let checkpoint = Checkpoint::latest(&folder)?;
        let about = checkpoint.about();
        let now = config.about(run, corpus, Value::Null)?;
        let same_recipe = about["recipe"] == now["recipe"];
        let strict: &[_] = if same_recipe { &OF_THE_RUN } else { &[] };
        for (key, option) in OF_THE_MODEL.iter().chain(strict) {
            let [saved, given] = [about, &now].map(|about| &about["config"][key]);
            if saved != given {
                return Err(differs(checkpoint.folder(), option, saved, given).into());
            }
        }
        let [saved, given] = [about, &now].map(|about| &about["data"]);
        if same_recipe && saved != given {
            return Err(differs(checkpoint.folder(), "--data", saved, given).into());
        }
        if checkpoint.step() > config.steps as u64 {
            let (folder, step, steps) = (checkpoint.folder(), checkpoint.step(), config.steps);
            return Err(UsageError::new(format!(
                "--resume: {} is behind step {step}, and --steps {steps} end before it; give more steps",
                folder.display()
            ))
            .into());
        }
        Ok(Some(Self { checkpoint }))
    }

    /// The steps that are done.
    pub(super) fn step(&self) -> usize {
        // At most the number of steps.
        usize::try_from(self.checkpoint.step()).unwrap_or(usize::MAX)
    }

    pub(super) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// What was said of the weights.
    pub(super) fn weights(&self) -> &Value {
        &self.checkpoint.about()["weights"]
    }

    /// The losses of the steps that are done.
    ///
    /// # Errors
    /// The checkpoint is damaged.
    pub(super) fn losses(&self) -> Result<Vec<f32>> {
        let shape = [1, self.step()];
        Ok(self
            .checkpoint
            .read_f32(LOSSES, shape, Block::whole(shape))?)
    }
}

fn differs(folder: &Path, option: &str, saved: &Value, given: &Value) -> UsageError {
    UsageError::new(format!(
        "--resume: the run in {} was saved with {option} {saved}, and this one has {given}; give the same, or begin a new run",
        folder.display()
    ))
}

impl Config {
    /// What a checkpoint of `run` says of it, with what the model says of its weights.
    ///
    /// # Errors
    /// A value that has no JSON form.
    pub(super) fn about(&self, run: &Run, corpus: &Corpus, weights: Value) -> Result<Value> {
        // By way of text, so that f32 numbers are those that were given.
        let config: Value = serde_json::from_str(&serde_json::to_string(&self.record())?)?;
        Ok(json!({
            "recipe": run.name,
            "config": config,
            "data": corpus.digest(),
            "weights": weights,
            "transformers": self.model.transformers(),
        }))
    }

    /// The step that runs end behind.
    pub(super) fn last_step(&self) -> usize {
        self.checkpoints.last_step(self.steps)
    }
}

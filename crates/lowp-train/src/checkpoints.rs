//! Where checkpoints of runs go, when they are saved, and which one a run goes on behind.

use super::args::Args;
use super::config::Config;
use super::corpus::Corpus;
use super::recipes::{Run, has_tensor_scale};
use crate::usage::UsageError;
use anyhow::Result;
use lowp_checkpoint::{Block, Checkpoint, check_writable, is_checkpoint, steps};
use lowp_format::spelling::Variant;
use serde_json::{Map, Value, json};
use std::fmt::Display;
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
const OF_THE_RUN: [(&str, &str); 13] = [
    ("accumulate", "--accumulate"),
    ("grad_wire", "--grad-wire"),
    ("seed", "--seed"),
    ("batch", "--batch"),
    ("steps", "--steps"),
    ("lr", "--lr"),
    ("warmup", "--warmup"),
    ("final_lr", "--final-lr"),
    ("weight_decay", "--weight-decay"),
    ("clip", "--clip"),
    ("tail_steps", "--precision-tail of steps"),
    ("kept_in_bf16", "--keep-bf16"),
    ("amax_groups", "--amax-group"),
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

    /// The folder that `run` goes on from; `None` if it begins anew.
    fn source(&self, run: &Run, seed: u64) -> Result<Option<PathBuf>, UsageError> {
        let Some(folder) = &self.resume else {
            return Ok(None);
        };
        if is_one_run(folder) {
            return Ok(Some(folder.clone()));
        }
        let own = folder.join(label(run, seed));
        let any = is_one_run(&own) || !steps(&own).map_err(told)?.is_empty();
        Ok(any.then_some(own))
    }

    /// Checks that `--resume` has something for `runs` of `seeds`: checkpoints of some of them, or one checkpoint for one run.
    ///
    /// # Errors
    /// A [`UsageError`] with what to change.
    pub(super) fn check(&self, config: &Config) -> Result<(), UsageError> {
        let Some(folder) = &self.resume else {
            return Ok(());
        };
        let name = folder.display();
        let runs = config.runs.len() * config.seeds;
        if is_one_run(folder) {
            return match runs {
                1 => Ok(()),
                _ => Err(UsageError::new(format!(
                    "--resume {name} is of one run, and {runs} would go on behind it, the baseline among them unless it is left out; \
                     give one --recipe and one seed with --no-baseline"
                ))),
            };
        }
        for config in config.each_seed() {
            for run in &config.runs {
                if self.source(run, config.seed)?.is_some() {
                    return Ok(());
                }
            }
        }
        let runs = config.runs.iter().map(|run| label(run, config.seed));
        let runs: Vec<String> = runs.collect();
        Err(UsageError::new(format!(
            "--resume {name}: there are no checkpoints of {}; name a folder that --save was given, or one checkpoint",
            runs.join(" or ")
        )))
    }

    /// Checks that the runs of `config` can save.
    ///
    /// # Errors
    /// A [`UsageError`] with the folder that cannot be written.
    pub(super) fn check_writable(&self, config: &Config) -> Result<(), UsageError> {
        let Some(save) = &self.save else {
            return Ok(());
        };
        for config in config.each_seed() {
            for run in &config.runs {
                check_writable(&save.join(label(run, config.seed))).map_err(|error| {
                    UsageError::new(format!("--save {}: {error}", save.display()))
                })?;
            }
        }
        Ok(())
    }

    /// Checks that a run which goes on from `source` does not save among the checkpoints of another one.
    fn check_save(&self, run: &Run, seed: u64, source: Option<&Path>) -> Result<(), UsageError> {
        let Some(folder) = self.folder_of(run, seed) else {
            return Ok(());
        };
        let there = steps(&folder).map_err(told)?;
        let Some(last) = there.last() else {
            return Ok(());
        };
        let same = |source: &Path| match (source.canonicalize(), folder.canonicalize()) {
            (Ok(source), Ok(folder)) => source.starts_with(folder),
            _ => false,
        };
        if source.is_some_and(same) {
            return Ok(());
        }
        let folder = folder.display();
        let save = self.save.as_deref().unwrap_or(Path::new("")).display();
        Err(UsageError::new(format!(
            "--save {save}: {folder} has checkpoints of an earlier run, up to step {last}; go on behind them with --resume {save}, or \
             name another folder"
        )))
    }

    /// The folder of the checkpoints of a run.
    pub(super) fn folder_of(&self, run: &Run, seed: u64) -> Option<PathBuf> {
        Some(self.save.as_ref()?.join(label(run, seed)))
    }
}

/// The name of a run's folder, the same for every spelling of its recipe.
fn label(run: &Run, seed: u64) -> String {
    format!("{}-seed{seed}", run.recipe)
}

/// The checkpoint that a run goes on behind.
pub(super) struct Resumed {
    checkpoint: Checkpoint,
}

impl Resumed {
    /// That of `run`: its own in the folder of `--resume`, or the one that the folder is or holds.
    ///
    /// # Errors
    /// It is damaged, or of another model; it is of this recipe, and of a run with other options; checkpoints of another run lie where
    /// this one is to save.
    pub(super) fn find(
        config: &Config,
        run: &Run,
        corpus: &Corpus,
    ) -> Result<Option<Self>, UsageError> {
        let checkpoints = &config.checkpoints;
        let source = checkpoints.source(run, config.seed)?;
        checkpoints.check_save(run, config.seed, source.as_deref())?;
        let Some(folder) = source else {
            return Ok(None);
        };
        let checkpoint = Checkpoint::latest(&folder).map_err(told)?;
        let about = checkpoint.about();
        let now = config.about(run, corpus, [Value::Null, Value::Null])?;
        let recipe = about["recipe"].as_str().unwrap_or_default();
        let same_recipe = recipe
            .parse::<Variant>()
            .is_ok_and(|recipe| recipe == run.recipe);
        let strict: &[_] = if same_recipe { &OF_THE_RUN } else { &[] };
        for (key, option) in OF_THE_MODEL.iter().chain(strict) {
            let [saved, given] = [about, &now].map(|about| &about["config"][key]);
            // Groups of layers that have no amax are no difference.
            let matters = *key != "amax_groups" || has_tensor_scale(&run.recipe);
            if matters && saved != given {
                // Older programs grouped no layers of their own accord.
                let none = *key == "amax_groups" && saved.as_array().is_some_and(Vec::is_empty);
                let option = if none { "--amax-group none:" } else { *option };
                return Err(differs(checkpoint.folder(), option, saved, given));
            }
        }
        let [saved, given] = [about, &now].map(|about| &about["data"]);
        if same_recipe && saved != given {
            return Err(differs(checkpoint.folder(), "--data", saved, given));
        }
        let (step, last) = (checkpoint.step(), config.last_step());
        if step > last as u64 {
            let folder = checkpoint.folder().display();
            return Err(UsageError::new(format!(
                "--resume: {folder} is behind step {step}, and this run ends behind step {last}; give a larger --stop-after or --steps, \
                 or name an earlier checkpoint"
            )));
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

    /// What was said of the weights and the scales.
    pub(super) fn formats(&self) -> [&Value; 2] {
        let about = self.checkpoint.about();
        [&about["weights"], &about["scales"]]
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

/// Whether `folder` is a checkpoint, or the folder of those of one run.
fn is_one_run(folder: &Path) -> bool {
    is_checkpoint(folder) || folder.join("latest").is_file()
}

/// An error that the user can mend.
fn told(error: impl Display) -> UsageError {
    UsageError::new(error.to_string())
}

fn differs(folder: &Path, option: &str, saved: &Value, given: &Value) -> UsageError {
    UsageError::new(format!(
        "--resume: the run in {} was saved with {option} {saved}, and this one has {given}; give the same, or begin a new run",
        folder.display()
    ))
}

impl Config {
    /// What ranks must have been started with alike: options, and their values as text.
    ///
    /// # Errors
    /// A value that has no JSON form.
    pub(super) fn options(&self) -> Result<Vec<(String, String)>, UsageError> {
        let text = serde_json::to_string(&self.record()).map_err(told)?;
        let record: Map<String, Value> = serde_json::from_str(&text).map_err(told)?;
        let known = || OF_THE_MODEL.iter().chain(&OF_THE_RUN);
        let option = |key: &str| match known().find(|(known, _)| *known == key) {
            Some((_, option)) => (*option).to_owned(),
            None if key == "mesh" => "--world-size or --mesh".to_owned(),
            None => format!("--{}", key.replace('_', "-")),
        };
        let mut options: Vec<(String, String)> = record
            .iter()
            .map(|(key, value)| (option(key), value.to_string()))
            .collect();
        let runs: Vec<&str> = self.runs.iter().map(|run| run.name.as_str()).collect();
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let number = |number: Option<usize>| number.map(|number| number.to_string());
        let Checkpoints {
            save,
            every,
            keep,
            resume,
            stop_after,
        } = &self.checkpoints;
        let flag = |given: bool| given.then(|| "given".to_owned());
        let others = [
            ("--device", Some(self.device.kind().to_owned())),
            ("--no-audit", flag(!self.audit)),
            ("--no-cudnn", flag(!self.cudnn)),
            ("--agree-amaxes", flag(self.agree_amaxes)),
            ("--no-prefetch", flag(!self.prefetch)),
            ("--recipe or --compare", Some(runs.join(","))),
            ("--save", path(save)),
            ("--save-every", number(*every)),
            ("--keep", number(*keep)),
            ("--resume", path(resume)),
            ("--stop-after", number(*stop_after)),
        ];
        let text = |text: Option<String>| text.unwrap_or_else(|| "left out".to_owned());
        options.extend(others.map(|(option, value)| (option.to_owned(), text(value))));
        Ok(options)
    }

    /// What a checkpoint of `run` says of it, with what the model says of its weights.
    ///
    /// # Errors
    /// A value that has no JSON form.
    pub(super) fn about(
        &self,
        run: &Run,
        corpus: &Corpus,
        [weights, scales]: [Value; 2],
    ) -> Result<Value, UsageError> {
        // By way of text, so that f32 numbers are those that were given.
        let text = serde_json::to_string(&self.record()).map_err(told)?;
        let config: Value = serde_json::from_str(&text).map_err(told)?;
        Ok(json!({
            "recipe": run.name,
            "config": config,
            "data": corpus.digest(),
            "weights": weights,
            "scales": scales,
            "version": env!("CARGO_PKG_VERSION"),
            "transformers": self.model.transformers(),
        }))
    }

    /// The step that runs end behind.
    pub(super) fn last_step(&self) -> usize {
        self.checkpoints.last_step(self.steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    /// A new option is compared at resume, or it changes no bit of what a rank trains.
    #[test]
    fn every_option_is_compared_or_free() {
        const FREE: [&str; 6] = [
            "recompute",
            "seeds",
            "mesh",
            "sharding",
            "reshard_after_forward",
            "eval_batches",
        ];
        let Command { args } = Command::parse_from(["train"]);
        let config = Config::new(&args, None).expect("a configuration");
        let record = serde_json::to_value(config.record()).expect("JSON");
        let known = OF_THE_MODEL.iter().chain(&OF_THE_RUN).map(|(key, _)| *key);
        let known: Vec<&str> = known.chain(FREE).collect();
        for key in record.as_object().expect("keys").keys() {
            let times = known.iter().filter(|known| *known == key).count();
            assert_eq!(times, 1, "{key}");
        }
        assert_eq!(
            record.as_object().map(serde_json::Map::len),
            Some(known.len())
        );
    }
}

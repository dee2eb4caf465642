//! [`Checkpoints`]: where checkpoints of runs go, when they are saved, and which one a run resumes from.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use lowp_checkpoint::{Block, Checkpoint, CheckpointError, check_writable, is_checkpoint, steps};
use lowp_format::has_tensor_scale;
use lowp_format::spelling::Variant;
use lowp_fsdp::SavedModel;
use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::error::{TrainError, within_steps};
use crate::forms::{left_out, written};
use crate::network::Model;
use crate::result::Evaluation;
use crate::run::Run;

/// The losses on the validation split, in what a checkpoint says of its run.
pub(crate) const EVALUATIONS: &str = "evaluations";

/// The tensor of the losses of all steps.
pub(crate) const LOSSES: &str = "train.losses";

/// The field of [`Config`] that must be the same for states to go on, whatever the recipe.
const OPTIMIZER: &str = "optimizer";

/// The fields of [`Config`] that must be the same for a run to resume, after those of the model and the optimizer.
const OF_THE_RUN: [&str; 19] = [
    "accumulate",
    "reduce_every_micro_batch",
    "grad_wire",
    "seed",
    "batch",
    "steps",
    "lr",
    "var_lr",
    "warmup",
    "schedule",
    "final_lr",
    "beta2",
    "weight_decay",
    "no_decay",
    "clip",
    "z_loss",
    "tail_steps",
    "kept_in_bf16",
    "amax_groups",
];

/// What a run saves, and what it resumes from; the default is nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoints {
    /// The folder that each run has one of its own in, `NAME-seedN`, with its checkpoints.
    pub save: Option<PathBuf>,
    /// Also save after every so many steps, not only after the last.
    pub save_every: Option<usize>,
    /// Keep so many checkpoints of a run, the latest ones, instead of all.
    pub keep: Option<usize>,
    /// Resume from the latest checkpoint of this run here: a folder that was `save`, or a checkpoint.
    pub resume: Option<PathBuf>,
    /// Skip damaged checkpoints when resuming: the newest undamaged one is used. Ranks read all of its files to know.
    pub newest_whole: bool,
    /// End after this step; the schedule stays that of all steps.
    pub stop_after: Option<usize>,
}

impl Checkpoints {
    /// Saves to `folder` after the last step, and resumes from what was saved there before.
    pub fn in_folder(folder: &Path) -> Self {
        Self {
            save: Some(folder.to_owned()),
            resume: Some(folder.to_owned()),
            ..Self::default()
        }
    }

    /// The same, for runs that end after step `last`.
    #[must_use]
    pub fn stop_after(self, last: usize) -> Self {
        Self {
            stop_after: Some(last),
            ..self
        }
    }

    /// For runs that a launcher restarts: such a run resumes from the newest whole checkpoint in `save`, or starts at step 0.
    #[must_use]
    pub fn resume_newest(self) -> Self {
        Self {
            resume: self.save.clone(),
            newest_whole: true,
            ..self
        }
    }

    /// Checks the numbers, of runs with `steps` steps.
    ///
    /// # Errors
    /// Numbers that make no sense.
    pub fn check(&self, steps: usize) -> Result<(), TrainError> {
        within_steps("save_every", self.save_every, steps)?;
        within_steps("stop_after", self.stop_after, steps)?;
        match self.keep {
            Some(0) => Err(TrainError::KeepsNone),
            _ => Ok(()),
        }
    }

    /// The step that a run ends after, of `steps` steps.
    pub(crate) fn last_step(&self, steps: usize) -> usize {
        self.stop_after.unwrap_or(steps).min(steps)
    }

    /// Whether a checkpoint is saved when `done` steps are done of those up to `last`.
    pub(crate) fn saves_at(&self, done: usize, last: usize) -> bool {
        let regular = self
            .save_every
            .is_some_and(|every| done.is_multiple_of(every));
        regular || done == last
    }

    /// The folder that `run` resumes from; `None` if it starts at step 0.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn source(&self, run: &Run, seed: u64) -> Result<Option<PathBuf>, TrainError> {
        let Some(folder) = &self.resume else {
            return match self.newest_whole {
                true => Err(TrainError::NothingToResume),
                false => Ok(None),
            };
        };
        if !self.newest_whole && is_one_run(folder) {
            return Ok(Some(folder.clone()));
        }
        let own = folder.join(label(run, seed));
        let any = is_one_run(&own) || !steps(&own).map_err(unreadable)?.is_empty();
        Ok(any.then_some(own))
    }

    /// Checks that one of `runs` with one of these seeds has something in `resume`.
    ///
    /// # Errors
    /// None has, or a folder cannot be read.
    pub fn check_source(&self, runs: &[Run], seeds: RangeInclusive<u64>) -> Result<(), TrainError> {
        let first = *seeds.start();
        for seed in seeds {
            for run in runs {
                if self.source(run, seed)?.is_some() {
                    return Ok(());
                }
            }
        }
        Err(TrainError::NoneOfRuns {
            resume: self.resume.clone().unwrap_or_default(),
            runs: runs.iter().map(|run| label(run, first)).collect(),
        })
    }

    /// Whether `resume` is one checkpoint, or has those of one run.
    pub fn resumes_one_run(&self) -> bool {
        self.resume.as_deref().is_some_and(is_one_run)
    }

    /// The folder of the checkpoints of a run.
    pub fn folder_of(&self, run: &Run, seed: u64) -> Option<PathBuf> {
        Some(self.save.as_ref()?.join(label(run, seed)))
    }

    /// Whether `run` resumes from a checkpoint of the folder where it saves.
    pub fn resumes_where_it_saves(&self, run: &Run, seed: u64) -> bool {
        let place = |path: Option<PathBuf>| path.and_then(|path| path.canonicalize().ok());
        let [source, folder] = [
            self.source(run, seed).ok().flatten(),
            self.folder_of(run, seed),
        ];
        match (place(source), place(folder)) {
            (Some(source), Some(folder)) => source == folder || source.parent() == Some(&*folder),
            _ => false,
        }
    }

    /// Checks that a run can save.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn check_writable(&self, run: &Run, seed: u64) -> Result<(), TrainError> {
        match self.folder_of(run, seed) {
            Some(folder) => check_writable(&folder).map_err(|why| self.cannot_save(why)),
            None => Ok(()),
        }
    }

    pub(crate) fn cannot_save(&self, why: CheckpointError) -> TrainError {
        let save = self.save.clone().unwrap_or_default();
        let why = Box::new(why);
        TrainError::CannotSave { save, why }
    }

    /// Checks that a run which goes on from `source` does not save among the checkpoints of another one.
    fn check_save(&self, run: &Run, seed: u64, source: Option<&Path>) -> Result<(), TrainError> {
        let (Some(save), Some(folder)) = (&self.save, self.folder_of(run, seed)) else {
            return Ok(());
        };
        let there = steps(&folder).map_err(unreadable)?;
        let Some(&last) = there.last() else {
            return Ok(());
        };
        let same = |source: &Path| match (source.canonicalize(), folder.canonicalize()) {
            (Ok(source), Ok(folder)) => source.starts_with(folder),
            _ => false,
        };
        if source.is_some_and(same) {
            return Ok(());
        }
        Err(TrainError::EarlierRun {
            save: save.clone(),
            folder,
            last,
        })
    }
}

impl Checkpoints {
    /// Checks that a run which goes on from one checkpoint, `resumed` of `step`, does not replace those that follow it.
    fn check_later(
        &self,
        run: &Run,
        seed: u64,
        resumed: &Path,
        step: u64,
    ) -> Result<(), TrainError> {
        if !self.resumes_where_it_saves(run, seed) {
            return Ok(());
        }
        let Some((save, folder)) = self.save.clone().zip(self.folder_of(run, seed)) else {
            return Ok(());
        };
        match steps(&folder).map_err(unreadable)?.last() {
            Some(&last) if last > step => Err(TrainError::LaterCheckpoints {
                save,
                folder,
                resumed: resumed.to_owned(),
                last,
            }),
            _ => Ok(()),
        }
    }
}

/// Checkpoints that cannot be read, found before the run.
pub(crate) fn unreadable(why: CheckpointError) -> TrainError {
    TrainError::Resume(Box::new(why))
}

/// The name of a run's folder, the same for every spelling of its recipe.
pub(crate) fn label(run: &Run, seed: u64) -> String {
    format!("{}-seed{seed}", run.recipe)
}

/// Whether `folder` is a checkpoint, or the folder of those of one run.
fn is_one_run(folder: &Path) -> bool {
    is_checkpoint(folder) || folder.join("latest").is_file()
}

/// Where a run resumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResumedAt {
    /// Steps that are done.
    pub step: usize,
    /// Whether these were in another recipe.
    pub other_recipe: bool,
}

/// The checkpoint that a run resumes from.
pub(crate) struct Resumed {
    checkpoint: Checkpoint,
    damaged: Vec<CheckpointError>,
}

impl Resumed {
    /// The checkpoint that `run` resumes from: that of `folder/NAME-seedN` if it exists, else that of `folder` itself; with `newest_whole`,
    /// the newest before step `before`.
    pub(crate) fn find<M: Model>(
        config: &Config<M>,
        checkpoints: &Checkpoints,
        run: &Run,
        digest: &str,
        before: u64,
    ) -> Result<Option<Self>, TrainError> {
        let source = checkpoints.source(run, config.seed)?;
        checkpoints.check_save(run, config.seed, source.as_deref())?;
        let Some(folder) = source else {
            return Ok(None);
        };
        let found = match checkpoints.newest_whole {
            true => Checkpoint::newest_whole(&folder, before),
            false => Checkpoint::latest(&folder).and_then(|checkpoint| {
                checkpoint.check_files()?;
                Ok((checkpoint, Vec::new()))
            }),
        };
        let earlier = || Checkpoint::newest_whole(&folder, before).ok();
        let (checkpoint, damaged) =
            found.map_err(|why| match why.is_damage().then(earlier).flatten() {
                Some((earlier, _)) => TrainError::LatestDamaged {
                    why: Box::new(why),
                    step: earlier.step(),
                },
                None => unreadable(why),
            })?;
        let about = checkpoint.about();
        let now = about_run(config, run, digest, Value::Null, Value::Null)?;
        let same_recipe = same_recipe(about, run);
        if let Some(Difference { field, saved, now }) =
            difference(about, &now, config, run, same_recipe)?
        {
            return Err(TrainError::Differs {
                folder: checkpoint.folder().to_owned(),
                // Older programs grouped no layers of their own accord.
                left_out: field == "amax_groups" && saved.as_array().is_some_and(Vec::is_empty),
                field,
                saved: saved.to_string(),
                given: now.to_string(),
            });
        }
        let (step, last) = (checkpoint.step(), checkpoints.last_step(config.steps));
        if step > last as u64 {
            let folder = checkpoint.folder().to_owned();
            return Err(TrainError::BehindTheEnd { folder, step, last });
        }
        if is_checkpoint(&folder) && step < last as u64 {
            checkpoints.check_later(run, config.seed, checkpoint.folder(), step)?;
        }
        Ok(Some(Self {
            checkpoint,
            damaged,
        }))
    }

    /// The checkpoint of `step` of the run, which another rank found.
    pub(crate) fn of_step(
        checkpoints: &Checkpoints,
        run: &Run,
        seed: u64,
        step: u64,
    ) -> Result<Self, TrainError> {
        let folder = checkpoints
            .source(run, seed)?
            .or(checkpoints.resume.clone());
        let checkpoint = Checkpoint::of_step(&folder.unwrap_or_default(), step);
        Ok(Self {
            checkpoint: checkpoint.map_err(unreadable)?,
            damaged: Vec::new(),
        })
    }

    /// Newer checkpoints that are damaged, and how.
    pub(crate) fn damaged(&self) -> &[CheckpointError] {
        &self.damaged
    }

    /// The steps that are done.
    pub(crate) fn step(&self) -> usize {
        // At most the number of steps.
        usize::try_from(self.checkpoint.step()).unwrap_or(usize::MAX)
    }

    /// Where `run` resumes by it.
    pub(crate) fn at(&self, run: &Run) -> ResumedAt {
        ResumedAt {
            step: self.step(),
            other_recipe: !same_recipe(self.checkpoint.about(), run),
        }
    }

    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The model in the checkpoint.
    pub(crate) fn saved(&self) -> SavedModel<'_> {
        let about = self.checkpoint.about();
        SavedModel {
            checkpoint: &self.checkpoint,
            weights: &about["weights"],
            scales: &about["scales"],
        }
    }

    /// The losses of `run` on the validation split so far. Those of another recipe or of other batches are left out.
    pub(crate) fn evaluations<M>(
        &self,
        config: &Config<M>,
        run: &Run,
    ) -> Result<Vec<Evaluation>, TrainError> {
        let about = self.checkpoint.about();
        let batches = about["config"]["eval_batches"].as_u64();
        let same = same_recipe(about, run) && batches == Some(config.eval_batches as u64);
        let saved = about[EVALUATIONS].as_array().filter(|_| same);
        let evaluation = |saved: &Value| {
            Ok(Evaluation {
                step: serde_json::from_value(saved["step"].clone())?,
                // JSON has no numbers that are not finite.
                loss: saved["loss"].as_f64().unwrap_or(f64::NAN),
            })
        };
        saved.into_iter().flatten().map(evaluation).collect()
    }

    /// The losses of the steps that are done.
    pub(crate) fn losses(&self) -> Result<Vec<f32>, TrainError> {
        let shape = [1, self.step()];
        Ok(self
            .checkpoint
            .read_f32(LOSSES, shape, Block::whole(shape))?)
    }
}

/// Whether `about` is of a run in the recipe of `run`.
fn same_recipe(about: &Value, run: &Run) -> bool {
    let recipe = about["recipe"].as_str().unwrap_or_default();
    recipe
        .parse::<Variant>()
        .is_ok_and(|recipe| recipe == run.recipe)
}

/// Whether two descriptions by [`about_run`] are of one run: the same steps of the same numbers.
pub(crate) fn same_run<M: Model>(
    saved: &Value,
    now: &Value,
    config: &Config<M>,
    run: &Run,
) -> Result<bool, TrainError> {
    Ok(same_recipe(saved, run) && difference(saved, now, config, run, true)?.is_none())
}

/// A field with two values.
struct Difference {
    field: String,
    saved: Value,
    now: Value,
}

/// A field of the configuration in a description by [`about_run`]; where an older program left it out, its value then.
fn field(about: &Value, name: &str) -> Result<Value, TrainError> {
    match (&about["config"][name], left_out(name)) {
        (Value::Null, Some(default)) => written(&default),
        (value, _) => Ok(value.clone()),
    }
}

/// The first field by which a run cannot be resumed, of two descriptions by [`about_run`]: those of the model, the optimizer, and `all`.
fn difference<M: Model>(
    saved: &Value,
    now: &Value,
    config: &Config<M>,
    run: &Run,
    all: bool,
) -> Result<Option<Difference>, TrainError> {
    let strict: &[_] = if all { &OF_THE_RUN } else { &[] };
    let model = written(&config.model)?;
    let of_the_model = model.as_object().into_iter().flat_map(Map::keys);
    let fields = of_the_model
        .map(String::as_str)
        .chain([OPTIMIZER])
        .chain(strict.iter().copied());
    let pairs = fields.map(|name| Ok((name, field(saved, name)?, field(now, name)?)));
    let mut pairs = pairs.collect::<Result<Vec<_>, TrainError>>()?;
    pairs.extend(all.then(|| ("data", saved["data"].clone(), now["data"].clone())));
    let matters = |field: &str| match field {
        // Groups of layers that have no amax are no difference.
        "amax_groups" => has_tensor_scale(&run.recipe),
        "reduce_every_micro_batch" => config.accumulate > 1,
        _ => true,
    };
    let differs = |(field, saved, now): &(&str, Value, Value)| matters(field) && saved != now;
    let found = pairs.into_iter().find(differs);
    Ok(found.map(|(field, saved, now)| Difference {
        field: field.to_owned(),
        saved,
        now,
    }))
}

/// What a checkpoint says of a run, with what the model says of its weights and scales.
pub(crate) fn about_run<M: Model>(
    config: &Config<M>,
    run: &Run,
    digest: &str,
    weights: Value,
    scales: Value,
) -> Result<Value, TrainError> {
    // Any name of a run is possible, and only a spelling says its recipe.
    let recipe = match run.name.parse::<Variant>() {
        Ok(recipe) if recipe == run.recipe => run.name.clone(),
        _ => run.recipe.to_string(),
    };
    Ok(json!({
        "recipe": recipe,
        "config": written(config)?,
        "data": digest,
        "weights": weights,
        "scales": scales,
        "version": env!("CARGO_PKG_VERSION"),
        "transformers": config.model.transformers(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Optimizer;
    use lowp_optim::Decay;
    use lowp_transformer::GptConfig;

    /// Older programs left out what was the default.
    #[test]
    fn a_number_that_was_left_out_is_the_default() {
        let config = written(&Config::new(GptConfig::default())).expect("JSON");
        let (now, before) = (json!({ "config": config }), json!({ "config": {} }));
        for name in ["beta2", "var_lr"] {
            assert!(now["config"][name].is_number(), "{name}");
            let of = |about: &Value| field(about, name).expect("JSON");
            assert_eq!(of(&now), of(&before), "{name}");
        }
    }

    /// A new field is compared where a run goes on, or it changes no bit of what a rank trains.
    #[test]
    fn every_field_is_compared_or_free() {
        const FREE: [&str; 8] = [
            "recompute",
            "offload_optimizer",
            "seeds",
            "mesh",
            "sharding",
            "reshard_after_forward",
            "eval_batches",
            "eval_every",
        ];
        let config = Config {
            schedule: Decay::Linear,
            no_decay: vec!["tokens".to_owned()],
            optimizer: Optimizer::Lion,
            beta2: 0.999,
            var_lr: 0.01,
            z_loss: 1e-4,
            eval_every: Some(1),
            reduce_every_micro_batch: true,
            offload_optimizer: true,
            ..Config::new(GptConfig::default())
        };
        let [all, model] = [written(&config), written(&config.model)].map(|json| {
            let json = json.expect("JSON");
            let keys = json.as_object().expect("fields").keys();
            keys.cloned().collect::<Vec<_>>()
        });
        let known = model
            .iter()
            .map(String::as_str)
            .chain([OPTIMIZER])
            .chain(OF_THE_RUN);
        let mut known: Vec<&str> = known.chain(FREE).collect();
        known.sort_unstable();
        assert_eq!(all, known);
    }
}

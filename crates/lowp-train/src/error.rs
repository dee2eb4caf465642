//! [`TrainError`]: what can be wrong with a configuration, its data and checkpoints, or a run.

use std::borrow::Cow;
use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;

use lowp_checkpoint::CheckpointError;
use lowp_comm::CommError;
use lowp_format::{Code, FormatError};
use lowp_fsdp::ModelError;
use lowp_optim::{StateDtypes, StateDtypesError};
use thiserror::Error;

use crate::optimizer::Optimizer;

/// What is wrong. Messages name fields of [`Config`](crate::Config) and [`Checkpoints`](crate::Checkpoints) in backticks, so that a
/// program may put its own names there.
#[derive(Debug, Error)]
pub enum TrainError {
    /// A count out of its range.
    #[error("`{field}` must be from 1 to {most}, not {value}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The largest that is possible.
        most: usize,
    },
    /// A number that the optimizer cannot take.
    #[error(
        "`{field}` {value:?}: expected {} in the range of f32",
        if *zero { "0 or a positive number" } else { "a positive number" }
    )]
    Number {
        /// The field.
        field: &'static str,
        /// Its value.
        value: f64,
        /// Whether 0 is possible.
        zero: bool,
    },
    /// A mesh without ranks, or with too many.
    #[error(
        "`mesh` {replicate}x{shard}: both numbers must be at least 1, and their product at most {most}"
    )]
    Mesh {
        /// Replicas.
        replicate: usize,
        /// Shards of each.
        shard: usize,
        /// Most ranks.
        most: usize,
    },
    /// The log folder already has the log of another run.
    #[error(
        "{} has the log of an earlier run; give another folder, or resume that run", folder.display()
    )]
    EarlierLog {
        /// The folder.
        folder: PathBuf,
    },
    /// The log of a run that has saved a checkpoint, and there is none to resume from.
    #[error(
        "{} has the log of this run, whose checkpoint of step {saved} was saved, but {} has none of it; make sure that \
         this folder is the right one and its file system is mounted, or remove the log to start at step 0", folder.display(), resume.display()
    )]
    NoCheckpointOfLog {
        /// The folder of the log.
        folder: PathBuf,
        /// The step of the last checkpoint that was saved.
        saved: u64,
        /// Where there is none.
        resume: PathBuf,
    },
    /// A folder in which the log of a run cannot be.
    #[error("the log folder cannot be used: {why}")]
    LogFolder {
        /// The folder.
        folder: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The log of a run.
    #[error("cannot write the log of a run to {}: {why}", folder.display())]
    Log {
        /// Its folder.
        folder: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A model that the JSON of its configuration cannot say.
    #[error("the model {0}")]
    ModelForm(String),
    /// The name of a linear layer that the model does not have, or that stands there twice.
    #[error("`{field}`: '{name}' {why}")]
    LayerName {
        /// The field.
        field: &'static str,
        /// The name.
        name: String,
        /// What is wrong.
        why: &'static str,
    },
    /// Ranks without a sequence.
    #[error(
        "`batch` {batch} over {ranks} ranks: every rank needs at least one sequence; choose `batch` {ranks} or more, or fewer ranks"
    )]
    FewSequences {
        /// Sequences of a batch.
        batch: usize,
        /// Ranks.
        ranks: usize,
    },
    /// Micro-batches without a sequence.
    #[error(
        "`batch` {batch} over {ranks} ranks is not {accumulate} micro-batches of at least one sequence each; choose `batch` {} or more, or \
         `accumulate` {} or less", ranks * accumulate, batch / ranks
    )]
    ManyMicroBatches {
        /// Sequences of a batch.
        batch: usize,
        /// Ranks.
        ranks: usize,
        /// Micro-batches of a step.
        accumulate: usize,
    },
    /// A warm-up that never ends.
    #[error(
        "`warmup` {warmup} is longer than the {steps} steps: the learning rate would never be reached"
    )]
    LongWarmup {
        /// Its steps.
        warmup: u64,
        /// All steps.
        steps: usize,
    },
    /// A precision tail of more steps than there are.
    #[error("`tail_steps` {tail_steps} is more than the {steps} steps; choose {steps} or fewer")]
    LongTail {
        /// Its steps.
        tail_steps: usize,
        /// All steps.
        steps: usize,
    },
    /// A decay of the learning rate over more steps than there are.
    #[error(
        "`decay_steps` {decay_steps}{} is more than the {steps} steps; choose {} or fewer{}",
        if *warmup > 0 { format!(" after `warmup` {warmup}") } else { String::new() },
        *steps as u64 - warmup,
        if *warmup > 0 { ", or a shorter `warmup`" } else { "" }
    )]
    LongDecay {
        /// Its steps.
        decay_steps: u64,
        /// The steps of the warm-up.
        warmup: u64,
        /// All steps.
        steps: usize,
    },
    /// A second moment that would not fall.
    #[error("`beta2` {beta2:?} is not below 1: no gradient would be forgotten")]
    Beta2 {
        /// The decay.
        beta2: f32,
    },
    /// A state that the optimizer does not have.
    #[error(
        "`optimizer_state` {state}: {cause}{}",
        if optimizer.rule().is_of_matrices() {
            format!("; adamw updates embeddings, heads, norms and biases next to `optimizer` {}, whose own state stays in f32", optimizer.name())
        } else {
            String::new()
        }
    )]
    State {
        /// The dtypes of states.
        state: StateDtypes,
        /// The optimizer.
        optimizer: Optimizer,
        /// What is wrong.
        cause: StateDtypesError,
    },
    /// A learning rate that would rise after warm-up.
    #[error("`final_lr` {final_lr:?} is above 1: the rate falls after warm-up")]
    RisingRate {
        /// The fraction.
        final_lr: f32,
    },
    /// Seeds that no number counts.
    #[error("`seed` {seed} with `seeds` {seeds}: the last seed is beyond 64 bits")]
    Seeds {
        /// The first.
        seed: u64,
        /// How many.
        seeds: usize,
    },
    /// Weights in E5M2.
    #[error(
        "{name}: E5M2 weights lose a mantissa bit for range that they do not need; use +hybrid for E5M2 gradients"
    )]
    WeightsInE5m2 {
        /// The run.
        name: String,
    },
    /// A scale that would be known only after its cast.
    #[error(
        "{name}: weights that are exact in only one product cannot have a delayed scale; leave them exact in both products, or use a recipe whose \
         scales follow from the values"
    )]
    LateCast {
        /// The run.
        name: String,
    },
    /// A scale of elements that need none.
    #[error(
        "{name}: {code} elements have no scale; use this modifier with a recipe below 16 bits (`lowp recipes` lists them)"
    )]
    ScaledWide {
        /// The run.
        name: String,
        /// The elements.
        code: Code,
    },
    /// Flat shards of blocks that must be whole.
    #[error(
        "{name}: `sharding` zero1 cuts weights inside blocks, but four over six compares the errors of whole blocks; choose `sharding` \
         fsdp, or leave four over six out"
    )]
    CutBlocks {
        /// The run.
        name: String,
    },
    /// A z-loss that the network would leave out, or add.
    #[error(
        "`z_loss` is {config}, and the network trains with {applied}; make it with the same coefficient (`with_z_loss`)"
    )]
    ZLoss {
        /// Of the configuration.
        config: f32,
        /// Of the network.
        applied: f32,
    },
    /// Nothing to resume from.
    #[error(
        "`newest_whole` without a folder in `resume`: call `resume_newest` after setting `save`"
    )]
    NothingToResume,
    /// A folder to resume from that has checkpoints of none of the runs.
    #[error(
        "`resume` {}: there are no checkpoints of {}; give a folder of `save`, or one checkpoint", resume.display(), runs.join(" or ")
    )]
    NoneOfRuns {
        /// The folder.
        resume: PathBuf,
        /// The folders of the runs with the first seed.
        runs: Vec<String>,
    },
    /// A number of steps in [`Checkpoints`](crate::Checkpoints) that the schedule does not have.
    #[error("`{field}` must be from 1 to {steps}, the number of steps, not {value}")]
    OutsideOfSteps {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// All steps.
        steps: usize,
    },
    /// No checkpoint would be left.
    #[error("`keep` must be at least 1")]
    KeepsNone,
    /// A folder that cannot be written.
    #[error("`save` {}: {why}", save.display())]
    CannotSave {
        /// The folder.
        save: PathBuf,
        /// Why.
        why: Box<CheckpointError>,
    },
    /// Checkpoints of another run where this one would save.
    #[error(
        "`save` {save}: {folder} has checkpoints of an earlier run, up to step {last}; resume from them with `resume` {save}, or give \
         another folder", save = save.display(), folder = folder.display()
    )]
    EarlierRun {
        /// The folder to save to.
        save: PathBuf,
        /// The folder of this run in it.
        folder: PathBuf,
        /// The last step there.
        last: u64,
    },
    /// Checkpoints after the one that is resumed from, where this run would save its own.
    #[error(
        "`resume` {resumed}: {folder} has later checkpoints, up to step {last}, which would mix with those of this run; resume from the last \
         with `resume` {save}, or give another folder to `save`", resumed = resumed.display(), folder = folder.display(), save = save.display()
    )]
    LaterCheckpoints {
        /// The folder to save to.
        save: PathBuf,
        /// The folder of this run in it.
        folder: PathBuf,
        /// The checkpoint that is resumed from.
        resumed: PathBuf,
        /// The last step there.
        last: u64,
    },
    /// A checkpoint of a run with another configuration.
    #[error(
        "`resume`: the run in {} was saved with `{field}`{} {}, and this run has {}; give the same value, or start a new run",
        folder.display(), if *left_out { " none:" } else { "" }, shown_value(field, saved), shown_value(field, given)
    )]
    Differs {
        /// The checkpoint.
        folder: PathBuf,
        /// The first field that differs.
        field: String,
        /// Its value there, as JSON.
        saved: String,
        /// Its value here.
        given: String,
        /// Whether it is a list that was left empty there.
        left_out: bool,
    },
    /// A checkpoint later than the end of this run.
    #[error(
        "`resume`: the checkpoint {} is of step {step}, and this run ends after step {last}; give a larger `stop_after` or `steps`, or an \
         earlier checkpoint", folder.display()
    )]
    BehindTheEnd {
        /// The checkpoint.
        folder: PathBuf,
        /// Its step.
        step: u64,
        /// The last step of this run.
        last: usize,
    },
    /// Checkpoints to resume from cannot be read.
    #[error("{0}")]
    Resume(Box<CheckpointError>),
    /// The latest checkpoint is damaged or missing, and an earlier one is whole.
    #[error(
        "{why}; or resume from step {step}, the newest whole checkpoint there: with `newest_whole` and the `save` that the run had"
    )]
    LatestDamaged {
        /// What is wrong.
        why: Box<CheckpointError>,
        /// The step of the one that is whole.
        step: u64,
    },
    /// Data that cannot be read, or not be trained on.
    #[error("{0}")]
    Data(String),
    /// Data that cannot be read any more, in a run that read it before.
    #[error("{0}")]
    DataOfRun(String),
    /// Weights that are not those of the network.
    #[error("{0}")]
    Pretrained(String),
    /// A recipe that is none, or that does not fit.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Something has no JSON form.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// Training diverged.
    #[error(
        "{recipe}, seed {seed}: the {what} is not finite: training diverged; choose a smaller `lr` (or `var_lr`, with muon and moonlight) or `weight_decay`, or a longer `warmup`"
    )]
    Diverged {
        /// The run.
        recipe: String,
        /// Its seed.
        seed: u64,
        /// Which loss.
        what: String,
    },
    /// No step was applied.
    #[error(
        "{recipe}, seed {seed}: nothing was trained, since the gradients of all {steps} steps were not finite and every step was skipped; \
         choose a smaller `z_loss`, another recipe, or `grad_wire` f32 where it is bf16"
    )]
    NothingTrained {
        /// The run.
        recipe: String,
        /// Its seed.
        seed: u64,
        /// Its steps.
        steps: usize,
    },
    /// The bytes that were sent are not those of the plans.
    #[error(
        "{recipe}, seed {seed}: the ranks sent {counted} bytes of weights per step and their gather plans say {formula}; this is a defect \
         in lowp: please report it"
    )]
    Bytes {
        /// The run.
        recipe: String,
        /// Its seed.
        seed: u64,
        /// As counted.
        counted: u64,
        /// By the plans.
        formula: u64,
    },
    /// Steps that sent unequal amounts.
    #[error("{recipe}: {sent} bytes in {steps} steps: the steps sent unequal amounts")]
    UnequalSteps {
        /// The run.
        recipe: String,
        /// Bytes of all steps.
        sent: u64,
        /// Steps.
        steps: u64,
    },
    /// A gathered weight is not the cast of its masters.
    #[error("{layer}, as {phase} gathers it: {why}; this is a defect in lowp: please report it")]
    Audit {
        /// The layer.
        layer: String,
        /// Forward or backward.
        phase: &'static str,
        /// How it differs.
        why: String,
    },
    /// What training left on another rank cannot be read.
    #[error(transparent)]
    Outcome(#[from] postcard::Error),
    /// The network failed.
    #[error(transparent)]
    Network(#[from] Box<dyn Error + Send + Sync>),
    /// The sharded model failed.
    #[error(transparent)]
    Model(Box<ModelError>),
    /// A checkpoint could not be written, or is damaged.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl TrainError {
    /// Whether the configuration, the data or the checkpoints must change, which is found before any work begins.
    pub fn is_input(&self) -> bool {
        !matches!(
            self,
            Self::DataOfRun(_)
                | Self::Diverged { .. }
                | Self::NothingTrained { .. }
                | Self::Bytes { .. }
                | Self::UnequalSteps { .. }
                | Self::Audit { .. }
                | Self::Log { .. }
                | Self::Outcome(_)
                | Self::Network(_)
                | Self::Model(_)
                | Self::Checkpoint(_)
                | Self::Comm(_)
        )
    }

    /// The error of a run that has begun.
    pub(crate) fn of_run(self) -> Self {
        match self {
            Self::Data(why) => Self::DataOfRun(why),
            other => other,
        }
    }

    /// Whether another rank has the error that ends the run, and all ranks know of it.
    pub(crate) fn is_of_other_rank(&self) -> bool {
        let (Self::Resume(why) | Self::CannotSave { why, .. }) = self else {
            return false;
        };
        matches!(**why, CheckpointError::OtherRank { .. })
    }

    /// The message with those of its causes, on one line.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            let _ = write!(text, ": {error}");
            cause = error.source();
        }
        text
    }
}

/// The value of a field as messages show it, from its JSON; `null` where a default was left out.
pub fn shown_value<'a>(field: &str, value: &'a str) -> Cow<'a, str> {
    if field == "schedule" && value.parse::<u64>().is_ok() {
        return format!("wsd with {value} decay steps").into();
    }
    let text = match (field, value) {
        ("optimizer", "null") => "\"adamw\"",
        ("z_loss", "null") => "0",
        ("reduce_every_micro_batch", "null") => "false",
        ("schedule", "null") => "cosine",
        ("no_decay", "null") => "[]",
        ("optimizer_state", "null") => "\"f32\"",
        _ => value,
    };
    text.into()
}

/// Checks a number of steps of a run of so many `steps`, where it is given.
pub(crate) fn within_steps(
    field: &'static str,
    value: Option<usize>,
    steps: usize,
) -> Result<(), TrainError> {
    match value.filter(|value| !(1..=steps).contains(value)) {
        Some(value) => Err(TrainError::OutsideOfSteps {
            field,
            value,
            steps,
        }),
        None => Ok(()),
    }
}

impl From<ModelError> for TrainError {
    fn from(error: ModelError) -> Self {
        Self::Model(Box::new(error))
    }
}

impl From<CheckpointError> for TrainError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Launchers start a run again whose data come back.
    #[test]
    fn data_that_a_run_loses_are_no_error_of_the_input() {
        let lost = || TrainError::Data("cannot read data.npy".to_owned());
        assert!(lost().is_input());
        assert!(!lost().of_run().is_input());
        assert_eq!(lost().of_run().to_string(), lost().to_string());
    }

    #[test]
    fn values_are_shown_as_they_are_given() {
        for (field, json, shown) in [
            ("schedule", "2", "wsd with 2 decay steps"),
            ("schedule", "\"linear\"", "\"linear\""),
            ("schedule", "null", "cosine"),
            ("optimizer", "null", "\"adamw\""),
            ("steps", "2", "2"),
        ] {
            assert_eq!(shown_value(field, json), shown);
        }
    }
}

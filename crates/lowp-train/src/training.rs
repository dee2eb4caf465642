//! [`Training`]: one run of a configuration, on the ranks of a world.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread;

use serde_json::Value;

use crate::checkpoints::{Checkpoints, Resumed, ResumedAt, about_run, label, same_run};
use crate::codes::LayerCodes;
use crate::config::Config;
use crate::data::Data;
use crate::error::TrainError;
use crate::log::{Earlier, RunLog};
use crate::metrics::Metrics;
use crate::network::{Model, Profile};
use crate::pretrained::Pretrained;
use crate::result::Evaluation;
use crate::run::Run;

/// What happens in a run, as rank 0 sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// The model is about to be made, after this checkpoint; `None` at step 0.
    Begun(Option<ResumedAt>),
    /// A step is done.
    Step {
        /// What is known of the step.
        metrics: &'a Metrics,
        /// The rate so far, over all ranks.
        tokens_per_second: f64,
        /// Of the network's products, as its model counts them.
        flops_per_second: f64,
    },
    /// The validation split was evaluated.
    Evaluation(Evaluation),
    /// The checkpoint after so many steps is there.
    Saved(usize),
    /// The codes of the weights after a step were counted.
    Codes {
        /// Steps that are done.
        step: usize,
        /// Layers whose weights are in codes below 16 bits.
        layers: &'a [LayerCodes<'a>],
    },
    /// The checkpoint to resume from has linear weights in other formats, or of wider masters; they were cast from their masters.
    Recast {
        /// How many.
        layers: usize,
        /// Linear layers in all.
        all: usize,
    },
    /// The checkpoint to resume from has masters or states in wider dtypes than the run, to which they were rounded.
    Rounded {
        /// How many tensors.
        states: usize,
    },
    /// How a checkpoint that is newer than the one to resume from is damaged ([`Checkpoints::newest_whole`]).
    Damaged(&'a str),
    /// The step of the newest whole checkpoint, which the run resumes from since newer ones are damaged.
    Earlier(usize),
    /// Why an old checkpoint is still there, which was to be removed. The next run that saves there removes it.
    NotRemoved(&'a str),
    /// What a device spent the last step on.
    Profile(&'a Profile),
}

impl Event<'_> {
    /// What a user should know of it, if it is nothing that happens in every run. Fields of the configuration stand in backticks.
    pub fn note(&self) -> Option<String> {
        Some(match self {
            Self::Recast { layers, all } => format!(
                "{layers} of {all} linear weights are cast from their masters, since the checkpoint has them in another recipe, or its masters in f32"
            ),
            Self::Rounded { states } => format!(
                "{states} masters and states of the optimizer are rounded to the dtypes of `optimizer_state`, since the checkpoint has them in wider ones"
            ),
            Self::Damaged(error) => format!("left out to resume: {error}"),
            Self::Earlier(step) => {
                format!("resumes from step {step}, the newest whole checkpoint")
            }
            Self::NotRemoved(error) => format!(
                "an old checkpoint stays until the next run that saves there removes it: {error}"
            ),
            Self::Begun(_)
            | Self::Step { .. }
            | Self::Evaluation(_)
            | Self::Saved(_)
            | Self::Codes { .. }
            | Self::Profile(_) => return None,
        })
    }
}

/// One run: what is trained, on what, and what is saved.
#[derive(Clone)]
pub struct Training<'a, M, D: ?Sized> {
    /// The recipe, and the name of the run.
    pub run: &'a Run,
    /// How the run is trained.
    pub config: &'a Config<M>,
    /// The batches that it trains on, and those of its evaluations.
    pub data: &'a D,
    /// What it begins with, where it does not resume.
    pub pretrained: Pretrained<'a>,
    /// What is saved and resumed.
    pub checkpoints: Checkpoints,
    /// Whether every gathered weight is compared with a cast of its masters at the end.
    pub audit: bool,
    /// Threads that the products of one rank may use.
    pub threads: usize,
    /// Floating-point operations per second that the device of a rank can do, where they are known.
    pub peak_flops: Option<f64>,
    /// Steps between two counts of codes, if they are counted.
    pub codes_every: Option<usize>,
    /// Called with what happens on rank 0.
    pub watch: &'a (dyn Fn(Event<'_>) + Sync),
}

impl<M: fmt::Debug, D: ?Sized> fmt::Debug for Training<'_, M, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Training")
            .field("run", self.run)
            .field("config", self.config)
            .field("pretrained", &self.pretrained)
            .field("checkpoints", &self.checkpoints)
            .field("audit", &self.audit)
            .field("threads", &self.threads)
            .field("peak_flops", &self.peak_flops)
            .field("codes_every", &self.codes_every)
            .finish_non_exhaustive()
    }
}

impl<'a, M: Model, D: Data + ?Sized> Training<'a, M, D> {
    /// A run that saves nothing and is audited, whose ranks share the cores of this machine.
    pub fn new(run: &'a Run, config: &'a Config<M>, data: &'a D) -> Self {
        Self {
            run,
            config,
            data,
            pretrained: Pretrained::default(),
            checkpoints: Checkpoints::default(),
            audit: true,
            threads: threads_per_rank(config.mesh.world()),
            peak_flops: None,
            codes_every: None,
            watch: &|_| (),
        }
    }

    /// Checks the configuration, and the checkpoint that the run would resume from; `None` if it starts at step 0.
    ///
    /// # Errors
    /// What is wrong with them ([`TrainError::is_input`]).
    pub fn check(&self) -> Result<Option<ResumedAt>, TrainError> {
        self.check_config()?;
        Ok(self.find(u64::MAX)?.map(|found| found.at(self.run)))
    }

    /// Checks the configuration alone: one rank looks for the checkpoint.
    ///
    /// # Errors
    /// What is wrong with it ([`TrainError::is_input`]).
    pub fn check_config(&self) -> Result<(), TrainError> {
        self.config.check()?;
        self.config.check_model()?;
        self.run.check_sharding(self.config.sharding)?;
        self.checkpoints.check(self.config.steps)
    }

    /// The checkpoint that the run would resume from; where only whole ones count, the newest before step `before`.
    pub(crate) fn find(&self, before: u64) -> Result<Option<Resumed>, TrainError> {
        let digest = self.data.digest();
        Resumed::find(self.config, &self.checkpoints, self.run, &digest, before)
    }

    /// Checks that [`Training::log`] can be called with `resumed`, as [`Training::check`] returned it.
    ///
    /// # Errors
    /// The folder has the log of another run, or of one whose checkpoints are missing, or cannot be read or written.
    pub fn check_log(&self, folder: &Path, resumed: Option<ResumedAt>) -> Result<(), TrainError> {
        let folder = self.log_folder(folder);
        RunLog::check_writable(&folder)?;
        self.earlier(&folder, &self.record()?, resumed).map(drop)
    }

    /// Locks the folder of this run in `folder`, so that no other run logs there as long as the file is held: [`Training::check_log`]
    /// finds the lock, too. `None` on a file system without locks.
    ///
    /// # Errors
    /// Another run has locked it, or it cannot be created.
    pub fn lock_log(&self, folder: &Path) -> Result<Option<File>, TrainError> {
        RunLog::lock(&self.log_folder(folder))
    }

    fn log_folder(&self, folder: &Path) -> PathBuf {
        folder.join(label(self.run, self.config.seed))
    }

    /// The log of this run in its folder `NAME-seedN` of `folder`. Lines that it already has of steps up to `resumed` stay, later ones are
    /// removed when the first event is logged; [`Event::Begun`] says where the run resumes.
    ///
    /// # Errors
    /// The folder has the log of another run, or of one whose checkpoints are missing, or cannot be read.
    pub fn log(&self, folder: &Path, resumed: Option<ResumedAt>) -> Result<RunLog, TrainError> {
        let folder = self.log_folder(folder);
        let record = self.record()?;
        let earlier = self.earlier(&folder, &record, resumed)?;
        let done = resumed.map_or(0, |at| at.step);
        // A run that is done is evaluated again.
        let ends = done == self.config.steps;
        Ok(RunLog::new(&folder, record, earlier.up_to(done, ends)))
    }

    /// What is logged as the description of this run.
    fn record(&self) -> Result<Value, TrainError> {
        let none = Value::Null;
        about_run(
            self.config,
            self.run,
            &self.data.digest(),
            none.clone(),
            none,
        )
    }

    /// What `folder` has of this run.
    fn earlier(
        &self,
        folder: &Path,
        record: &Value,
        resumed: Option<ResumedAt>,
    ) -> Result<Earlier, TrainError> {
        let earlier = Earlier::read(folder)?;
        let fits = match resumed {
            _ if earlier.is_empty() => true,
            // The steps before were another run's.
            Some(at) if at.other_recipe && earlier.has_steps_to(at.step) => false,
            // Stopped before its first checkpoint.
            None if !self.checkpoints.newest_whole => false,
            _ => same_run(&earlier.record, record, self.config, self.run)?,
        };
        let folder = folder.to_owned();
        if !fits {
            return Err(TrainError::EarlierLog { folder });
        }
        match (resumed, earlier.saved()) {
            (None, Some(saved)) => Err(TrainError::NoCheckpointOfLog {
                folder,
                saved,
                resume: self.checkpoints.resume.clone().unwrap_or_default(),
            }),
            _ => Ok(earlier),
        }
    }
}

/// Threads that the products of one rank may use, of `ranks` that share the cores of this machine.
pub fn threads_per_rank(ranks: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    (cores / ranks.max(1)).max(1)
}

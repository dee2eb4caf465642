//! [`AdamW`]: one optimizer step over all parameters of a rank.

use std::fmt::Write as _;

use half::bf16;
use lowp_kernels::{Backend, Moments, StepScalars};
use lowp_shard::{Communicator, Requantize, ScaleBook, or_abort};

use crate::clip::{NormPlan, clip_factor};
use crate::consensus::Consensus;
use crate::param::Param;
use crate::{GradNorm, Group, OptimError, ParamId};

/// What changes from step to step; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOptions {
    /// Multiplies the rate of every group (see [`crate::Schedule`]); at least 0. Default 1.
    pub lr_factor: f32,
    /// Multiplies gradients first: the inverse of a loss scale, or of the number of micro-batches
    /// that were added up. If it is not finite the step is skipped. Default 1.
    pub grad_scale: f32,
    /// Clips the global gradient norm to this; above 0. Default `None`.
    pub max_norm: Option<f32>,
}

impl StepOptions {
    fn check(&self) -> Result<(), OptimError> {
        let bad = |option: &str, value, expected| {
            let option = option.to_owned();
            Err(OptimError::OptionValue {
                option,
                value,
                expected,
            })
        };
        if !(self.lr_factor.is_finite() && self.lr_factor >= 0.0) {
            return bad("lr_factor", self.lr_factor, "a finite number of at least 0");
        }
        match self.max_norm {
            // NaN as well: it would mean no clipping.
            Some(norm) if norm.is_nan() || norm <= 0.0 => bad("max_norm", norm, "above 0"),
            _ => Ok(()),
        }
    }
}

impl Default for StepOptions {
    fn default() -> Self {
        Self {
            lr_factor: 1.0,
            grad_scale: 1.0,
            max_norm: None,
        }
    }
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Whether parameters were updated; false where a gradient of any rank was not finite, or
    /// would leave the range of f32 when scaled.
    pub applied: bool,
    /// Global norm (after `grad_scale`, before clipping) and non-finite count.
    pub grad: GradNorm,
    /// The clipping factor.
    pub clip: f32,
}

/// AdamW over groups that mix recipes and plain parameters. Made by
/// [`AdamWBuilder`](crate::AdamWBuilder).
#[derive(Debug)]
pub struct AdamW<B: Backend> {
    pub(crate) id: u64,
    /// The book that the plans below read and write.
    pub(crate) book: u64,
    pub(crate) backend: B,
    pub(crate) groups: Vec<Group>,
    pub(crate) params: Vec<Param<B>>,
    pub(crate) update: B::Plan,
    pub(crate) second: B::Plan,
    pub(crate) norm: NormPlan<B>,
    pub(crate) requantize: Requantize<B>,
    pub(crate) steps: u64,
    pub(crate) skipped: u64,
    /// Whether the ranks have compared their parameters.
    pub(crate) compared: bool,
}

impl<B: Backend> AdamW<B> {
    /// Casts the masters for the first time, with scales from the values themselves.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// Ranks with other parameters or groups, another book than that of `finish`, a rank that
    /// failed or called something else.
    pub fn calibrate(
        &self,
        book: &ScaleBook<B>,
        comm: &dyn Communicator<B>,
    ) -> Result<(), OptimError> {
        or_abort(comm, self.check_book(book))?;
        comm.agree("the parameters of the optimizer", &self.describe())?;
        Ok(self.requantize.calibrate(book, comm)?)
    }

    /// Applies one step: norm, update, amax, agreement, cast.
    ///
    /// `shards` are the ranks that hold the other rows of the parameters (the gradient norm is
    /// taken over them); `world` are all ranks that share `book` (amaxes are agreed among them).
    /// Without replication both are the same; with it, replicas must have equal gradients, which
    /// is checked by their norm. A non-finite gradient on any rank skips the update on all ranks
    /// and is counted: masters, moments, codes and their scales stay, and scales of other tensors
    /// in the book advance. Afterwards no gradient is ready.
    ///
    /// Two collectives, whatever the number of parameters: a sum for the norm (with replication a
    /// second one), and the maximum of all amaxes.
    ///
    /// # Errors
    /// A parameter without a gradient, options out of range or not the same on all ranks, another
    /// book than that of `finish`, or a rank that failed. Every rank gets an error: in this call, or
    /// in its next collective one if the failure came after the last meeting of the step, in a
    /// rank's second pass. A rank of its own may try again after mistakes in the arguments; after a
    /// failure of the backend its parameters may be half updated.
    pub fn step(
        &mut self,
        options: &StepOptions,
        book: &ScaleBook<B>,
        shards: &dyn Communicator<B>,
        world: &dyn Communicator<B>,
    ) -> Result<StepReport, OptimError> {
        let done = self.try_step(options, book, shards, world);
        or_abort(world, done)
    }

    fn try_step(
        &mut self,
        options: &StepOptions,
        book: &ScaleBook<B>,
        shards: &dyn Communicator<B>,
        world: &dyn Communicator<B>,
    ) -> Result<StepReport, OptimError> {
        self.check_book(book)?;
        options.check()?;
        self.check_ready()?;
        if !self.compared {
            world.agree("the parameters of the optimizer", &self.describe())?;
            self.compared = true;
        }
        let grad = self.measure(options, shards, world)?;
        let clip = options
            .max_norm
            .map_or(1.0, |max_norm| clip_factor(grad.norm, max_norm));
        // No element is larger than the norm, so none overflows when it is scaled.
        let fits = grad.norm * f64::from(clip) <= f64::from(f32::MAX);
        let applied = grad.non_finite == 0 && options.grad_scale.is_finite() && fits;
        let scalars = StepScalars {
            adam: self
                .groups
                .iter()
                .map(|group| group.scalars(self.steps + 1, options.lr_factor))
                .collect(),
            grad_scale: options.grad_scale * clip,
            ..StepScalars::default()
        };
        if applied {
            // Before the first write, so that no gather takes the old rows for current.
            self.params.iter().for_each(|p| p.item.begin_write());
            self.backend.run(&self.update, &scalars)?;
        }
        // Also where nothing changed: scales of other tensors in the book advance.
        book.agree(world)?;
        if applied {
            self.backend.run(&self.second, &scalars)?;
            self.steps += 1;
        } else {
            self.skipped += 1;
        }
        self.clear_grads();
        Ok(StepReport {
            applied,
            grad,
            clip,
        })
    }

    /// The global norm, after `grad_scale`. The same sums tell whether all ranks do the same step.
    fn measure(
        &self,
        options: &StepOptions,
        shards: &dyn Communicator<B>,
        world: &dyn Communicator<B>,
    ) -> Result<GradNorm, OptimError> {
        let [mut squares, count] = self.norm.local(&self.backend)?;
        let replicated = shards.world_size() != world.world_size();
        if replicated {
            let mut sums = [squares];
            shards.all_reduce_sum_f64(&mut sums)?;
            [squares] = sums;
        }
        let (mut common, mut replicas) = (Consensus::default(), Consensus::default());
        common.add("the number of applied steps", self.steps);
        common.add("lr_factor", options.lr_factor.to_bits().into());
        common.add("grad_scale", options.grad_scale.to_bits().into());
        let max_norm = options.max_norm.map_or(u64::MAX, |x| x.to_bits().into());
        common.add("max_norm", max_norm);
        if replicated {
            replicas.add("the gradient norm of their replica", squares.to_bits());
        }
        let mut sums = vec![squares, count];
        sums.extend(common.halves().chain(replicas.halves()));
        world.all_reduce_sum_f64(&mut sums)?;
        if !replicated {
            squares = sums[0];
        }
        let non_finite = sums[1] as u64;
        let (size, rank) = (world.world_size(), world.rank());
        let (ours, theirs) = sums[2..].split_at(common.halves().count());
        let mut checked = common.check(ours, size, rank);
        // One replica's NaN may be spelled unlike another's; that step is skipped by all.
        if non_finite == 0 {
            checked = checked.and_then(|()| replicas.check(theirs, size, rank));
        }
        checked?;
        Ok(GradNorm {
            norm: squares.sqrt() * f64::from(options.grad_scale.abs()),
            non_finite,
        })
    }

    /// The fp32 master values of this rank's rows.
    ///
    /// # Errors
    /// An id of another optimizer, or the backend failed.
    pub fn master(&self, id: ParamId) -> Result<Vec<f32>, OptimError> {
        Ok(self
            .backend
            .download(&self.params[self.index(id)?].master)?)
    }

    /// The first and second moments of this rank's rows, widened to f32.
    ///
    /// # Errors
    /// An id of another optimizer, or the backend failed.
    pub fn moments(&self, id: ParamId) -> Result<[Vec<f32>; 2], OptimError> {
        let backend = &self.backend;
        let widen = |buffer| -> Result<Vec<f32>, OptimError> {
            let values: Vec<bf16> = backend.download(buffer)?;
            Ok(values.into_iter().map(bf16::to_f32).collect())
        };
        Ok(match &self.params[self.index(id)?].moments {
            Moments::F32 {
                exp_avg,
                exp_avg_sq,
            } => [backend.download(exp_avg)?, backend.download(exp_avg_sq)?],
            Moments::Bf16 {
                exp_avg,
                exp_avg_sq,
            } => [widen(exp_avg)?, widen(exp_avg_sq)?],
        })
    }

    /// Number of parameters.
    pub fn len(&self) -> usize {
        self.params.len()
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Steps that were applied.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Steps that were skipped because a gradient was not finite.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    pub(crate) fn index(&self, id: ParamId) -> Result<usize, OptimError> {
        if id.optimizer == self.id {
            return Ok(id.index);
        }
        let len = self.len();
        Err(OptimError::OtherOptimizer { len })
    }

    fn check_book(&self, book: &ScaleBook<B>) -> Result<(), OptimError> {
        if book.id() == self.book {
            return Ok(());
        }
        let what = "the optimizer".to_owned();
        Err(OptimError::OtherBook { what })
    }

    fn check_ready(&self) -> Result<(), OptimError> {
        let missing = self.params.iter().filter(|p| !p.ready).count();
        let Some(first) = self.params.iter().find(|p| !p.ready) else {
            return Ok(());
        };
        Err(OptimError::MissingGradient {
            name: first.name.clone(),
            missing,
            total: self.params.len(),
        })
    }

    /// Everything that ranks must have in common, as text: not the rows, which they share out.
    fn describe(&self) -> String {
        let mut text = format!("{} parameters", self.params.len());
        for param in &self.params {
            let (name, group, item) = (&param.name, param.group, &param.item);
            // Writing to a String cannot fail.
            let _ = write!(text, "; {name}: group {group}, {} columns", item.shape.cols);
            let _ = write!(text, ", {:?}, {:?}", item.kernel, item.scale_source);
            let _ = write!(text, ", {:?}", item.source_rounding);
        }
        let _ = write!(text, "; {:?}", self.groups);
        text
    }
}

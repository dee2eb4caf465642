//! [`AdamW`]: one optimizer step over all parameters of a rank.

use half::bf16;
use lowp_kernels::{Backend, Moments, Source, StepScalars};
use lowp_shard::{Communicator, Requantize, ScaleBook};

use crate::clip::{NormPlan, clip_factor};
use crate::param::Param;
use crate::{GradNorm, Group, OptimError, ParamId};

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOptions {
    /// Multiplies the rate of every group (see [`crate::Schedule`]).
    pub lr_factor: f32,
    /// Multiplies gradients first: the inverse of a loss scale.
    pub grad_scale: f32,
    /// Clips the global gradient norm to this.
    pub max_norm: Option<f32>,
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
    /// Whether parameters were updated; false where a gradient of any rank was not finite.
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
    pub(crate) backend: B,
    pub(crate) groups: Vec<Group>,
    pub(crate) params: Vec<Param<B>>,
    pub(crate) update: B::Plan,
    pub(crate) second: B::Plan,
    pub(crate) norm: NormPlan<B>,
    pub(crate) requantize: Requantize<B>,
    pub(crate) steps: u64,
    pub(crate) skipped: u64,
}

impl<B: Backend> AdamW<B> {
    /// Casts the masters for the first time, with scales from the values themselves.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// A rank failed, or called something else.
    pub fn calibrate(
        &self,
        book: &ScaleBook<B>,
        comm: &dyn Communicator<B>,
    ) -> Result<(), OptimError> {
        Ok(self.requantize.calibrate(book, comm)?)
    }

    /// Applies one step: norm, update, amax, agreement, cast.
    ///
    /// `shards` are the ranks that hold the other rows of the parameters (the gradient norm is
    /// taken over them); `world` are all ranks that share `book` (amaxes are agreed among them).
    /// Without replication both are the same. A non-finite gradient on any rank skips the update
    /// on all ranks and is counted; scales still advance. Afterwards no gradient is ready.
    ///
    /// # Errors
    /// A parameter without a gradient, or a rank that failed.
    pub fn step(
        &mut self,
        options: &StepOptions,
        book: &ScaleBook<B>,
        shards: &dyn Communicator<B>,
        world: &dyn Communicator<B>,
    ) -> Result<StepReport, OptimError> {
        self.check_ready(world)?;
        let raw = self.norm.measure(&self.backend, shards)?;
        let grad = GradNorm {
            norm: raw.norm * f64::from(options.grad_scale.abs()),
            ..raw
        };
        let applied = grad.non_finite == 0 && options.grad_scale.is_finite();
        let clip = options
            .max_norm
            .map_or(1.0, |max_norm| clip_factor(grad.norm, max_norm));
        let scalars = StepScalars {
            adam: self
                .groups
                .iter()
                .map(|group| group.scalars(self.steps + 1, options.lr_factor))
                .collect(),
            grad_scale: options.grad_scale * clip,
            random_step: self.steps,
        };
        if applied {
            self.backend.run(&self.update, &scalars)?;
        }
        book.agree(world)?;
        if applied {
            self.backend.run(&self.second, &scalars)?;
            self.steps += 1;
        } else {
            self.skipped += 1;
        }
        for param in &mut self.params {
            param.ready = false;
        }
        Ok(StepReport {
            applied,
            grad,
            clip,
        })
    }

    /// Stores an f32 gradient of this rank's rows and marks it ready.
    ///
    /// # Errors
    /// A wrong length, or a parameter with bf16 gradients.
    pub fn set_grad(&mut self, id: ParamId, values: &[f32]) -> Result<(), OptimError> {
        let param = &mut self.params[id.0];
        check_len(param, values.len())?;
        let Source::F32(buffer) = &param.grad else {
            return Err(OptimError::GradDtype {
                name: param.name.clone(),
                expected: "bf16",
            });
        };
        self.backend.write(buffer, 0, values)?;
        param.ready = true;
        Ok(())
    }

    /// Stores a bf16 gradient of this rank's rows and marks it ready.
    ///
    /// # Errors
    /// A wrong length, or a parameter with f32 gradients.
    pub fn set_grad_bf16(&mut self, id: ParamId, values: &[bf16]) -> Result<(), OptimError> {
        let param = &mut self.params[id.0];
        check_len(param, values.len())?;
        let Source::Bf16(buffer) = &param.grad else {
            return Err(OptimError::GradDtype {
                name: param.name.clone(),
                expected: "f32",
            });
        };
        self.backend.write(buffer, 0, values)?;
        param.ready = true;
        Ok(())
    }

    /// The gradient buffer of this rank's rows: a reduce-scatter writes or accumulates into it.
    /// Call [`AdamW::mark_ready`] when it is complete.
    pub fn grad(&self, id: ParamId) -> &Source<B> {
        &self.params[id.0].grad
    }

    /// Says that the gradient of `id` is complete.
    pub fn mark_ready(&mut self, id: ParamId) {
        self.params[id.0].ready = true;
    }

    /// The fp32 master values of this rank's rows.
    ///
    /// # Errors
    /// The backend failed.
    pub fn master(&self, id: ParamId) -> Result<Vec<f32>, OptimError> {
        Ok(self.backend.download(&self.params[id.0].master)?)
    }

    /// The first and second moments of this rank's rows, widened to f32.
    ///
    /// # Errors
    /// The backend failed.
    pub fn moments(&self, id: ParamId) -> Result<[Vec<f32>; 2], OptimError> {
        let backend = &self.backend;
        let widen = |buffer| -> Result<Vec<f32>, OptimError> {
            let values: Vec<bf16> = backend.download(buffer)?;
            Ok(values.into_iter().map(bf16::to_f32).collect())
        };
        Ok(match &self.params[id.0].moments {
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

    /// A rank that lacks a gradient must not leave the others waiting in a collective.
    fn check_ready(&self, world: &dyn Communicator<B>) -> Result<(), OptimError> {
        let missing = self.params.iter().filter(|p| !p.ready).count();
        let Some(first) = self.params.iter().find(|p| !p.ready) else {
            return Ok(());
        };
        let error = OptimError::MissingGradient {
            name: first.name.clone(),
            missing,
            total: self.params.len(),
        };
        world.abort(&error.to_string());
        Err(error)
    }
}

fn check_len<B: Backend>(param: &Param<B>, found: usize) -> Result<(), OptimError> {
    if found == param.len {
        return Ok(());
    }
    let (name, what, needed) = (param.name.clone(), "the gradient", param.len);
    Err(OptimError::Length {
        name,
        what,
        found,
        needed,
    })
}

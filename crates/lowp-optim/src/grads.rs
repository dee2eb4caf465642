//! Gradients of an [`Optimizer`]: set from the host, or reduced on the device.

use lowp_kernels::{Backend, Source};

use crate::memory::check_length;
use crate::optimizer::Optimizer;
use crate::{OptimError, ParamId};

/// # Gradients
///
/// Every parameter needs a gradient before each step, unless [`Optimizer::leave_out`] says that it has none. From the host: [`Optimizer::set_grad`]. On
/// the device: a reduce-scatter into [`Optimizer::grad`], which accumulates after the first micro-batch, then [`Optimizer::mark_ready`]. For
/// the mean of micro-batches pass `StepOptions { grad_scale: 1.0 / micro_batches, .. }`.
impl<B: Backend> Optimizer<B> {
    /// Stores an f32 gradient of this rank's rows, in place of any that this step has, and marks
    /// it ready.
    ///
    /// # Errors
    /// A wrong length, a parameter with bf16 gradients, or an id of another optimizer.
    pub fn set_grad(&mut self, id: ParamId, values: &[f32]) -> Result<(), OptimError> {
        let index = self.index(id)?;
        let param = &mut self.params[index];
        check_length(&param.name, "the gradient", values.len(), param.len)?;
        match &param.grad {
            Source::F32(grad) => self.backend.write(grad, 0, values)?,
            Source::Bf16(_) => {
                let (name, expected) = (param.name.clone(), param.grad.dtype().name());
                return Err(OptimError::GradDtype { name, expected });
            }
        }
        param.set_ready();
        Ok(())
    }

    /// Says that `id` has no gradient in this step, on any rank: the step leaves its master, states, codes and scales as they are, and
    /// counts for its bias corrections ([`Optimizer::steps`]) only where it has one. A gradient that is set after this is one. Other sets of
    /// parameters than in the last step need other plans, which are kept as [`Optimizer::keep_sets`] says.
    ///
    /// # Panics
    /// If `id` was given by another optimizer.
    pub fn leave_out(&mut self, id: ParamId) {
        let index = self.own(id);
        (self.params[index].ready, self.params[index].left_out) = (false, true);
    }

    /// Drops the gradients of this step, for example after a micro-batch that failed.
    pub fn clear_grads(&mut self) {
        for param in &mut self.params {
            (param.ready, param.left_out) = (false, false);
        }
    }

    /// The gradient buffer of this rank's rows: a reduce-scatter writes or accumulates into it.
    /// Call [`Optimizer::mark_ready`] when it is complete. It is not cleared after a step.
    ///
    /// # Panics
    /// If `id` was given by another optimizer.
    pub fn grad(&self, id: ParamId) -> &Source<B> {
        &self.params[self.own(id)].grad
    }

    /// Says that the gradient of `id` is complete, or complete up to this micro-batch.
    ///
    /// # Panics
    /// If `id` was given by another optimizer.
    pub fn mark_ready(&mut self, id: ParamId) {
        let index = self.own(id);
        self.params[index].set_ready();
    }

    fn own(&self, id: ParamId) -> usize {
        match self.index(id) {
            Ok(index) => index,
            Err(error) => panic!("{error}"),
        }
    }
}

//! Gradients of an [`Optimizer`]: set or added from the host, or reduced on the device.

use half::bf16;
use lowp_kernels::{Backend, Source, StepScalars, SumJob, Work};

use crate::memory::check_length;
use crate::optimizer::Optimizer;
use crate::{OptimError, ParamId};

/// A gradient on the host.
#[derive(Clone, Copy)]
enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl Values<'_> {
    fn len(self) -> usize {
        match self {
            Values::F32(values) => values.len(),
            Values::Bf16(values) => values.len(),
        }
    }

    /// Writes them to `to`, which belongs to the parameter `name` and must be of their dtype.
    fn write<B: Backend>(self, backend: &B, to: &Source<B>, name: &str) -> Result<(), OptimError> {
        match (self, to) {
            (Values::F32(values), Source::F32(to)) => backend.write(to, 0, values)?,
            (Values::Bf16(values), Source::Bf16(to)) => backend.write(to, 0, values)?,
            (Values::F32(_), Source::Bf16(_)) | (Values::Bf16(_), Source::F32(_)) => {
                let (name, expected) = (name.to_owned(), to.dtype().name());
                return Err(OptimError::GradDtype { name, expected });
            }
        }
        Ok(())
    }
}

/// # Gradients
///
/// Every parameter needs a gradient before each step, unless [`Optimizer::leave_out`] says that it has none. From the host: [`Optimizer::set_grad`] for one
/// batch, [`Optimizer::add_grad`] once per micro-batch. On the device: a reduce-scatter into
/// [`Optimizer::grad`] with `accumulate` set to [`Optimizer::has_grad`], then [`Optimizer::mark_ready`]. Either
/// way gradients of micro-batches are summed; for their mean pass
/// `StepOptions { grad_scale: 1.0 / micro_batches, .. }`.
impl<B: Backend> Optimizer<B> {
    /// Stores an f32 gradient of this rank's rows, in place of any that this step has, and marks
    /// it ready.
    ///
    /// # Errors
    /// A wrong length, a parameter with bf16 gradients, or an id of another optimizer.
    pub fn set_grad(&mut self, id: ParamId, values: &[f32]) -> Result<(), OptimError> {
        self.store(id, Values::F32(values), false)
    }

    /// Stores a bf16 gradient of this rank's rows, in place of any that this step has, and marks
    /// it ready.
    ///
    /// # Errors
    /// A wrong length, a parameter with f32 gradients, or an id of another optimizer.
    pub fn set_grad_bf16(&mut self, id: ParamId, values: &[bf16]) -> Result<(), OptimError> {
        self.store(id, Values::Bf16(values), false)
    }

    /// Adds an f32 gradient of this rank's rows to those that this step has already, and marks it
    /// ready: call it once per micro-batch. The first call of a step stores the values.
    ///
    /// # Errors
    /// As [`Optimizer::set_grad`].
    pub fn add_grad(&mut self, id: ParamId, values: &[f32]) -> Result<(), OptimError> {
        self.store(id, Values::F32(values), true)
    }

    /// Adds a bf16 gradient of this rank's rows as [`Optimizer::add_grad`] does. Each sum is taken in
    /// f32 and rounded to bf16 (to nearest even), so many micro-batches lose bits; f32 gradients do
    /// not.
    ///
    /// # Errors
    /// As [`Optimizer::set_grad_bf16`].
    pub fn add_grad_bf16(&mut self, id: ParamId, values: &[bf16]) -> Result<(), OptimError> {
        self.store(id, Values::Bf16(values), true)
    }

    /// Whether this step has a gradient of `id` already. In a reduce-scatter per micro-batch this
    /// is `accumulate` of its item.
    ///
    /// # Panics
    /// If `id` was given by another optimizer.
    pub fn has_grad(&self, id: ParamId) -> bool {
        self.params[self.own(id)].ready
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

    fn store(&mut self, id: ParamId, values: Values<'_>, add: bool) -> Result<(), OptimError> {
        let index = self.index(id)?;
        let param = &mut self.params[index];
        let dtype = param.grad.dtype();
        check_length(&param.name, "the gradient", values.len(), param.len)?;
        if !(add && param.ready) {
            values.write(&self.backend, &param.grad, &param.name)?;
        } else if param.len > 0 {
            // The values arrive beside the sums so far, and are added there.
            let (from, sum) = match param.incoming.take() {
                Some(incoming) => incoming,
                None => {
                    let from = Source::alloc(&self.backend, dtype, param.len)?;
                    let into = param.grad.clone();
                    let job = SumJob {
                        from: from.clone(),
                        into,
                    };
                    (from, self.backend.plan(Work::Sum(vec![job]))?)
                }
            };
            let (from, sum) = param.incoming.insert((from, sum));
            values.write(&self.backend, from, &param.name)?;
            self.backend.run(sum, &StepScalars::default())?;
        }
        param.set_ready();
        Ok(())
    }
}

//! Gradients of an [`Optimizer`] in memory of other libraries, whose addresses change from step to step.

use std::ops::Range;

use lowp_kernels::{Backend, Source};

use crate::OptimError;
use crate::memory::check_length;
use crate::optimizer::Optimizer;
use crate::param::Param;
use crate::planned_sets::spans;

impl<B: Backend> Optimizer<B> {
    /// Takes `grads` as the gradients of all parameters, in the order in which those were added, and marks them ready; parameters
    /// without one are left out of the step ([`Optimizer::leave_out`]). Nothing is copied: the next step reads them where they lie. Where
    /// they lay there in one of the last steps ([`Optimizer::keep_sets`]) planned work runs; elsewhere the norm and the update are planned
    /// anew, which may wait for the device.
    ///
    /// # Errors
    /// Another number of gradients, one of another length, a parameter that is left out and shares its scale with one that is not,
    /// or has counted its steps with such in a captured graph, or the backend failed. Gradients and plans are those of before then.
    pub fn take_grads(&mut self, grads: Vec<Option<Source<B>>>) -> Result<(), OptimError> {
        if grads.len() != self.params.len() {
            return Err(OptimError::GradCount {
                needed: self.params.len(),
                found: grads.len(),
            });
        }
        for (param, grad) in self.params.iter().zip(&grads) {
            let Some(grad) = grad else { continue };
            let found = grad.len(&self.backend);
            check_length(&param.name, "the gradient", found, param.len)?;
            grad.owned_by(&self.backend)?;
        }
        let spans = spans(&self.backend, &grads);
        if !self.take_grads_at(&spans) {
            self.plan_over(spans, grads)?;
        }
        Ok(())
    }

    /// As [`Optimizer::take_grads`] for gradients at addresses that work was planned over, one span for each parameter that has a gradient
    /// ([`Backend::span`]): no handle is made of them. Returns `false` and does nothing if there is no such work.
    pub fn take_grads_at(&mut self, spans: &[Option<Range<usize>>]) -> bool {
        if self.reads_grads_at(spans) {
            for (param, span) in self.params.iter_mut().zip(spans) {
                (param.ready, param.left_out) = (span.is_some(), span.is_none());
            }
            return true;
        }
        let Some(known) = self.planned.take(spans) else {
            return false;
        };
        let before = self.change_set(known);
        self.planned.add(before);
        true
    }

    /// Whether the present plans read gradients at `spans`.
    fn reads_grads_at(&self, spans: &[Option<Range<usize>>]) -> bool {
        let present = self.work.present().which.iter();
        let now = self.params.iter().zip(present);
        let now = now.map(|(param, present)| present.then(|| param.grad.span(&self.backend)));
        now.eq(spans.iter().cloned())
    }

    /// Plans a step without the parameters that are left out, where the present plans are for others.
    pub(crate) fn follow_left_out(&mut self) -> Result<(), OptimError> {
        let present = self.work.present().which.iter();
        let mut params = self.params.iter().zip(present);
        if params.all(|(param, present)| param.left_out != *present) {
            return Ok(());
        }
        let grad = |param: &Param<B>| (!param.left_out).then(|| param.grad.clone());
        self.take_grads(self.params.iter().map(grad).collect())
    }
}

#[cfg(test)]
mod tests;

//! [`PlannedSets`]: work that is planned over sets of gradients, each at its addresses.

use std::mem::replace;
use std::ops::Range;

use lowp_kernels::{Backend, Source};

use crate::OptimError;
use crate::optimizer::{Optimizer, StepGraph};
use crate::plans::StepPlans;
use crate::records::Sharing;

/// Planned work that reads a set of gradients, and where they lie.
#[derive(Debug)]
pub(crate) struct PlannedSet<B: Backend> {
    /// None for a parameter without a gradient.
    spans: Vec<Option<Range<usize>>>,
    grads: Vec<Option<Source<B>>>,
    plans: StepPlans<B>,
    /// What was captured of `plans`.
    graph: Option<StepGraph<B>>,
    pinned: bool,
}

/// The sets beside the present one, which the optimizer itself has.
#[derive(Debug)]
pub(crate) struct PlannedSets<B: Backend> {
    /// The last used first.
    earlier: Vec<PlannedSet<B>>,
    /// How many are kept beside those that are pinned, with the present one.
    keep: usize,
    /// Whether the present set is pinned ([`Optimizer::pin_grads`]).
    pinned: bool,
}

impl<B: Backend> Default for PlannedSets<B> {
    fn default() -> Self {
        Self {
            earlier: Vec::new(),
            keep: 1,
            pinned: false,
        }
    }
}

impl<B: Backend> PlannedSets<B> {
    /// Removes the set whose gradients lie at `spans`.
    pub(crate) fn take(&mut self, spans: &[Option<Range<usize>>]) -> Option<PlannedSet<B>> {
        let at = self.earlier.iter().position(|set| set.spans == spans)?;
        Some(self.earlier.remove(at))
    }

    /// Adds the set that was used last.
    pub(crate) fn add(&mut self, set: PlannedSet<B>) {
        self.earlier.insert(0, set);
        self.drop_oldest();
    }

    pub(crate) fn clear(&mut self) {
        self.earlier.clear();
    }

    fn drop_oldest(&mut self) {
        let mut room = self.keep - 1;
        self.earlier.retain(|set| {
            let kept = set.pinned || room > 0;
            room -= usize::from(!set.pinned && kept);
            kept
        });
    }

    /// Whether a graph of a caller has captured plans.
    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned || self.earlier.iter().any(|set| set.pinned)
    }
}

impl<B: Backend> Optimizer<B> {
    /// Keeps what is planned over the present gradients for as long as the optimizer: for graphs of a caller that captured
    /// [`Optimizer::enqueue`], which launch it.
    pub fn pin_grads(&mut self) {
        self.planned.pinned = true;
    }

    /// Keeps planned work for the `sets` sets of addresses of gradients that were used last: for memory that is freed and comes back
    /// at one of a few addresses. 1 unless this is called; 0 counts as 1.
    pub fn keep_sets(&mut self, sets: usize) {
        self.planned.keep = sets.max(1);
        self.planned.drop_oldest();
    }

    /// The gradients that the present plans read.
    pub(crate) fn planned_grads(&self) -> Vec<Option<Source<B>>> {
        let present = self.work.present().which.iter();
        let grads = self.params.iter().zip(present);
        let grads = grads.map(|(param, present)| present.then(|| param.grad.clone()));
        grads.collect()
    }

    /// Reads the gradients of `next` from here on. Returns the set of before.
    pub(crate) fn change_set(&mut self, next: PlannedSet<B>) -> PlannedSet<B> {
        let grads = self.planned_grads();
        let before = PlannedSet {
            spans: spans(&self.backend, &grads),
            grads,
            plans: self.work.swap(next.plans),
            graph: replace(&mut self.graph, next.graph),
            pinned: replace(&mut self.planned.pinned, next.pinned),
        };
        for (param, grad) in self.params.iter_mut().zip(next.grads) {
            (param.ready, param.left_out) = (grad.is_some(), grad.is_none());
            param.grad = grad.unwrap_or_else(|| param.grad.clone());
        }
        before
    }

    /// Plans a step over `grads`, and reads them from here on. If parameters that shared a step count get counts of their own, plans of
    /// before no longer serve.
    pub(crate) fn plan_over(
        &mut self,
        spans: Vec<Option<Range<usize>>>,
        grads: Vec<Option<Source<B>>>,
    ) -> Result<(), OptimError> {
        let split = self.work.split_for(&grads);
        if split.is_some() && self.planned.is_pinned() {
            let mut params = self.params.iter().zip(&grads);
            let missing = params.find(|(_, grad)| grad.is_none());
            let name = missing.map_or_else(String::new, |(param, _)| param.name.clone());
            return Err(OptimError::Captured { name });
        }
        let next = PlannedSet {
            plans: self.plan(&grads, split.as_ref())?,
            spans,
            grads,
            graph: None,
            pinned: false,
        };
        match split {
            None => {
                let before = self.change_set(next);
                self.planned.add(before);
            }
            Some(sharing) => {
                self.work.records_mut().split(sharing)?;
                self.change_set(next);
                self.planned.clear();
            }
        }
        Ok(())
    }

    /// Plans a step over `grads`, in which parameters share step counts as `sharing` says; `None`: as now.
    pub(crate) fn plan(
        &self,
        grads: &[Option<Source<B>>],
        sharing: Option<&Sharing>,
    ) -> Result<StepPlans<B>, OptimError> {
        let known = self.planned.earlier.iter().map(|set| &set.plans);
        self.work.plan(&self.params, grads, sharing, known)
    }
}

/// Where `grads` lie.
pub(crate) fn spans<B: Backend>(
    backend: &B,
    grads: &[Option<Source<B>>],
) -> Vec<Option<Range<usize>>> {
    let span = |grad: &Option<Source<B>>| grad.as_ref().map(|grad| grad.span(backend));
    grads.iter().map(span).collect()
}

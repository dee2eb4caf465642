//! Memory of other libraries: [`ParamMemory`], and what is planned over gradients there.

use std::ops::Range;

use lowp_kernels::{Backend, Moments, Source};

use crate::OptimError;
use crate::adamw::StepGraph;
use crate::plans::StepPlans;

/// What a parameter keeps between steps, and its gradient, in memory that the caller allocated. Each buffer has an entry for each
/// element of the rank's rows.
#[derive(Clone, Debug)]
pub struct ParamMemory<B: Backend> {
    /// fp32 master values.
    pub master: B::Buffer<f32>,
    /// First and second moments.
    pub moments: Moments<B>,
    /// The gradient of the first step; `None` for a parameter that has none in it ([`AdamW::leave_out`](crate::AdamW::leave_out)).
    pub grad: Option<Source<B>>,
}

impl<B: Backend> ParamMemory<B> {
    /// Checks that all of it has `len` entries and lies on the device of `backend`.
    pub(crate) fn check(&self, backend: &B, name: &str, len: usize) -> Result<(), OptimError> {
        let [first, second] = self.moments.values();
        first.owned_by(backend)?;
        second.owned_by(backend)?;
        backend.owns(&self.master)?;
        if let Some(grad) = &self.grad {
            grad.owned_by(backend)?;
            check_length(name, "the gradient", grad.len(backend), len)?;
        }
        for (what, found) in [
            ("the master", backend.len(&self.master)),
            ("the first moment", first.len(backend)),
            ("the second moment", second.len(backend)),
        ] {
            check_length(name, what, found, len)?;
        }
        Ok(())
    }
}

/// Planned work that reads gradients, and where they lie.
#[derive(Debug)]
pub(crate) struct OverGrads<B: Backend> {
    /// None for a parameter without a gradient.
    pub(crate) spans: Vec<Option<Range<usize>>>,
    pub(crate) grads: Vec<Option<Source<B>>>,
    pub(crate) plans: StepPlans<B>,
    /// What was captured of them.
    pub(crate) graph: Option<StepGraph<B>>,
    /// Kept whatever comes ([`crate::AdamW::pin_grads`]).
    pub(crate) pinned: bool,
}

pub(crate) fn check_length(
    name: &str,
    what: &'static str,
    found: usize,
    needed: usize,
) -> Result<(), OptimError> {
    if found == needed {
        return Ok(());
    }
    let name = name.to_owned();
    Err(OptimError::Length {
        name,
        what,
        found,
        needed,
    })
}

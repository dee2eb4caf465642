//! [`ParamMemory`]: memory of other libraries.

use lowp_kernels::{Backend, Master, Rule, Source, State};

use crate::{OptimError, ParamPlace};

/// What a parameter keeps between steps, and its gradient, in memory that the caller allocated. Each buffer has an entry for each
/// element of the rank's rows.
#[derive(Clone, Debug)]
pub struct ParamMemory<B: Backend> {
    /// Master values. Where they are in two halves, the parameter is one of them: the only buffer of its tensor.
    pub master: Master<B>,
    /// The states of the rule of its group, in their order ([`Rule::states`]).
    pub states: Vec<State<B>>,
    /// The gradient of the first step; `None` for a parameter that has none in it ([`Optimizer::leave_out`](crate::Optimizer::leave_out)).
    pub grad: Option<Source<B>>,
    /// Where the elements lie in the matrix.
    pub place: ParamPlace,
}

impl<B: Backend> ParamMemory<B> {
    /// Checks that it has the states of `rule`, and that all of it has `len` entries and lies on the device of `backend`.
    pub(crate) fn check(
        &self,
        backend: &B,
        name: &str,
        rule: Rule,
        len: usize,
    ) -> Result<(), OptimError> {
        check_count(name, rule, self.states.len())?;
        self.master.owned_by(backend)?;
        check_length(name, "the master", self.master.len(backend), len)?;
        for (what, state) in rule.states().iter().zip(&self.states) {
            state.owned_by(backend)?;
            check_length(name, what.name(), state.len(backend), len)?;
        }
        if let Some(grad) = &self.grad {
            grad.owned_by(backend)?;
            check_length(name, "the gradient", grad.len(backend), len)?;
        }
        Ok(())
    }
}

/// Checks that `found` is the number of states of `rule`.
pub(crate) fn check_count(name: &str, rule: Rule, found: usize) -> Result<(), OptimError> {
    if found == rule.states().len() {
        return Ok(());
    }
    Err(OptimError::States {
        name: name.to_owned(),
        rule: rule.name(),
        needed: rule.states().len(),
        found,
    })
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

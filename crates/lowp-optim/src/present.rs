//! [`Present`]: which parameters have a gradient in a step, which all ranks must have in common.

use std::sync::Arc;

use lowp_comm::{Control, digest};

use crate::OptimError;

/// The parameters that have a gradient in a step; a step leaves the others as they are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Present {
    /// Whether each parameter has one.
    pub(crate) which: Vec<bool>,
    names: Arc<[String]>,
    digest: u64,
}

impl Present {
    pub(crate) fn new(which: Vec<bool>, names: &Arc<[String]>) -> Self {
        let missing = (0..).zip(&which).filter(|(_, present)| !**present);
        Self {
            digest: digest(missing.map(|(index, _)| index)),
            names: Arc::clone(names),
            which,
        }
    }

    /// A number that ranks have in common if the same parameters have a gradient.
    pub(crate) fn digest(&self) -> u64 {
        self.digest
    }

    /// The parameters of `all` that have a gradient, with their numbers.
    pub(crate) fn of<'a, T>(&self, all: &'a [T]) -> impl Iterator<Item = (usize, &'a T)> {
        let which = self.which.iter();
        let all = all.iter().enumerate().zip(which);
        all.filter_map(|(item, present)| present.then_some(item))
    }

    /// Compares over the ranks which parameters have a gradient. Collective.
    pub(crate) fn compare(&self, control: &dyn Control) -> Result<(), OptimError> {
        let own = self
            .which
            .iter()
            .map(|&present| u8::from(present))
            .collect();
        let all = control.all_gather("the parameters that have a gradient", own)?;
        let has = |rank: &[u8], param: usize| rank.get(param) == Some(&1);
        let differ = |&param: &usize| {
            let mut ranks = all.iter().map(|rank| has(rank, param));
            let first = ranks.next();
            ranks.any(|other| Some(other) != first)
        };
        let mut differing = (0..self.which.len()).filter(differ);
        let Some(first) = differing.next() else {
            return Ok(());
        };
        let ranks = |with: bool| {
            let ranks = all.iter().enumerate();
            let those = ranks.filter(|(_, rank)| has(rank, first) == with);
            those.map(|(rank, _)| rank).collect()
        };
        Err(OptimError::GradientOnSome {
            name: self.names[first].clone(),
            with: ranks(true),
            without: ranks(false),
            more: differing.count(),
        })
    }
}

//! [`Decodes`]: the weights of a block that products read as values, decoded in one launch.

use std::sync::{Mutex, PoisonError};

use lowp_format::{Phase, Recipe};
use lowp_kernels::{Backend, CudaPlan, StepScalars, Work};

use super::TransformerError;
use super::linear::{Linear, Shared};
use super::trace::GATHERS;

/// Weights that are gathered together and decoded for a phase.
#[derive(Debug)]
pub(super) struct Decodes {
    phase: Phase,
    /// Their layers in the block.
    layers: Vec<usize>,
    /// The launch, by the memory that they are gathered in.
    plans: Mutex<Vec<(Option<u64>, CudaPlan)>>,
}

impl Decodes {
    /// Those of a block of `linears`.
    pub(super) fn of_block<R: Recipe>(
        linears: &[&Linear<R>],
    ) -> Result<Vec<Self>, TransformerError> {
        let mut all: Vec<Self> = Vec::new();
        for phase in Phase::ALL {
            for (at, linear) in linears.iter().enumerate() {
                if linear.decoded(phase).is_none() {
                    continue;
                }
                let last = all.last_mut().filter(|last| last.phase == phase);
                match last {
                    Some(last) if linears[last.layers[0]].is_gathered_with(linear)? => {
                        last.layers.push(at);
                    }
                    _ => all.push(Self {
                        phase,
                        layers: vec![at],
                        plans: Mutex::default(),
                    }),
                }
            }
        }
        Ok(all)
    }

    /// Decodes them where they are for `phase`. With the last one their codes are used, and what was gathered is free.
    pub(super) fn run<R: Recipe>(
        &self,
        phase: Phase,
        linears: &[&Linear<R>],
        Shared { cuda, trace, .. }: &Shared,
    ) -> Result<(), TransformerError> {
        let Some((&last, before)) = self.layers.split_last() else {
            return Ok(());
        };
        if self.phase != phase {
            return Ok(());
        }
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let mut jobs = Vec::new();
        for &at in before {
            linears[at].with_gathered(phase, |job, set| {
                if !plans.iter().any(|(of, _)| *of == set) {
                    jobs.push(job()?);
                }
                Ok(())
            })?;
        }
        linears[last].with_gathered(phase, |job, set| {
            trace.mark(|| GATHERS.to_owned())?;
            let plan = match plans.iter().find(|(of, _)| *of == set) {
                Some((_, plan)) => plan.clone(),
                None => {
                    jobs.push(job()?);
                    let plan = cuda.plan(Work::Decode(jobs))?;
                    plans.push((set, plan.clone()));
                    plan
                }
            };
            cuda.run(&plan, &StepScalars::default())?;
            Ok(trace.mark(|| "decode of weights".to_owned())?)
        })
    }
}

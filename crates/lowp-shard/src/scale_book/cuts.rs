//! [`Cuts`]: an agreement on parts of the observed vector.

use std::ops::Range;

use lowp_comm::{CommError, Communicator, ordered};
use lowp_kernels::{Backend, ConvertJob, KernelError, Source, StepScalars, Work};

/// The parts that ranks agree on, brought together for one reduction.
#[derive(Debug)]
pub(super) struct Cuts<B: Backend> {
    together: B::Buffer<f32>,
    collect: B::Plan,
    spread: B::Plan,
}

impl<B: Backend> Cuts<B> {
    /// An agreement on `ranges` of `observed`.
    pub(super) fn new(
        backend: &B,
        observed: &B::Buffer<f32>,
        ranges: &[Range<usize>],
    ) -> Result<Self, KernelError> {
        let together = backend.alloc::<f32>(ranges.iter().map(Range::len).sum())?;
        let (mut collect, mut spread, mut start) = (Vec::new(), Vec::new(), 0);
        for range in ranges {
            let there = Source::F32(backend.view::<f32>(observed, range.clone())?);
            let here = Source::F32(backend.view::<f32>(&together, start..start + range.len())?);
            start += range.len();
            let job = |from: &Source<B>, into: &Source<B>| ConvertJob {
                from: from.clone(),
                into: into.clone(),
            };
            collect.push(job(&there, &here));
            spread.push(job(&here, &there));
        }
        Ok(Self {
            together,
            collect: backend.plan(Work::Convert(collect))?,
            spread: backend.plan(Work::Convert(spread))?,
        })
    }

    /// Makes the parts of `observed` their maxima over the ranks.
    pub(super) fn agree(&self, backend: &B, comm: &dyn Communicator<B>) -> Result<(), CommError> {
        if backend.len::<f32>(&self.together) == 0 {
            return Ok(());
        }
        backend.run(&self.collect, &StepScalars::default())?;
        ordered(backend, comm, || comm.all_reduce_max(&self.together))?;
        Ok(backend.run(&self.spread, &StepScalars::default())?)
    }
}

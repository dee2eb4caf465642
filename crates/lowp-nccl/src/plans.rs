//! Runs of plans that read no scalars of a step.

use lowp_comm::CommError;
use lowp_kernels::{Backend, Cuda, CudaPlan, StepScalars};

pub(crate) fn run(cuda: &Cuda, plan: &CudaPlan) -> Result<(), CommError> {
    Ok(cuda.run(plan, &StepScalars::default())?)
}

pub(crate) fn run_if(cuda: &Cuda, plan: Option<&CudaPlan>) -> Result<(), CommError> {
    plan.map_or(Ok(()), |plan| run(cuda, plan))
}

//! Global gradient norm over shards, and the factor that clips it.

use lowp_kernels::{Backend, Source, StepScalars, SumSquaresJob, Work};
use lowp_shard::{Communicator, ShardError};

use crate::OptimError;

/// Euclidean norm and count of non-finite values of all gradients of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradNorm {
    /// The norm; not finite if a gradient is not.
    pub norm: f64,
    /// Non-finite gradient values.
    pub non_finite: u64,
}

/// The factor that brings `norm` down to `max_norm`: `max_norm / (norm + 1e-6)`, at most 1.
pub fn clip_factor(norm: f64, max_norm: f32) -> f32 {
    (f64::from(max_norm) / (norm + 1e-6)).min(1.0) as f32
}

/// Measures the gradient norm, planned once.
#[derive(Debug)]
pub(crate) struct NormPlan<B: Backend> {
    plan: B::Plan,
    sums: Vec<B::Buffer<u8>>,
}

impl<B: Backend> NormPlan<B> {
    pub(crate) fn new(backend: &B, grads: &[Source<B>]) -> Result<Self, OptimError> {
        let mut sums = Vec::with_capacity(grads.len());
        let mut jobs = Vec::with_capacity(grads.len());
        for source in grads {
            let out = backend.alloc::<u8>(16)?;
            jobs.push(SumSquaresJob {
                source: source.clone(),
                out: out.clone(),
            });
            sums.push(out);
        }
        Ok(Self {
            plan: backend.plan(Work::SumSquares(jobs))?,
            sums,
        })
    }

    /// Sums are added in parameter order on each rank, then in rank order.
    pub(crate) fn measure(
        &self,
        backend: &B,
        comm: &dyn Communicator<B>,
    ) -> Result<GradNorm, OptimError> {
        for sum in &self.sums {
            backend.clear(sum)?;
        }
        backend.run(&self.plan, &StepScalars::default())?;
        let mut totals = [0.0f64; 2];
        let mut bytes = [0u8; 16];
        for sum in &self.sums {
            backend.read(sum, 0, &mut bytes)?;
            let [squares, count] = halves(&bytes);
            totals[0] += f64::from_le_bytes(squares);
            totals[1] += u64::from_le_bytes(count) as f64;
        }
        comm.all_reduce_sum_f64(&mut totals)
            .map_err(ShardError::from)?;
        Ok(GradNorm {
            norm: totals[0].sqrt(),
            non_finite: totals[1] as u64,
        })
    }
}

fn halves(bytes: &[u8; 16]) -> [[u8; 8]; 2] {
    let mut halves = [[0; 8]; 2];
    halves[0].copy_from_slice(&bytes[..8]);
    halves[1].copy_from_slice(&bytes[8..]);
    halves
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_norms_are_left_alone() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(0.0, 1.0), 1.0);
    }

    #[test]
    fn large_norms_come_down_to_the_bound() {
        let factor = clip_factor(8.0, 2.0);
        assert!((f64::from(factor) * 8.0 - 2.0).abs() < 1e-5);
    }
}

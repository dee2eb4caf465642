//! Global gradient norm over shards, and the factor that clips it.

use lowp_kernels::{Backend, Source, StepScalars, SumSquaresJob, Work};

use crate::OptimError;

/// Euclidean norm and count of non-finite values of all gradients of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradNorm {
    /// The norm over the shards; not finite if a gradient of this replica is not. Squares are
    /// exact and sums are taken in binary64: on each rank in parameter order, then in rank order.
    pub norm: f64,
    /// Non-finite gradient values of all ranks; one that every replica holds counts in each.
    pub non_finite: u64,
}

/// The factor that brings `norm` down to `max_norm`: `max_norm / (norm + 1e-6)`, at most 1.
/// Evaluated in binary64 and rounded once.
pub fn clip_factor(norm: f64, max_norm: f32) -> f32 {
    (f64::from(max_norm) / (norm + 1e-6)).min(1.0) as f32
}

/// Measures the gradient norm, planned once: one operation, one download.
#[derive(Debug)]
pub(crate) struct NormPlan<B: Backend> {
    plan: B::Plan,
    sum: B::Buffer<u8>,
}

impl<B: Backend> NormPlan<B> {
    pub(crate) fn new(backend: &B, grads: &[Source<B>]) -> Result<Self, OptimError> {
        let sum = backend.alloc::<u8>(16)?;
        let jobs = grads.iter().map(|source| SumSquaresJob {
            source: source.clone(),
            out: sum.clone(),
        });
        Ok(Self {
            plan: backend.plan(Work::SumSquares(jobs.collect()))?,
            sum,
        })
    }

    /// This rank's sum of squares and number of non-finite values, added in parameter order.
    pub(crate) fn local(&self, backend: &B) -> Result<[f64; 2], OptimError> {
        backend.clear(&self.sum)?;
        backend.run(&self.plan, &StepScalars::default())?;
        let mut bytes = [0u8; 16];
        backend.read(&self.sum, 0, &mut bytes)?;
        let [squares, count] = halves(&bytes);
        Ok([
            f64::from_le_bytes(squares),
            u64::from_le_bytes(count) as f64,
        ])
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

//! Cross entropy of next-token logits, summed over a rank's tokens and divided by the tokens of the whole batch.

use super::math::{exp, max8, sum8};
use super::{Saved, saved};
use crate::custom_op::{output, values};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use lowp_train::Batch;
use std::sync::Arc;

/// Operand: logits `[tokens, vocab]`; result: the scalar `sum_t(-log softmax(logits[t])[target[t]]) / divisor`, over the targets that
/// count.
///
/// With the global token count as divisor, the losses and gradients of the ranks of a data-parallel group sum to
/// those of one rank that sees the whole batch.
#[derive(Debug)]
pub(crate) struct CrossEntropy {
    targets: Arc<[u32]>,
    divisor: usize,
    dlogits: Saved,
}

impl CrossEntropy {
    /// Targets, one per row of the logits, and the number of tokens that the sum is divided by.
    pub(crate) fn new(targets: Arc<[u32]>, divisor: usize) -> Self {
        Self {
            targets,
            divisor,
            dlogits: Saved::default(),
        }
    }
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let logits = values(storage, layout, self.name())?;
        let (tokens, vocab) = layout.shape().dims2()?;
        let counts = |target: u32| target != Batch::IGNORED;
        let known = |&target: &u32| !counts(target) || (target as usize) < vocab;
        if tokens != self.targets.len() || !self.targets.iter().all(known) {
            candle_core::bail!(
                "cross_entropy: {tokens}x{vocab} logits for {} targets",
                self.targets.len()
            );
        }
        let weight = 1.0 / self.divisor as f32;
        let mut total = 0.0f64;
        let mut dlogits = vec![0.0; logits.len()];
        let rows = logits
            .chunks_exact(vocab)
            .zip(dlogits.chunks_exact_mut(vocab));
        let rows = rows.zip(self.targets.iter());
        for ((x, d), &target) in rows.filter(|(_, target)| counts(**target)) {
            let target = target as usize;
            let max = max8(x);
            for i in 0..vocab {
                d[i] = exp(x[i] - max);
            }
            let sum = sum8(vocab, |i| d[i]);
            let scale = weight / sum;
            for v in d.iter_mut() {
                *v *= scale;
            }
            d[target] -= weight;
            total += f64::from(sum).ln() + f64::from(max - x[target]);
        }
        *saved(&self.dlogits, self.name())? = dlogits;
        #[allow(
            clippy::cast_possible_truncation,
            reason = "f64 sum, one rounding: the loss of a split batch stays within an ulp of the unsplit one"
        )]
        let loss = (total / self.divisor as f64) as f32;
        Ok(output(vec![loss], ()))
    }

    fn bwd(&self, arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let g = grad.to_scalar::<f32>()?;
        let mut d = std::mem::take(&mut *saved(&self.dlogits, self.name())?);
        if d.len() != arg.elem_count() {
            candle_core::bail!("cross_entropy: its gradient was already taken");
        }
        if g != 1.0 {
            d.iter_mut().for_each(|v| *v *= g);
        }
        Tensor::from_vec(d, arg.shape(), arg.device()).map(Some)
    }
}

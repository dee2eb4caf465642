//! The loss of a model's head: for some tokens at a time, logits are in memory and become gradients.

use super::math::{exp, max8, sum8};
use super::{Saved, saved};
use crate::custom_op::{output, values};
use crate::{MatMut, MatRef, WeightSource, matmul, product};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use lowp_format::Phase;
use lowp_train::Batch;
use std::mem;
use std::sync::Arc;

/// Logits in memory at a time.
pub(crate) const LOGITS: usize = 1 << 24;

/// Operand: `x [tokens, dim]`; with the head `w [vocab, dim]`, whose gradient goes to its source, the result is the scalar
/// `sum_t(-log softmax(x[t] w^T)[target[t]]) / divisor`, over the targets that count.
///
/// With the global token count as divisor, the losses and gradients of the ranks of a data-parallel group sum to
/// those of one rank that sees the whole batch.
#[derive(Debug)]
pub(crate) struct HeadLoss {
    head: Arc<dyn WeightSource>,
    targets: Arc<[u32]>,
    divisor: usize,
    /// Coefficient of the squared logarithm of a softmax's sum, in gradients alone.
    z_loss: f32,
    /// Tokens whose logits are in memory at a time.
    rows: usize,
    threads: usize,
    /// Of `x` and of the head, where they are wanted.
    gradients: Option<[Saved; 2]>,
}

/// What the loss is divided by, its z-loss, and whether gradients follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LossOptions {
    pub(crate) divisor: usize,
    pub(crate) z_loss: f32,
    pub(crate) gradients: bool,
}

impl HeadLoss {
    /// Targets, one per row of `x`; products use at most `threads` threads, and at most `logits` logits are in memory, but at least one
    /// token's.
    pub(crate) fn new(
        head: Arc<dyn WeightSource>,
        targets: Arc<[u32]>,
        options: LossOptions,
        threads: usize,
        logits: usize,
    ) -> Self {
        let (vocab, _) = head.shape();
        Self {
            head,
            targets,
            divisor: options.divisor,
            z_loss: options.z_loss,
            rows: (logits / vocab.max(1)).max(1),
            threads,
            gradients: options.gradients.then(<[Saved; 2]>::default),
        }
    }

    /// The losses of rows of logits, which become their gradients.
    fn rows(&self, logits: &mut [f32], targets: &[u32], vocab: usize) -> f64 {
        let weight = 1.0 / self.divisor as f32;
        let mut total = 0.0;
        for (row, &target) in logits.chunks_exact_mut(vocab).zip(targets) {
            if target == Batch::IGNORED {
                row.fill(0.0);
                continue;
            }
            let target = target as usize;
            let (max, own) = (max8(row), row[target]);
            for value in row.iter_mut() {
                *value = exp(*value - max);
            }
            let sum = sum8(vocab, |i| row[i]);
            let log = f64::from(sum).ln();
            total += log + f64::from(max - own);
            #[allow(clippy::cast_possible_truncation, reason = "a factor of f32 gradients")]
            let z = 2.0 * self.z_loss * (log + f64::from(max)) as f32;
            let scale = weight * (1.0 + z) / sum;
            for value in row.iter_mut() {
                *value *= scale;
            }
            row[target] -= weight;
        }
        total
    }
}

impl CustomOp1 for HeadLoss {
    fn name(&self) -> &'static str {
        "head_loss"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, dim) = layout.shape().dims2()?;
        let (vocab, width) = self.head.shape();
        let known = |&id: &u32| id == Batch::IGNORED || (id as usize) < vocab;
        if dim != width || tokens != self.targets.len() || !self.targets.iter().all(known) {
            candle_core::bail!(
                "head_loss: {tokens}x{dim} input with a {vocab}x{width} head for {} targets",
                self.targets.len()
            );
        }
        let x = values(storage, layout, self.name())?;
        let [mut dx, mut dw] = match self.gradients {
            Some(_) => [vec![0.0; tokens * dim], vec![0.0; vocab * dim]],
            None => [Vec::new(), Vec::new()],
        };
        let mut total = 0.0;
        self.head.with_weight(Phase::Forward, &mut |w| {
            let head = MatRef::new(w, vocab, dim);
            for (number, targets) in self.targets.chunks(self.rows).enumerate() {
                let (begin, rows) = (number * self.rows * dim, targets.len());
                let x = MatRef::new(&x[begin..begin + rows * dim], rows, dim);
                let mut logits = product(x, head.t(), self.threads);
                total += self.rows(&mut logits, targets, vocab);
                if self.gradients.is_some() {
                    let d = MatRef::new(&logits, rows, vocab);
                    let dx = MatMut::new(&mut dx[begin..begin + rows * dim], rows, dim);
                    matmul(dx, false, 1.0, d, head, self.threads);
                    let dw = MatMut::new(&mut dw, vocab, dim);
                    matmul(dw, number > 0, 1.0, d.t(), x, self.threads);
                }
            }
            Ok(())
        })?;
        if let Some([of_x, of_w]) = &self.gradients {
            *saved(of_x, self.name())? = dx;
            *saved(of_w, self.name())? = dw;
        }
        #[allow(
            clippy::cast_possible_truncation,
            reason = "f64 sum, one rounding: the loss of a split batch stays within an ulp of the unsplit one"
        )]
        let loss = (total / self.divisor as f64) as f32;
        Ok(output(vec![loss], ()))
    }

    fn bwd(&self, x: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let g = grad.to_scalar::<f32>()?;
        let Some([of_x, of_w]) = &self.gradients else {
            candle_core::bail!("head_loss: no gradients were asked for");
        };
        let take = |state| Ok::<_, candle_core::Error>(mem::take(&mut *saved(state, self.name())?));
        let mut gradients = [take(of_x)?, take(of_w)?];
        let (vocab, dim) = self.head.shape();
        if gradients[0].len() != x.elem_count() || gradients[1].len() != vocab * dim {
            candle_core::bail!(
                "head_loss: its gradients were taken; run forward again before a second backward"
            );
        }
        if g != 1.0 {
            gradients.iter_mut().flatten().for_each(|value| *value *= g);
        }
        let [dx, dw] = gradients;
        self.head.sink_gradient(dw)?;
        Tensor::from_vec(dx, x.shape(), x.device()).map(Some)
    }
}

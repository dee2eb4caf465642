//! Normalisation by the root mean square over the last axis, with a learned scale.

use super::math::sum8;
use super::{Saved, saved};
use crate::custom_op::{output, values, with_values};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

/// `y = x / sqrt(mean(x^2) + eps) * gamma` per row; operands: `x`, `gamma`.
#[derive(Debug)]
pub(crate) struct RmsNorm {
    /// What is added to the mean of squares.
    eps: f32,
    /// Reciprocal root mean square of each row.
    stats: Saved,
}

impl RmsNorm {
    /// The norm that adds `eps` to the mean of squares.
    pub(crate) fn new(eps: f32) -> Self {
        Self {
            eps,
            stats: Saved::default(),
        }
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = values(s1, l1, self.name())?;
        let gamma = values(s2, l2, self.name())?;
        let n = gamma.len();
        let mut y = vec![0.0; x.len()];
        let mut stats = saved(&self.stats, self.name())?;
        stats.clear();
        for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            let mean = sum8(n, |i| x[i] * x[i]) / n as f32;
            let inv = 1.0 / (mean + self.eps).sqrt();
            stats.push(inv);
            for i in 0..n {
                y[i] = x[i] * inv * gamma[i];
            }
        }
        Ok(output(y, l1.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gamma: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let name = self.name();
        let n = gamma.elem_count();
        let stats = saved(&self.stats, name)?;
        let mut dx = vec![0.0; x.elem_count()];
        let mut dgamma = vec![0.0; n];
        with_values([x, gamma, grad], name, |[x, gamma, grad]| {
            let rows = x.chunks_exact(n).zip(grad.chunks_exact(n));
            for ((x, g), (dx, &inv)) in rows.zip(dx.chunks_exact_mut(n).zip(stats.iter())) {
                for i in 0..n {
                    dgamma[i] += g[i] * x[i] * inv;
                }
                let along = sum8(n, |i| g[i] * gamma[i] * x[i]) / n as f32;
                let scale = along * inv * inv;
                for i in 0..n {
                    dx[i] = inv * (g[i] * gamma[i] - x[i] * scale);
                }
            }
            Ok(())
        })?;
        let device = x.device();
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), device)?),
            Some(Tensor::from_vec(dgamma, n, device)?),
        ))
    }
}

//! Layer normalisation over the last axis with a learned scale and shift.

use super::math::sum8;
use super::{Saved, saved};
use crate::custom_op::{output, values, with_values};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};

/// `y = (x - mean) / sqrt(var + 1e-5) * gamma + beta` per row; operands: `x`, `gamma`, `beta`.
#[derive(Debug, Default)]
pub(crate) struct LayerNorm {
    /// Mean and reciprocal standard deviation of each row.
    stats: Saved,
}

const EPSILON: f32 = 1e-5;

impl CustomOp3 for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = values(s1, l1, self.name())?;
        let gamma = values(s2, l2, self.name())?;
        let beta = values(s3, l3, self.name())?;
        let n = gamma.len();
        let mut y = vec![0.0; x.len()];
        let mut stats = saved(&self.stats, self.name())?;
        stats.clear();
        for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            let mean = sum8(n, |i| x[i]) / n as f32;
            let var = sum8(n, |i| (x[i] - mean) * (x[i] - mean)) / n as f32;
            let inv = 1.0 / (var + EPSILON).sqrt();
            stats.extend([mean, inv]);
            for i in 0..n {
                y[i] = (x[i] - mean) * inv * gamma[i] + beta[i];
            }
        }
        Ok(output(y, l1.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gamma: &Tensor,
        _beta: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let name = self.name();
        let n = gamma.elem_count();
        let stats = saved(&self.stats, name)?;
        let mut dx = vec![0.0; x.elem_count()];
        let (mut dgamma, mut dbeta) = (vec![0.0; n], vec![0.0; n]);
        let mut xhat = vec![0.0; n];
        with_values([x, gamma, grad], name, |[x, gamma, grad]| {
            let rows = x.chunks_exact(n).zip(grad.chunks_exact(n));
            let outs = dx.chunks_exact_mut(n).zip(stats.chunks_exact(2));
            for ((x, g), (dx, stat)) in rows.zip(outs) {
                let (mean, inv) = (stat[0], stat[1]);
                for i in 0..n {
                    xhat[i] = (x[i] - mean) * inv;
                    dgamma[i] += g[i] * xhat[i];
                    dbeta[i] += g[i];
                }
                let a = sum8(n, |i| g[i] * gamma[i]) / n as f32;
                let b = sum8(n, |i| g[i] * gamma[i] * xhat[i]) / n as f32;
                for i in 0..n {
                    dx[i] = inv * (g[i] * gamma[i] - a - xhat[i] * b);
                }
            }
            Ok(())
        })?;
        let device = x.device();
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), device)?),
            Some(Tensor::from_vec(dgamma, n, device)?),
            Some(Tensor::from_vec(dbeta, n, device)?),
        ))
    }
}

//! Rotary position embedding, with the two halves of a head as the parts of complex numbers.

use crate::custom_op::{output, values, with_values};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use std::sync::Arc;

/// Operand: `[sequences * seq, heads * head_dim]`. Of each head the elements `i` and `i + head_dim / 2` turn by the angle of their position
/// and pair.
#[derive(Clone, Debug)]
pub(crate) struct Rotary {
    /// Heads side by side in a row.
    pub(crate) heads: usize,
    /// Tokens per sequence.
    pub(crate) seq: usize,
    /// Cosine and sine of each position and pair.
    pub(crate) angles: Arc<[[f32; 2]]>,
}

impl Rotary {
    /// `x` turned by the angles times `sign`.
    fn turned(&self, x: &[f32], width: usize, sign: f32) -> Vec<f32> {
        let dim = width / self.heads;
        let half = dim / 2;
        let mut y = vec![0.0; x.len()];
        let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width));
        for (token, (x, y)) in rows.enumerate() {
            let angles = &self.angles[token % self.seq * half..][..half];
            for (x, y) in x.chunks_exact(dim).zip(y.chunks_exact_mut(dim)) {
                for (i, [cos, sin]) in angles.iter().enumerate() {
                    let sin = sign * sin;
                    y[i] = x[i] * cos - x[i + half] * sin;
                    y[i + half] = x[i + half] * cos + x[i] * sin;
                }
            }
        }
        y
    }
}

impl CustomOp1 for Rotary {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, width) = layout.shape().dims2()?;
        let (heads, seq) = (self.heads, self.seq);
        let pairs = seq * width / (2 * heads);
        if width % (2 * heads) != 0 || tokens % seq != 0 || self.angles.len() != pairs {
            bail!(
                "rotary: {tokens}x{width} for {heads} heads of even length and sequences of {seq}"
            );
        }
        let x = values(storage, layout, self.name())?;
        Ok(output(self.turned(x, width, 1.0), layout.shape().clone()))
    }

    /// The other way round.
    fn bwd(&self, arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let width = arg.dim(1)?;
        let dx = with_values([grad], self.name(), |[g]| Ok(self.turned(g, width, -1.0)))?;
        Tensor::from_vec(dx, arg.shape(), arg.device()).map(Some)
    }
}

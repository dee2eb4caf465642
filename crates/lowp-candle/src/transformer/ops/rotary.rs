//! Rotary position embedding, with the two halves of a head as the parts of complex numbers.

use crate::custom_op::{output, values, with_values};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

/// Operand: `[sequences * seq, heads * head_dim]`. Of each head the elements `i` and `i + head_dim / 2` turn by the angle
/// `position * theta^(-2 i / head_dim)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotary {
    /// Heads side by side in a row.
    pub(crate) heads: usize,
    /// Tokens per sequence.
    pub(crate) seq: usize,
}

impl Rotary {
    /// The base of the angles.
    pub(crate) const THETA: f32 = 10_000.0;

    /// `x` turned by the angles times `sign`.
    fn turned(&self, x: &[f32], width: usize, sign: f32) -> Vec<f32> {
        let dim = width / self.heads;
        let half = dim / 2;
        // In f64, as angles of late positions are large.
        let frequency = |i: usize| f64::from(Self::THETA).powf(-2.0 * i as f64 / dim as f64);
        let angles: Vec<[f32; 2]> = (0..self.seq)
            .flat_map(|position| (0..half).map(move |i| position as f64 * frequency(i)))
            .map(|angle| [angle.cos() as f32, sign * angle.sin() as f32])
            .collect();
        let mut y = vec![0.0; x.len()];
        let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width));
        for (token, (x, y)) in rows.enumerate() {
            let angles = &angles[token % self.seq * half..][..half];
            for (x, y) in x.chunks_exact(dim).zip(y.chunks_exact_mut(dim)) {
                for (i, [cos, sin]) in angles.iter().enumerate() {
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
        if width % (2 * heads) != 0 || tokens % seq != 0 {
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
        let dx = with_values(grad, self.name(), |g| Ok(self.turned(g, width, -1.0)))?;
        Tensor::from_vec(dx, arg.shape(), arg.device()).map(Some)
    }
}

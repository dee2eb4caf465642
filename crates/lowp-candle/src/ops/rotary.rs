//! Rotary position embedding (RoPE) of queries and keys.

use super::{output, values, with_values};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

/// Wavelengths grow from `2 pi` tokens to `2 pi` times this.
const BASE: f64 = 10_000.0;

/// Operand and result: `[sequences * seq, 3 * dim]`, each row query, key and value of one token, heads side by side
/// inside each. Queries and keys turn by an angle that grows with their position, so that their product depends on the
/// distance between two tokens; values stay.
///
/// Feature `i` of a head is paired with feature `i + head_dim / 2`, and at position `t` the pair turns by
/// `t * 10000^(-2 i / head_dim)`. Angles are computed in binary64.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// Attention heads; the features of one are an even number.
    pub heads: usize,
    /// Tokens per sequence.
    pub seq: usize,
}

impl Rotary {
    /// Turns a copy of `x`, backwards if `back`.
    fn turn(self, x: &[f32], shape: &Shape, back: bool) -> Result<Vec<f32>> {
        let (tokens, width) = shape.dims2()?;
        let Self { heads, seq } = self;
        let dim = width / 3;
        if width != 3 * dim
            || heads == 0
            || !dim.is_multiple_of(2 * heads)
            || seq == 0
            || !tokens.is_multiple_of(seq)
        {
            candle_core::bail!(
                "rotary embedding: {tokens}x{width} operand for {heads} heads of even width and sequences of {seq}"
            );
        }
        let half = dim / heads / 2;
        let angle = |t: usize, i: usize| t as f64 * BASE.powf(-(i as f64) / half as f64);
        let table: Vec<[f32; 2]> = (0..seq)
            .flat_map(|t| (0..half).map(move |i| angle(t, i)))
            .map(|a| [a.cos() as f32, if back { -a.sin() } else { a.sin() } as f32])
            .collect();
        let mut y = x.to_vec();
        for (t, row) in y.chunks_exact_mut(width).enumerate() {
            let turns = &table[t % seq * half..][..half];
            for head in row[..2 * dim].chunks_exact_mut(2 * half) {
                let (first, second) = head.split_at_mut(half);
                for ((a, b), &[cos, sin]) in first.iter_mut().zip(second).zip(turns) {
                    (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
                }
            }
        }
        Ok(y)
    }
}

impl CustomOp1 for Rotary {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = values(storage, layout, self.name())?;
        let shape = layout.shape();
        Ok(output(self.turn(x, shape, false)?, shape.dims()))
    }

    fn bwd(&self, arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let turned = with_values(grad, self.name(), |g| self.turn(g, arg.shape(), true))?;
        Tensor::from_vec(turned, arg.shape(), arg.device()).map(Some)
    }
}

//! Causal multi-head self-attention over the fused query, key and value projection.

use super::math::{exp, max8, sum8};
use super::{Saved, saved};
use crate::custom_op::{output, values, with_values};
use crate::{MatMut, MatRef, matmul};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// Query rows handled at once; keys beyond the last of them are masked and never computed.
const QUERY_BLOCK: usize = 64;

/// Operand: `[sequences * seq, 3 * dim]`, each row query, key and value of one token, heads side by side inside each;
/// result: `[sequences * seq, dim]`.
#[derive(Debug)]
pub(crate) struct CausalAttention {
    heads: usize,
    seq: usize,
    seen: Seen,
    /// Softmax probabilities, `[sequences, heads, seq, seq]`.
    probs: Saved,
}

/// Which positions before its own a token sees.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// The last of them, its own included; all where there is no number.
    pub(crate) window: Option<usize>,
    /// For each token of the batch the first position of its sequence that it sees.
    pub(crate) first: Option<Arc<[u32]>>,
}

impl Seen {
    /// The first position that token `token` of the batch sees, which has position `row` in its sequence.
    fn first(&self, token: usize, row: usize) -> usize {
        let window = self
            .window
            .map_or(0, |window| (row + 1).saturating_sub(window));
        let first = self.first.as_ref().map_or(0, |first| first[token] as usize);
        window.max(first).min(row)
    }
}

/// Where one head of one sequence lies.
struct Head {
    /// The number of its first token in the batch.
    token: usize,
    /// Offset of its queries in the operand; keys and values follow `dim` and `2 * dim` later.
    qkv: usize,
    /// Offset of its rows in the result.
    out: usize,
    /// Offset of its probabilities.
    probs: usize,
}

struct Geometry {
    dim: usize,
    head_dim: usize,
    scale: f32,
    heads: Vec<Head>,
}

impl CausalAttention {
    /// `heads` heads over sequences of `seq` tokens.
    pub(crate) fn new(heads: usize, seq: usize, seen: Seen) -> Self {
        Self {
            heads,
            seq,
            seen,
            probs: Saved::default(),
        }
    }

    fn geometry(&self, shape: &Shape) -> Result<Geometry> {
        let (tokens, width) = shape.dims2()?;
        let dim = width / 3;
        if width != 3 * dim || dim % self.heads != 0 || tokens % self.seq != 0 {
            candle_core::bail!(
                "attention: {tokens}x{width} operand for {} heads and sequences of {}",
                self.heads,
                self.seq
            );
        }
        let head_dim = dim / self.heads;
        let mut heads = Vec::with_capacity(tokens / self.seq * self.heads);
        for b in 0..tokens / self.seq {
            for h in 0..self.heads {
                heads.push(Head {
                    token: b * self.seq,
                    qkv: b * self.seq * width + h * head_dim,
                    out: b * self.seq * dim + h * head_dim,
                    probs: (b * self.heads + h) * self.seq * self.seq,
                });
            }
        }
        Ok(Geometry {
            dim,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            heads,
        })
    }

    /// First query row, number of rows and number of visible keys of each block of query rows.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let seq = self.seq;
        (0..seq).step_by(QUERY_BLOCK).map(move |first| {
            let rows = QUERY_BLOCK.min(seq - first);
            (first, rows, first + rows)
        })
    }
}

impl CustomOp1 for CausalAttention {
    fn name(&self) -> &'static str {
        "causal_attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = values(storage, layout, self.name())?;
        let geo = self.geometry(layout.shape())?;
        let (seq, dim, hd) = (self.seq, geo.dim, geo.head_dim);
        let tokens = layout.shape().dims()[0];
        if let Some(first) = self.seen.first.as_ref().filter(|f| f.len() != tokens) {
            candle_core::bail!(
                "attention: {tokens} tokens with {} first positions",
                first.len()
            );
        }
        let mut out = vec![0.0; tokens * dim];
        let mut probs = vec![0.0; geo.heads.len() * seq * seq];
        for head in &geo.heads {
            let p = &mut probs[head.probs..][..seq * seq];
            for (first, rows, keys) in self.blocks() {
                let q = MatRef::strided(x, head.qkv + first * 3 * dim, rows, hd, 3 * dim);
                let k = MatRef::strided(x, head.qkv + dim, keys, hd, 3 * dim);
                let v = MatRef::strided(x, head.qkv + 2 * dim, keys, hd, 3 * dim);
                let scores = MatMut::strided(p, first * seq, rows, keys, seq);
                matmul(scores, false, geo.scale, q, k.t(), 1);
                for row in first..first + rows {
                    let first = self.seen.first(head.token + row, row);
                    softmax_of(&mut p[row * seq..][..keys], first..row + 1);
                }
                let weights = MatRef::strided(p, first * seq, rows, keys, seq);
                let o = MatMut::strided(&mut out, head.out + first * dim, rows, hd, dim);
                matmul(o, false, 1.0, weights, v, 1);
            }
        }
        *saved(&self.probs, self.name())? = probs;
        Ok(output(out, (tokens, dim)))
    }

    fn bwd(&self, arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let geo = self.geometry(arg.shape())?;
        let (seq, dim, hd) = (self.seq, geo.dim, geo.head_dim);
        let probs = saved(&self.probs, self.name())?;
        let mut dx = vec![0.0; arg.elem_count()];
        let mut ds = vec![0.0; seq * QUERY_BLOCK.min(seq)];
        with_values([arg, grad], self.name(), |[x, g]| {
            for head in &geo.heads {
                let p = &probs[head.probs..][..seq * seq];
                for (first, rows, keys) in self.blocks() {
                    let at = head.qkv + first * 3 * dim;
                    let q = MatRef::strided(x, at, rows, hd, 3 * dim);
                    let k = MatRef::strided(x, head.qkv + dim, keys, hd, 3 * dim);
                    let v = MatRef::strided(x, head.qkv + 2 * dim, keys, hd, 3 * dim);
                    let go = MatRef::strided(g, head.out + first * dim, rows, hd, dim);
                    let weights = MatRef::strided(p, first * seq, rows, keys, seq);
                    // dP = dO V^T, then in place dS = P * (dP - rowsum(dP * P)).
                    matmul(MatMut::new(&mut ds, rows, keys), false, 1.0, go, v.t(), 1);
                    for row in 0..rows {
                        let p = &p[(first + row) * seq..][..keys];
                        let d = &mut ds[row * keys..][..keys];
                        let dot = sum8(keys, |i| p[i] * d[i]);
                        for i in 0..keys {
                            d[i] = p[i] * (d[i] - dot);
                        }
                    }
                    let ds = MatRef::new(&ds, rows, keys);
                    let dq = MatMut::strided(&mut dx, at, rows, hd, 3 * dim);
                    matmul(dq, false, geo.scale, ds, k, 1);
                    let dk = MatMut::strided(&mut dx, head.qkv + dim, keys, hd, 3 * dim);
                    matmul(dk, true, geo.scale, ds.t(), q, 1);
                    let dv = MatMut::strided(&mut dx, head.qkv + 2 * dim, keys, hd, 3 * dim);
                    matmul(dv, true, 1.0, weights.t(), go, 1);
                }
            }
            Ok(())
        })?;
        Tensor::from_vec(dx, arg.shape(), arg.device()).map(Some)
    }
}

/// Softmax over the entries `visible` of a row; the masked others become zero.
#[inline]
fn softmax_of(row: &mut [f32], visible: Range<usize>) {
    let (head, masked) = row.split_at_mut(visible.end);
    masked.fill(0.0);
    let (masked, head) = head.split_at_mut(visible.start);
    masked.fill(0.0);
    let max = max8(head);
    for v in head.iter_mut() {
        *v = exp(*v - max);
    }
    let scale = 1.0 / sum8(head.len(), |i| head[i]);
    for v in head.iter_mut() {
        *v *= scale;
    }
}

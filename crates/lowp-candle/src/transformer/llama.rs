//! [`LlamaBlock`]: a transformer block as Llama has it.

use super::block::Block;
use super::ops::{CausalAttention, RmsNorm, Rotary, Seen, SwiGlu};
use candle_core::{Result, Tensor, Var};
use lowp_transformer::{GptConfig, Llama};
use std::sync::Arc;

use crate::Linear;

/// Attention with rotary positions, whose keys and values may serve several heads each, and a gated MLP; each after a norm by the root
/// mean square and added to the residual stream.
#[derive(Debug)]
pub(crate) struct LlamaBlock {
    pub(super) config: GptConfig,
    pub(super) llama: Llama,
    /// Gamma of both.
    pub(super) norms: [Var; 2],
    /// Gamma of the norms of queries and keys, where they have some.
    pub(super) qk_norms: Option<[Var; 2]>,
    /// Of rotary positions.
    pub(super) angles: Arc<[[f32; 2]]>,
    /// Query, key, value and output.
    pub(super) attention: [Box<dyn Linear>; 4],
    /// Gate, up and down.
    pub(super) mlp: [Box<dyn Linear>; 3],
}

impl Block for LlamaBlock {
    fn forward(&self, x: &Tensor, first: Option<&Arc<[u32]>>) -> Result<Tensor> {
        let GptConfig { heads, seq, .. } = self.config;
        let kv_heads = self.llama.kv_heads;
        let seen = Seen {
            window: self.llama.window,
            first: first.cloned(),
        };
        let [query, key, value, out] = &self.attention;
        let h = self.norm(x, &self.norms[0])?;
        let q = self.turned(query.forward(&h)?, heads, 0)?;
        let k = self.for_all_heads(&self.turned(key.forward(&h)?, kv_heads, 1)?)?;
        let v = self.for_all_heads(&value.forward(&h)?)?;
        let h = Tensor::cat(&[q, k, v], 1)?.apply_op1(CausalAttention::new(heads, seq, seen))?;
        let x = (x + out.forward(&h)?)?;
        let [gate, up, down] = &self.mlp;
        let h = self.norm(&x, &self.norms[1])?;
        let h = gate.forward(&h)?.apply_op2(&up.forward(&h)?, SwiGlu)?;
        &x + down.forward(&h)?
    }

    fn vars(&self) -> Vec<&Var> {
        let [first, second] = &self.norms;
        let within = self.qk_norms.iter().flatten();
        [first].into_iter().chain(within).chain([second]).collect()
    }

    fn linears(&self) -> Vec<&dyn Linear> {
        let linears = self.attention.iter().chain(&self.mlp);
        linears.map(|linear| &**linear).collect()
    }
}

impl LlamaBlock {
    fn norm(&self, x: &Tensor, gamma: &Var) -> Result<Tensor> {
        x.apply_op2(gamma, RmsNorm::new(self.llama.eps))
    }

    /// Queries (`which` 0) or keys (1): each head normalized, if there is a norm, and rotated by its position.
    fn turned(&self, x: Tensor, heads: usize, which: usize) -> Result<Tensor> {
        let x = match &self.qk_norms {
            None => x,
            Some(gamma) => {
                let (tokens, width) = x.dims2()?;
                let x = x.reshape((tokens * heads, width / heads))?;
                self.norm(&x, &gamma[which])?.reshape((tokens, width))?
            }
        };
        x.apply_op1(Rotary {
            heads,
            seq: self.config.seq,
            angles: Arc::clone(&self.angles),
        })
    }

    /// Keys or values, repeated for each head that they serve.
    fn for_all_heads(&self, x: &Tensor) -> Result<Tensor> {
        let (heads, kv_heads) = (self.config.heads, self.llama.kv_heads);
        if heads == kv_heads {
            return Ok(x.clone());
        }
        let (tokens, width) = x.dims2()?;
        let dim = width / kv_heads;
        x.reshape((tokens, kv_heads, 1, dim))?
            .broadcast_as((tokens, kv_heads, heads / kv_heads, dim))?
            .reshape((tokens, heads * dim))
    }
}

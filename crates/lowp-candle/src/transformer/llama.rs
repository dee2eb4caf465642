//! [`LlamaBlock`]: a transformer block as Llama has it.

use super::block::Block;
use super::ops::{CausalAttention, RmsNorm, Rotary, SwiGlu};
use candle_core::{Result, Tensor, Var};
use lowp_transformer::GptConfig;

use crate::Linear;

/// Attention with rotary positions, whose keys and values may serve several heads each, and a gated MLP; each behind a norm by the root
/// mean square and added to the residual stream.
#[derive(Debug)]
pub(crate) struct LlamaBlock {
    pub(super) config: GptConfig,
    pub(super) kv_heads: usize,
    /// Gamma of both.
    pub(super) norms: [Var; 2],
    /// Query, key, value and output.
    pub(super) attention: [Box<dyn Linear>; 4],
    /// Gate, up and down.
    pub(super) mlp: [Box<dyn Linear>; 3],
}

impl Block for LlamaBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let GptConfig { heads, seq, .. } = self.config;
        let kv_heads = self.kv_heads;
        let norm = |x: &Tensor, gamma: &Var| x.apply_op2(gamma, RmsNorm::default());
        let [query, key, value, out] = &self.attention;
        let h = norm(x, &self.norms[0])?;
        let q = query.forward(&h)?.apply_op1(Rotary { heads, seq })?;
        let turn = Rotary {
            heads: kv_heads,
            seq,
        };
        let k = self.for_all_heads(&key.forward(&h)?.apply_op1(turn)?)?;
        let v = self.for_all_heads(&value.forward(&h)?)?;
        let h = Tensor::cat(&[q, k, v], 1)?.apply_op1(CausalAttention::new(heads, seq))?;
        let x = (x + out.forward(&h)?)?;
        let [gate, up, down] = &self.mlp;
        let h = norm(&x, &self.norms[1])?;
        let h = gate.forward(&h)?.apply_op2(&up.forward(&h)?, SwiGlu)?;
        &x + down.forward(&h)?
    }

    fn vars(&self) -> Vec<&Var> {
        self.norms.iter().collect()
    }
}

impl LlamaBlock {
    /// Keys or values, repeated for each head that they serve.
    fn for_all_heads(&self, x: &Tensor) -> Result<Tensor> {
        let (heads, kv_heads) = (self.config.heads, self.kv_heads);
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

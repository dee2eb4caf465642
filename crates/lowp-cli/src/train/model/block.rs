//! [`Block`]: one transformer block.

use super::config::GptConfig;
use super::ops::{CausalAttention, Gelu, LayerNorm};
use candle_core::{Result, Tensor, Var};
use lowp_candle::Linear;

/// Attention and MLP, each behind a norm and added to the residual stream.
#[derive(Debug)]
pub(crate) struct Block {
    pub(super) config: GptConfig,
    /// Gamma and beta of both.
    pub(super) norms: [[Var; 2]; 2],
    pub(super) qkv: Box<dyn Linear>,
    pub(super) proj: Box<dyn Linear>,
    pub(super) fc: Box<dyn Linear>,
    pub(super) out: Box<dyn Linear>,
}

impl Block {
    /// The residual stream `x` behind this block, `[tokens, dim]`.
    ///
    /// # Errors
    /// What a linear layer reports.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let GptConfig { heads, seq, .. } = self.config;
        let [first, second] = &self.norms;
        let norm =
            |x: &Tensor, [gamma, beta]: &[Var; 2]| x.apply_op3(gamma, beta, LayerNorm::default());
        let attention = CausalAttention::new(heads, seq);
        let h = self.qkv.forward(&norm(x, first)?)?.apply_op1(attention)?;
        let x = (x + self.proj.forward(&h)?)?;
        let h = self.fc.forward(&norm(&x, second)?)?.apply_op1(Gelu)?;
        &x + self.out.forward(&h)?
    }

    /// Its variables.
    pub(crate) fn vars(&self) -> impl Iterator<Item = &Var> {
        self.norms.iter().flatten()
    }
}

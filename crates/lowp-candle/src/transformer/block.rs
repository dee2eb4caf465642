//! [`Block`]: one transformer block, and [`GptBlock`], that of GPT-2.

use super::ops::{CausalAttention, Gelu, LayerNorm, Seen};
use candle_core::{Result, Tensor, Var};
use lowp_transformer::GptConfig;

use crate::Linear;
use std::fmt::Debug;
use std::sync::Arc;

/// A block over the residual stream.
pub(crate) trait Block: Debug + Send + Sync {
    /// The residual stream `x` after this block, `[tokens, dim]`, whose tokens see those of their sequence from `first` on, where that is
    /// given.
    ///
    /// # Errors
    /// What a linear layer reports.
    fn forward(&self, x: &Tensor, first: Option<&Arc<[u32]>>) -> Result<Tensor>;

    /// Its variables.
    fn vars(&self) -> Vec<&Var>;

    /// Its linear layers.
    fn linears(&self) -> Vec<&dyn Linear>;
}

/// Attention and MLP, each after a norm and added to the residual stream.
#[derive(Debug)]
pub(crate) struct GptBlock {
    pub(super) config: GptConfig,
    /// Gamma and beta of both.
    pub(super) norms: [[Var; 2]; 2],
    pub(super) qkv: Box<dyn Linear>,
    pub(super) proj: Box<dyn Linear>,
    pub(super) fc: Box<dyn Linear>,
    pub(super) out: Box<dyn Linear>,
}

impl Block for GptBlock {
    fn forward(&self, x: &Tensor, first: Option<&Arc<[u32]>>) -> Result<Tensor> {
        let seen = Seen {
            window: None,
            first: first.cloned(),
        };
        let GptConfig { heads, seq, .. } = self.config;
        let [before, second] = &self.norms;
        let norm =
            |x: &Tensor, [gamma, beta]: &[Var; 2]| x.apply_op3(gamma, beta, LayerNorm::default());
        let attention = CausalAttention::new(heads, seq, seen);
        let h = self.qkv.forward(&norm(x, before)?)?.apply_op1(attention)?;
        let x = (x + self.proj.forward(&h)?)?;
        let h = self.fc.forward(&norm(&x, second)?)?.apply_op1(Gelu)?;
        &x + self.out.forward(&h)?
    }

    fn vars(&self) -> Vec<&Var> {
        self.norms.iter().flatten().collect()
    }

    fn linears(&self) -> Vec<&dyn Linear> {
        vec![&*self.qkv, &*self.proj, &*self.fc, &*self.out]
    }
}

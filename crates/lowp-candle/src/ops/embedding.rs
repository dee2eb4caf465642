//! Token embedding.

use super::{output, values, with_values};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use std::sync::Arc;

/// `y[t] = tokens[id[t]]`; operand: the token table, a row per token.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// Token ids, each below the number of rows of the token table.
    pub ids: Arc<[u8]>,
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let tokens = values(storage, layout, self.name())?;
        let (vocab, dim) = layout.shape().dims2()?;
        if let Some(id) = self.ids.iter().find(|&&id| usize::from(id) >= vocab) {
            candle_core::bail!("embedding: token {id} of a vocabulary of {vocab}");
        }
        let mut y = Vec::with_capacity(self.ids.len() * dim);
        for &id in self.ids.iter() {
            y.extend_from_slice(&tokens[usize::from(id) * dim..][..dim]);
        }
        Ok(output(y, (self.ids.len(), dim)))
    }

    fn bwd(&self, tokens: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let dim = tokens.dim(1)?;
        let mut dtokens = vec![0.0; tokens.elem_count()];
        with_values(grad, self.name(), |grad| {
            for (&id, g) in self.ids.iter().zip(grad.chunks_exact(dim)) {
                let token = &mut dtokens[usize::from(id) * dim..][..dim];
                for (sum, g) in token.iter_mut().zip(g) {
                    *sum += g;
                }
            }
            Ok(())
        })?;
        Tensor::from_vec(dtokens, tokens.shape(), tokens.device()).map(Some)
    }
}

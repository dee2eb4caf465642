//! Token plus position embedding in one pass.

use crate::custom_op::{output, values, with_values};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use std::sync::Arc;

/// `y[t] = tokens[id[t]] + positions[t mod seq]`; operands: the token table and the position table.
#[derive(Clone, Debug)]
pub(crate) struct Embedding {
    /// Token ids, whole sequences of `seq` one after the other; each below the number of rows of the token table.
    pub(crate) ids: Arc<[u32]>,
    /// Sequence length, at most the number of rows of the position table.
    pub(crate) seq: usize,
}

impl CustomOp2 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let tokens = values(s1, l1, self.name())?;
        let positions = values(s2, l2, self.name())?;
        let (vocab, dim) = l1.shape().dims2()?;
        let (rows, _) = l2.shape().dims2()?;
        if self.seq > rows || self.ids.iter().any(|&id| id as usize >= vocab) {
            candle_core::bail!(
                "embedding: sequences of {} over {rows} positions and a vocabulary of {vocab}",
                self.seq
            );
        }
        let mut y = Vec::with_capacity(self.ids.len() * dim);
        for (t, &id) in self.ids.iter().enumerate() {
            let token = &tokens[id as usize * dim..][..dim];
            let position = &positions[t % self.seq * dim..][..dim];
            y.extend(token.iter().zip(position).map(|(a, b)| a + b));
        }
        Ok(output(y, (self.ids.len(), dim)))
    }

    fn bwd(
        &self,
        tokens: &Tensor,
        positions: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dim = tokens.dim(1)?;
        let mut dtokens = vec![0.0; tokens.elem_count()];
        let mut dpositions = vec![0.0; positions.elem_count()];
        with_values(grad, self.name(), |grad| {
            for (t, (&id, g)) in self.ids.iter().zip(grad.chunks_exact(dim)).enumerate() {
                let token = &mut dtokens[id as usize * dim..][..dim];
                let position = &mut dpositions[t % self.seq * dim..][..dim];
                for i in 0..dim {
                    token[i] += g[i];
                    position[i] += g[i];
                }
            }
            Ok(())
        })?;
        let device = tokens.device();
        Ok((
            Some(Tensor::from_vec(dtokens, tokens.shape(), device)?),
            Some(Tensor::from_vec(dpositions, positions.shape(), device)?),
        ))
    }
}

//! A linear layer whose weight is an ordinary candle variable.

use crate::custom_op::{output, values, with_values};
use crate::{MatRef, product};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

/// `y = x w^T`; operands: `x [tokens, in]` and `w [out, in]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dense {
    /// Threads that each product may use.
    pub(crate) threads: usize,
}

impl CustomOp2 for Dense {
    fn name(&self) -> &'static str {
        "dense"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (t, n_in) = l1.shape().dims2()?;
        let (n_out, w_in) = l2.shape().dims2()?;
        if n_in != w_in {
            candle_core::bail!("dense: {t}x{n_in} input with a {n_out}x{w_in} weight");
        }
        let x = MatRef::new(values(s1, l1, self.name())?, t, n_in);
        let w = MatRef::new(values(s2, l2, self.name())?, n_out, n_in);
        Ok(output(product(x, w.t(), self.threads), (t, n_out)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (t, n_in) = x.dims2()?;
        let n_out = w.dim(0)?;
        let (dx, dw) = with_values([x, w, grad], self.name(), |[x, w, g]| {
            let g = MatRef::new(g, t, n_out);
            Ok((
                product(g, MatRef::new(w, n_out, n_in), self.threads),
                product(g.t(), MatRef::new(x, t, n_in), self.threads),
            ))
        })?;
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), x.device())?),
            Some(Tensor::from_vec(dw, w.shape(), w.device())?),
        ))
    }
}

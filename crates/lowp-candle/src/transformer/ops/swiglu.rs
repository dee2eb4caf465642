//! The gated activation `silu(gate) * up`, with `silu(x) = x * sigmoid(x)`.

use super::math::sigmoid;
use crate::custom_op::{output, values, with_values};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

/// Element-wise over two operands of equal shape: `gate` and `up`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SwiGlu;

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let gate = values(s1, l1, self.name())?;
        let up = values(s2, l2, self.name())?;
        let pairs = gate.iter().zip(up);
        let y = pairs.map(|(&x, &u)| x * sigmoid(x) * u).collect();
        Ok(output(y, l1.shape().clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let name = self.name();
        let (mut dgate, mut dup) = (Vec::new(), Vec::new());
        with_values([gate, up, grad], name, |[gate, up, grad]| {
            for ((&x, &u), &g) in gate.iter().zip(up).zip(grad) {
                let s = sigmoid(x);
                dgate.push(g * u * (s + x * s * (1.0 - s)));
                dup.push(g * x * s);
            }
            Ok(())
        })?;
        let device = gate.device();
        Ok((
            Some(Tensor::from_vec(dgate, gate.shape(), device)?),
            Some(Tensor::from_vec(dup, up.shape(), device)?),
        ))
    }
}

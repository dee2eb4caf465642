//! GELU in its tanh form, `x * sigmoid(2u)` with `u = sqrt(2/pi) * (x + 0.044715 x^3)`.

use super::math::sigmoid;
use crate::custom_op::{output, values, with_values};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

/// `2 * sqrt(2/pi)`.
const SLOPE: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;

/// The activation of the transformer's MLP, element-wise, any shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gelu;

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = values(storage, layout, self.name())?;
        let y = x
            .iter()
            .map(|&x| x * sigmoid(SLOPE * x * (1.0 + CUBIC * x * x)))
            .collect();
        Ok(output(y, layout.shape().clone()))
    }

    fn bwd(&self, arg: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let dx = with_values([arg, grad], self.name(), |[x, g]| {
            Ok(x.iter()
                .zip(g)
                .map(|(&x, &g)| {
                    let s = sigmoid(SLOPE * x * (1.0 + CUBIC * x * x));
                    let du = SLOPE * (1.0 + 3.0 * CUBIC * x * x);
                    g * (s + x * s * (1.0 - s) * du)
                })
                .collect::<Vec<f32>>())
        })?;
        Tensor::from_vec(dx, arg.shape(), arg.device()).map(Some)
    }
}

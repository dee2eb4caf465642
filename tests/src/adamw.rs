//! AdamW and Adam with L2 on whole tensors, written out from docs/numerics.md 12.1 and 12.2 and
//! sharing no code with the optimizer.

use half::bf16;
use lowp_kernels::AdamMode;
use lowp_optim::{FloatDtype, Group, StateDtypes};

/// A parameter with its moments, not sharded.
#[derive(Clone, Debug, PartialEq)]
pub struct Naive {
    /// Master values.
    pub master: Vec<f32>,
    /// First moment, as stored, widened.
    pub exp_avg: Vec<f32>,
    /// Second moment, as stored, widened.
    pub exp_avg_sq: Vec<f32>,
    state: StateDtypes,
}

impl Naive {
    /// A parameter before its first step.
    pub fn new(master: Vec<f32>, state: StateDtypes) -> Self {
        let zeros = vec![0.0; master.len()];
        Self {
            exp_avg: zeros.clone(),
            exp_avg_sq: zeros,
            master,
            state,
        }
    }

    /// Step number `step` (from 1): gradients are multiplied by `grad_scale` first, the rate of
    /// the group by `lr_factor`.
    pub fn step(&mut self, grad: &[f32], group: &Group, step: u64, factors: Factors) {
        let Group {
            betas: (b1, b2),
            eps,
            weight_decay: wd,
            ..
        } = *group;
        let lr = group.lr * factors.lr_factor;
        let correction = |beta: f32| match group.bias_correction {
            true => (1.0 - f64::from(beta).powf(step as f64)) as f32,
            false => 1.0,
        };
        let (c1, c2) = (correction(b1), correction(b2));
        for i in 0..self.master.len() {
            let p = self.master[i];
            let mut g = grad[i] * factors.grad_scale;
            if group.mode == AdamMode::L2 {
                g = wd.mul_add(p, g);
            }
            let m = b1.mul_add(self.exp_avg[i], (1.0 - b1) * g);
            let v = b2.mul_add(self.exp_avg_sq[i], ((1.0 - b2) * g) * g);
            let mut u = (m / c1) / ((v / c2).sqrt() + eps);
            if group.mode == AdamMode::AdamW {
                u = wd.mul_add(p, u);
            }
            self.master[i] = (-lr).mul_add(u, p);
            let store = |x: f32, dtype| match dtype {
                FloatDtype::F32 => x,
                FloatDtype::Bf16 => bf16::from_f32(x).to_f32(),
            };
            (self.exp_avg[i], self.exp_avg_sq[i]) = (
                store(m, self.state.exp_avg),
                store(v, self.state.exp_avg_sq),
            );
        }
    }
}

/// What a step multiplies by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    /// Of gradients.
    pub grad_scale: f32,
    /// Of the learning rate.
    pub lr_factor: f32,
}

impl Factors {
    /// Factors of 1.
    pub const ONE: Factors = Factors {
        grad_scale: 1.0,
        lr_factor: 1.0,
    };
}

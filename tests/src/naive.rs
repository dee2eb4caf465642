//! The rules of optimizers on whole tensors, written out from docs/numerics.md 12 and sharing no code with the optimizer.

use half::bf16;
use lowp_kernels::Rule;
use lowp_optim::{Group, StateDtype, StateDtypes};

/// A parameter with its states, not sharded.
#[derive(Clone, Debug, PartialEq)]
pub struct Naive {
    rule: Rule,
    /// Master values.
    pub master: Vec<f32>,
    /// States of the rule, as stored, widened.
    pub states: Vec<Vec<f32>>,
    dtypes: Vec<StateDtype>,
}

impl Naive {
    /// The rules that update elements on their own.
    pub const RULES: [Rule; 6] = [
        Rule::AdamW,
        Rule::AdamL2,
        Rule::Lion,
        Rule::Sgd,
        Rule::SgdMomentum,
        Rule::SgdNesterov,
    ];

    /// A parameter before its first step.
    pub fn new(rule: Rule, master: Vec<f32>, dtypes: StateDtypes) -> Self {
        let dtypes: Vec<StateDtype> = match rule {
            Rule::AdamW | Rule::AdamL2 => vec![dtypes.exp_avg, dtypes.exp_avg_sq],
            Rule::Lion => vec![dtypes.exp_avg],
            Rule::Sgd => vec![],
            Rule::SgdMomentum | Rule::SgdNesterov => vec![dtypes.momentum_buffer],
            Rule::Muon | Rule::Moonlight => panic!("a rule of matrices is none of elements"),
        };
        Self {
            rule,
            states: vec![vec![0.0; master.len()]; dtypes.len()],
            master,
            dtypes,
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
            if !matches!(self.rule, Rule::AdamW | Rule::Lion) {
                g = wd.mul_add(p, g);
            }
            let before: Vec<f32> = self.states.iter().map(|state| state[i]).collect();
            let (mut u, after) = match (self.rule, &before[..]) {
                (Rule::AdamW | Rule::AdamL2, &[m, v]) => {
                    let m = b1.mul_add(m, (1.0 - b1) * g);
                    let v = b2.mul_add(v, ((1.0 - b2) * g) * g);
                    ((m / c1) / ((v / c2).sqrt() + eps), vec![m, v])
                }
                (Rule::Lion, &[m]) => {
                    let sum = b1.mul_add(m, (1.0 - b1) * g);
                    let sign = if sum == 0.0 { sum } else { sum.signum() };
                    (sign, vec![b2.mul_add(m, (1.0 - b2) * g)])
                }
                (Rule::SgdMomentum, &[m]) => {
                    let m = b1.mul_add(m, g);
                    (m, vec![m])
                }
                (Rule::SgdNesterov, &[m]) => {
                    let m = b1.mul_add(m, g);
                    (b1.mul_add(m, g), vec![m])
                }
                _ => (g, vec![]),
            };
            if matches!(self.rule, Rule::AdamW | Rule::Lion) {
                u = wd.mul_add(p, u);
            }
            self.master[i] = (-lr).mul_add(u, p);
            let stored = |x: f32, dtype| match dtype {
                StateDtype::F32 => x,
                StateDtype::Bf16 => bf16::from_f32(x).to_f32(),
                StateDtype::Fp8 => panic!("states in fp8 have laws of their own"),
            };
            for ((state, &dtype), x) in self.states.iter_mut().zip(&self.dtypes).zip(after) {
                state[i] = stored(x, dtype);
            }
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

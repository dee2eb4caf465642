//! [`Group`]: the hyperparameters that some parameters share, and the scalars of a step.

use lowp_kernels::{GroupScalars, Rule};

use crate::OptimError;

/// The rule and the hyperparameters of a parameter group. Each rule has its own defaults ([`Group::of`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// How elements are updated. It is planned: a group keeps its rule.
    pub rule: Rule,
    /// Base learning rate, at least 0.
    pub lr: f32,
    /// Each at least 0 and below 1. Adam: decay of the first and second moment. Lion: what `exp_avg` is in the sum whose sign counts, and
    /// its decay. SGD and Muon: the first is the momentum, where the rule has one.
    pub betas: (f32, f32),
    /// Adam: added to the root of the second moment, at least 0.
    pub eps: f32,
    /// Weight decay, at least 0; norms and biases usually get a group with 0.
    pub weight_decay: f32,
    /// Adam: divide moments by `1 - beta^step`, where `step` counts applied steps only.
    pub bias_correction: bool,
}

impl Default for Group {
    /// What language models are usually pre-trained with: AdamW.
    fn default() -> Self {
        Self::of(Rule::AdamW)
    }
}

impl Group {
    /// The defaults of `rule`:
    ///
    /// | rule | `lr` | `betas` | `eps` | `weight_decay` | `bias_correction` |
    /// |---|---|---|---|---|---|
    /// | AdamW, Adam with L2 | 1e-3 | 0.9, 0.95 | 1e-8 | 0.1 | yes |
    /// | Lion | 3e-4 | 0.9, 0.99 | | 0.3 | |
    /// | SGD | 0.1 | momentum 0.9, where there is one | | 0 | |
    /// | Muon | 0.02 | momentum 0.95 | | 0.1 | |
    /// | Moonlight | 1e-3 | momentum 0.95 | | 0.1 | |
    ///
    /// Those of AdamW are what language models are usually pre-trained with. A step of Lion is as long as its rate in each element, so its
    /// authors use a tenth to a third of the rate of AdamW, and three to ten times its weight decay.
    pub fn of(rule: Rule) -> Self {
        let adam = Self {
            rule,
            lr: 1e-3,
            betas: (0.9, 0.95),
            eps: 1e-8,
            weight_decay: 0.1,
            bias_correction: true,
        };
        match rule {
            Rule::AdamW | Rule::AdamL2 => adam,
            Rule::Lion => Self {
                lr: 3e-4,
                betas: (0.9, 0.99),
                weight_decay: 0.3,
                ..adam
            },
            Rule::Muon => Self {
                lr: 0.02,
                betas: (0.95, 0.95),
                ..adam
            },
            // Its updates are as long as those of AdamW, and so is its rate.
            Rule::Moonlight => Self {
                betas: (0.95, 0.95),
                ..adam
            },
            Rule::Sgd | Rule::SgdMomentum | Rule::SgdNesterov => Self {
                lr: 0.1,
                weight_decay: 0.0,
                ..adam
            },
        }
    }

    /// The scalars of `step`, which starts at 1, with the rate multiplied by `lr_factor`.
    ///
    /// Bias corrections are taken in binary64 and rounded once. Source: docs/numerics.md 12.1.
    pub fn scalars(&self, step: u64, lr_factor: f32) -> GroupScalars {
        let scalars = GroupScalars {
            lr: self.lr * lr_factor,
            beta1: self.betas.0,
            beta2: self.betas.1,
            eps: self.eps,
            weight_decay: self.weight_decay,
            bias_correction: self.bias_correction,
            ..GroupScalars::default()
        };
        if self.bias_correction {
            scalars.at_step(step)
        } else {
            scalars
        }
    }

    /// Checks that no value would turn masters into NaN or climb the loss.
    pub(crate) fn check(&self, index: usize) -> Result<(), OptimError> {
        let at_least_0 = |x: f32| x.is_finite() && x >= 0.0;
        let below_1 = |x: f32| (0.0..1.0).contains(&x);
        let (finite, decay) = ("a finite number of at least 0", "at least 0 and below 1");
        for (option, value, fits, expected) in [
            ("lr", self.lr, at_least_0(self.lr), finite),
            ("beta1", self.betas.0, below_1(self.betas.0), decay),
            ("beta2", self.betas.1, below_1(self.betas.1), decay),
            ("eps", self.eps, at_least_0(self.eps), finite),
            (
                "weight_decay",
                self.weight_decay,
                at_least_0(self.weight_decay),
                finite,
            ),
        ] {
            if !fits {
                return Err(OptimError::OptionValue {
                    option: format!("{option} of group {index}"),
                    value,
                    expected,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_pass_and_each_bad_value_is_named() {
        let good = Group::default();
        good.check(0).expect("the defaults");
        for (bad, name) in [
            (Group { lr: -1.0, ..good }, "lr of group 3"),
            (
                Group {
                    lr: f32::NAN,
                    ..good
                },
                "lr of group 3",
            ),
            (
                Group {
                    betas: (1.0, 0.9),
                    ..good
                },
                "beta1",
            ),
            (
                Group {
                    betas: (0.9, -0.1),
                    ..good
                },
                "beta2",
            ),
            (Group { eps: -1e-8, ..good }, "eps"),
            (
                Group {
                    weight_decay: f32::INFINITY,
                    ..good
                },
                "weight_decay",
            ),
        ] {
            let error = bad.check(3).expect_err(name).to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn without_correction_moments_are_divided_by_one() {
        let group = Group {
            bias_correction: false,
            ..Group::default()
        };
        let scalars = group.scalars(3, 0.5);
        assert_eq!([scalars.correction1, scalars.correction2], [1.0; 2]);
        assert_eq!(scalars.lr, 0.5e-3);
        // docs/numerics.md 12.1
        let corrected = Group::default().scalars(10, 1.0);
        assert_eq!(corrected.correction1.to_bits(), 0x3F26_BD04);
    }
}

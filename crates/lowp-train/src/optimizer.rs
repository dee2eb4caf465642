//! [`Optimizer`]: what updates the parameters of a run, with the hyperparameters that it starts from.

use lowp_optim::{Group, Rule, StateDtypes, StateDtypesError};
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// What updates the parameters of a run. JSON: its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// AdamW for all parameters.
    #[default]
    AdamW,
    /// Lion for all parameters.
    Lion,
    /// Stochastic gradient descent with momentum.
    Sgd,
    /// Muon for layers, AdamW for variables.
    Muon,
    /// The same with updates as long as those of AdamW.
    Moonlight,
}

impl Optimizer {
    /// Every optimizer.
    pub const ALL: [Self; 5] = [
        Self::AdamW,
        Self::Lion,
        Self::Sgd,
        Self::Muon,
        Self::Moonlight,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Lion => "lion",
            Self::Sgd => "sgd",
            Self::Muon => "muon",
            Self::Moonlight => "moonlight",
        }
    }

    /// How it updates layers.
    pub const fn rule(self) -> Rule {
        match self {
            Self::AdamW => Rule::AdamW,
            Self::Lion => Rule::Lion,
            Self::Sgd => Rule::SgdMomentum,
            Self::Muon => Rule::Muon,
            Self::Moonlight => Rule::Moonlight,
        }
    }

    /// How it updates embeddings, heads, norms and biases. The dtypes of states are those of this rule: what matrices keep stays in f32.
    pub const fn var_rule(self) -> Rule {
        match self.rule() {
            Rule::Muon | Rule::Moonlight => Rule::AdamW,
            rule => rule,
        }
    }

    /// What hyperparameters are unless a run says otherwise: those of [`Group::of`], but for the learning rate.
    ///
    /// The rate is the highest of a run from random weights: 3e-3 of AdamW and Moonlight, a third of that of Lion, 0.1 of SGD, 0.02 of Muon.
    pub fn defaults(self) -> Group {
        Group {
            lr: match self {
                Self::AdamW | Self::Moonlight => 3e-3,
                Self::Lion => 1e-3,
                Self::Sgd => 0.1,
                Self::Muon => 0.02,
            },
            ..Group::of(self.rule())
        }
    }

    /// The highest learning rate of a run from the weights of a model that was trained: so much less than that of random weights.
    pub fn fine_tuning_rate(self) -> f32 {
        match self {
            Self::AdamW | Self::Moonlight => 2e-5,
            Self::Lion => 7e-6,
            Self::Sgd => 7e-4,
            Self::Muon => 1e-4,
        }
    }

    /// Checks that it keeps every state that is not f32.
    ///
    /// # Errors
    /// The first that it does not keep, with those that it keeps.
    pub fn check_states(self, state: StateDtypes) -> Result<(), TrainError> {
        let rule = self.var_rule();
        let checked = state.check(rule);
        checked.map_err(|mut cause| {
            // The name that users know; beside matrices the rule of variables has its own.
            if let StateDtypesError::NotOfRule { rule: name, .. } = &mut cause
                && rule == self.rule()
            {
                *name = self.name();
            }
            TrainError::State {
                state,
                optimizer: self,
                cause,
            }
        })
    }

    /// Whether `beta2` says anything.
    pub const fn has_beta2(self) -> bool {
        !matches!(self, Self::Sgd)
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

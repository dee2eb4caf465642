//! [`Rule`]: how an optimizer updates an element, and what it keeps of the element between steps.

/// How an element is updated (docs/numerics.md 12). [`crate::reference::update`] is the definition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Adam with decoupled weight decay.
    #[default]
    AdamW,
    /// Adam with weight decay added to the gradient (L2).
    AdamL2,
    /// The sign of an interpolated momentum, with decoupled weight decay.
    Lion,
    /// Stochastic gradient descent without momentum, with weight decay added to the gradient.
    Sgd,
    /// [`Rule::Sgd`] with momentum.
    SgdMomentum,
    /// [`Rule::Sgd`] with Nesterov momentum.
    SgdNesterov,
    /// Nesterov momentum of a matrix, made orthogonal before the update, and with decoupled weight decay: what is a gradient to others is the
    /// orthogonal matrix here ([`crate::MomentumJob`] makes the momentum).
    Muon,
    /// [`Rule::Muon`], scaled to the length of an update of Adam.
    Moonlight,
}

/// A value that an optimizer keeps of each element between steps, beside the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateName {
    /// The mean of gradients.
    ExpAvg,
    /// The mean of squares of gradients.
    ExpAvgSq,
    /// The decaying sum of gradients.
    MomentumBuffer,
}

impl Rule {
    /// Every rule.
    pub const ALL: [Self; 8] = [
        Self::AdamW,
        Self::AdamL2,
        Self::Lion,
        Self::Sgd,
        Self::SgdMomentum,
        Self::SgdNesterov,
        Self::Muon,
        Self::Moonlight,
    ];

    /// The most states that a rule has.
    pub const MOST_STATES: usize = 2;

    /// The rule's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::AdamL2 => "adam-l2",
            Self::Lion => "lion",
            Self::Sgd => "sgd",
            Self::SgdMomentum => "sgd-momentum",
            Self::SgdNesterov => "sgd-nesterov",
            Self::Muon => "muon",
            Self::Moonlight => "moonlight",
        }
    }

    /// The rule of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.name() == name)
    }

    /// What it keeps of an element beside the master, in the order of [`crate::UpdateJob::states`].
    pub const fn states(self) -> &'static [StateName] {
        match self {
            Self::AdamW | Self::AdamL2 => &[StateName::ExpAvg, StateName::ExpAvgSq],
            Self::Lion => &[StateName::ExpAvg],
            Self::Sgd => &[],
            Self::SgdMomentum | Self::SgdNesterov | Self::Muon | Self::Moonlight => {
                &[StateName::MomentumBuffer]
            }
        }
    }
}

impl Rule {
    /// Whether it updates matrices, and not elements on their own.
    pub const fn is_of_matrices(self) -> bool {
        matches!(self, Self::Muon | Self::Moonlight)
    }

    /// What the update multiplies gradients by, where those of a step are multiplied by `grad_scale`: nothing scales a matrix that is orthogonal
    /// already.
    pub const fn grad_factor(self, grad_scale: f32) -> f32 {
        match self.is_of_matrices() {
            true => 1.0,
            false => grad_scale,
        }
    }

    /// What the orthogonal matrix of `rows` x `cols` is multiplied by (docs/numerics.md 22.4): `sqrt(max(1, rows / cols))` for Muon, and
    /// `0.2 sqrt(max(rows, cols))` for Moonlight, in binary64 and rounded once; 1 for other rules.
    pub fn matrix_scale(self, rows: usize, cols: usize) -> f32 {
        let (rows, cols) = (rows as f64, cols as f64);
        let scale = match self {
            Self::Muon if rows > cols => (rows / cols).sqrt(),
            Self::Moonlight => 0.2 * rows.max(cols).sqrt(),
            _ => 1.0,
        };
        scale as f32
    }
}

impl StateName {
    /// Every state.
    pub const ALL: [Self; 3] = [Self::ExpAvg, Self::ExpAvgSq, Self::MomentumBuffer];

    /// Its name, as PyTorch's optimizers and checkpoints have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
            Self::MomentumBuffer => "momentum_buffer",
        }
    }

    /// `states` in words.
    pub fn list(states: &[Self]) -> String {
        let names: Vec<&str> = states.iter().map(|state| state.name()).collect();
        match names[..] {
            [] => "nothing but masters".to_owned(),
            _ => names.join(" and "),
        }
    }

    /// The state of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_states_few() {
        let names = Rule::ALL.map(Rule::name);
        for (index, name) in names.iter().enumerate() {
            assert!(!names[..index].contains(name), "{name}");
            assert_eq!(Rule::from_name(name), Some(Rule::ALL[index]));
        }
        let most = Rule::ALL.map(|rule| rule.states().len()).into_iter().max();
        assert_eq!(most, Some(Rule::MOST_STATES));
        for state in StateName::ALL {
            assert_eq!(StateName::from_name(state.name()), Some(state));
            assert!(Rule::ALL.iter().any(|rule| rule.states().contains(&state)));
        }
    }
}

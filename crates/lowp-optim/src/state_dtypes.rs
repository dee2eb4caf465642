//! [`StateDtypes`]: what an optimizer stores of each element, as data.

use std::fmt;
use std::str::FromStr;

use lowp_format::{Recipe, STATE_BLOCK, is_in_bf16};
use lowp_kernels::{MasterDtype, Rule, StateDtype, StateName};
use thiserror::Error;

/// The dtypes of masters and of the states of any rule; those of states that a rule does not have say nothing. `exp_avg_sq` is f32 or has the
/// dtype of `exp_avg` (docs/numerics.md 12.3, 23.3). Written as `master=bf16,exp_avg=bf16,exp_avg_sq=bf16`, without those that are f32, or
/// as `f32` if all are; read back, what is not named is f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StateDtypes {
    /// Of masters; those in bf16 are rounded stochastically (docs/numerics.md 23.2), and those of parameters that are not in bf16 are f32 for
    /// [`MasterDtype::Bf16Plus16`] ([`StateDtypes::of_recipe`]).
    pub master: MasterDtype,
    /// The dtype of the mean of gradients.
    pub exp_avg: StateDtype,
    /// The dtype of the mean of squares of gradients.
    pub exp_avg_sq: StateDtype,
    /// The dtype of the decaying sum of gradients.
    pub momentum_buffer: StateDtype,
}

impl StateDtypes {
    /// The name of the masters, next to those of states.
    pub const MASTER: &str = "master";

    /// The dtype of `state`.
    pub const fn of(self, state: StateName) -> StateDtype {
        match state {
            StateName::ExpAvg => self.exp_avg,
            StateName::ExpAvgSq => self.exp_avg_sq,
            StateName::MomentumBuffer => self.momentum_buffer,
        }
    }

    fn of_mut(&mut self, state: StateName) -> &mut StateDtype {
        match state {
            StateName::ExpAvg => &mut self.exp_avg,
            StateName::ExpAvgSq => &mut self.exp_avg_sq,
            StateName::MomentumBuffer => &mut self.momentum_buffer,
        }
    }

    /// The dtypes of a parameter of `recipe`: a master of 16 bits beside a parameter in bf16 is in f32 where the parameter is not in bf16.
    #[must_use]
    pub fn of_recipe(mut self, recipe: &impl Recipe) -> Self {
        if self.master == MasterDtype::Bf16Plus16 && !is_in_bf16(recipe) {
            self.master = MasterDtype::F32;
        }
        self
    }

    /// The states of `rule` with their dtypes.
    pub fn of_rule(self, rule: Rule) -> impl Iterator<Item = (StateName, StateDtype)> {
        let states = rule.states().iter();
        states.map(move |&state| (state, self.of(state)))
    }

    /// Bytes that the states of `len` elements of a parameter take by `rule`.
    pub fn bytes(self, rule: Rule, len: usize) -> usize {
        let states = self.of_rule(rule);
        states.map(|(_, dtype)| dtype.bytes(len)).sum()
    }

    /// Elements that ranks cut slices of a flattened matrix at multiples of, so that no block of states by `rule` is cut.
    pub fn unit(self, rule: Rule) -> usize {
        match self.of_rule(rule).any(|(_, d)| d == StateDtype::Fp8) {
            true => STATE_BLOCK,
            false => 1,
        }
    }

    /// Checks that `rule` has every state that is not f32.
    ///
    /// # Errors
    /// The first that it does not have, with those that it has.
    pub fn check(self, rule: Rule) -> Result<(), StateDtypesError> {
        let has = |state: &StateName| rule.states().contains(state);
        let mut narrow = self.narrow();
        match narrow.find(|state| !has(state)) {
            None => Ok(()),
            Some(state) => Err(StateDtypesError::NotOfRule {
                rule: rule.name(),
                state: state.name(),
                states: StateName::list(rule.states()),
            }),
        }
    }

    /// The dtypes of masters and of the states that `rule` has; the others are f32.
    #[must_use]
    pub fn kept_by(mut self, rule: Rule) -> Self {
        let others = StateName::ALL.into_iter();
        for state in others.filter(|state| !rule.states().contains(state)) {
            *self.of_mut(state) = StateDtype::F32;
        }
        self
    }

    /// The states that are not in f32.
    fn narrow(self) -> impl Iterator<Item = StateName> {
        let all = StateName::ALL.into_iter();
        all.filter(move |&state| self.of(state) != StateDtype::F32)
    }
}

impl fmt::Display for StateDtypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let written = |state: StateName| format!("{}={}", state.name(), self.of(state).name());
        let master = (self.master != MasterDtype::F32)
            .then(|| format!("{}={}", Self::MASTER, self.master.name()));
        let narrow: Vec<String> = master
            .into_iter()
            .chain(self.narrow().map(written))
            .collect();
        match narrow[..] {
            [] => f.write_str("f32"),
            _ => f.write_str(&narrow.join(",")),
        }
    }
}

/// Dtypes that no optimizer has, or not this one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StateDtypesError {
    /// Text that names none.
    #[error(
        "{part:?} {why}; write exp_avg=bf16 or master=bf16,exp_avg=fp8,exp_avg_sq=fp8 for adamw, exp_avg=bf16 for lion, momentum_buffer=bf16 for sgd"
    )]
    Text {
        /// The part that is wrong.
        part: String,
        /// What is wrong with the part.
        why: String,
    },
    /// A state that a rule does not have.
    #[error("{rule} has no {state}; it keeps {states}")]
    NotOfRule {
        /// The rule.
        rule: &'static str,
        /// The state.
        state: &'static str,
        /// The states that the rule has.
        states: String,
    },
}

impl FromStr for StateDtypes {
    type Err = StateDtypesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut dtypes = Self::default();
        if text == StateDtype::F32.name() {
            return Ok(dtypes);
        }
        let mut named = Vec::new();
        for part in text.split(',') {
            let wrong = |why: &str| StateDtypesError::Text {
                part: part.to_owned(),
                why: why.to_owned(),
            };
            let (name, dtype) = part.split_once('=').ok_or_else(|| wrong("has no `=`"))?;
            if named.contains(&name) {
                return Err(wrong("is named twice"));
            }
            named.push(name);
            if name == Self::MASTER {
                let dtype = MasterDtype::ALL.into_iter().find(|d| d.name() == dtype);
                dtypes.master = dtype.ok_or_else(|| wrong("is not f32, bf16 or bf16+16"))?;
                continue;
            }
            let dtype = StateDtype::ALL.into_iter().find(|d| d.name() == dtype);
            let dtype = dtype.ok_or_else(|| wrong("is not f32, bf16 or fp8"))?;
            let Some(state) = StateName::from_name(name) else {
                let all = StateName::list(&StateName::ALL);
                return Err(wrong(&format!("is none of {} and {all}", Self::MASTER)));
            };
            *dtypes.of_mut(state) = dtype;
        }
        let [first, second] = [dtypes.exp_avg, dtypes.exp_avg_sq];
        if second == StateDtype::F32 || second == first {
            return Ok(dtypes);
        }
        let [first, second] = [first.name(), second.name()];
        Err(StateDtypesError::Text {
            part: text.to_owned(),
            why: format!(
                "has {second} for exp_avg_sq and {first} for exp_avg; exp_avg_sq is f32 or has the dtype of exp_avg"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_dtypes_again() {
        use StateDtype::{Bf16, F32, Fp8};
        for [exp_avg, exp_avg_sq] in [[F32; 2], [Bf16, F32], [Bf16; 2], [Fp8, F32], [Fp8; 2]] {
            for momentum_buffer in StateDtype::ALL {
                for master in MasterDtype::ALL {
                    let dtypes = StateDtypes {
                        master,
                        exp_avg,
                        exp_avg_sq,
                        momentum_buffer,
                    };
                    assert_eq!(dtypes.to_string().parse(), Ok(dtypes));
                }
            }
        }
        let one = StateDtypes::from_str("exp_avg=bf16");
        assert_eq!(one, "exp_avg=bf16,exp_avg_sq=f32".parse());
    }

    #[test]
    fn other_text_is_an_error() {
        for (text, why) in [
            ("", "has no `=`"),
            ("bf16", "has no `=`"),
            ("exp_avg=f16", "is not f32, bf16 or fp8"),
            (
                "step=bf16",
                "is none of master and exp_avg and exp_avg_sq and momentum_buffer",
            ),
            ("master=fp8", "is not f32, bf16 or bf16+16"),
            ("exp_avg=bf16+16", "is not f32, bf16 or fp8"),
            ("master=bf16,master=f32", "twice"),
            ("exp_avg=f32,exp_avg=f32", "twice"),
            ("exp_avg_sq=bf16", "has bf16 for exp_avg_sq and f32"),
            (
                "exp_avg_sq=bf16,exp_avg=f32",
                "has bf16 for exp_avg_sq and f32",
            ),
            (
                "exp_avg_sq=fp8,exp_avg=bf16",
                "has fp8 for exp_avg_sq and bf16",
            ),
        ] {
            let error = StateDtypes::from_str(text).expect_err(text);
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn a_rule_has_the_states_that_are_narrow() {
        for (text, rule, error) in [
            ("exp_avg=bf16", Rule::Lion, None),
            ("exp_avg_sq=f32", Rule::Lion, None),
            ("master=bf16", Rule::Sgd, None),
            (
                "exp_avg=bf16,exp_avg_sq=bf16",
                Rule::Lion,
                Some("lion has no exp_avg_sq; it keeps exp_avg"),
            ),
            (
                "exp_avg=bf16",
                Rule::SgdMomentum,
                Some("it keeps momentum_buffer"),
            ),
            (
                "momentum_buffer=bf16",
                Rule::Sgd,
                Some("it keeps nothing but masters"),
            ),
            (
                "momentum_buffer=bf16",
                Rule::AdamW,
                Some("it keeps exp_avg and exp_avg_sq"),
            ),
        ] {
            let dtypes: StateDtypes = text.parse().expect("text");
            match (dtypes.check(rule), error) {
                (Ok(()), None) => {}
                (Err(found), Some(text)) => assert!(found.to_string().contains(text), "{found}"),
                other => panic!("{text} of {rule:?}: {other:?}"),
            }
        }
        let all: StateDtypes = "master=bf16,exp_avg=fp8,exp_avg_sq=fp8"
            .parse()
            .expect("text");
        assert_eq!(all.kept_by(Rule::AdamW), all);
        assert_eq!(
            all.kept_by(Rule::Lion).to_string(),
            "master=bf16,exp_avg=fp8"
        );
        assert_eq!(all.kept_by(Rule::Sgd).to_string(), "master=bf16");
        let narrow: StateDtypes = "exp_avg=bf16".parse().expect("text");
        let bytes = |rule: Rule| narrow.bytes(rule, 10);
        assert_eq!(Rule::ALL.map(bytes), [60, 60, 20, 0, 40, 40, 40, 40]);
        let fp8: StateDtypes = "exp_avg=fp8,exp_avg_sq=fp8".parse().expect("text");
        assert_eq!(fp8.bytes(Rule::AdamW, 1000), 2 * (1000 + 32));
    }
}

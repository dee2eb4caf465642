//! [`StepOptions`]: what changes from step to step.

use lowp_comm::{CallLog, CompareAmong, digest};
use lowp_kernels::{GradContribution, StepScalars};

use crate::{Group, OptimError};

/// What changes from step to step; the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOptions {
    /// Multiplies the rate of every group (see [`crate::Schedule`]); at least 0. Default 1.
    pub lr_factor: f32,
    /// Multiplies gradients first: the inverse of a loss scale, or of the number of micro-batches
    /// that were added up. If it is not finite the step is skipped. Default 1.
    pub grad_scale: f32,
    /// Clips the global gradient norm to this, above 0: gradients are multiplied by `max_norm / (norm + 1e-6)`,
    /// at most 1, evaluated in binary64 and rounded once (docs/numerics.md 12.8). Default `None`.
    pub max_norm: Option<f32>,
    /// Skips the step where a gradient is not finite. Without it and without `max_norm` nothing reads gradients but the update:
    /// the report has a norm of 0, and replicas are not compared by their norm. With `max_norm` such a step is skipped in any case.
    /// Default `true`.
    pub skip_nonfinite: bool,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self {
            lr_factor: 1.0,
            grad_scale: 1.0,
            max_norm: None,
            skip_nonfinite: true,
        }
    }
}

impl StepOptions {
    /// Rejects values that no step can use.
    pub(crate) fn check(&self) -> Result<(), OptimError> {
        let bad = |option: &str, value, expected| {
            let option = option.to_owned();
            Err(OptimError::OptionValue {
                option,
                value,
                expected,
            })
        };
        if !(self.lr_factor.is_finite() && self.lr_factor >= 0.0) {
            return bad("lr_factor", self.lr_factor, "a finite number of at least 0");
        }
        match self.max_norm {
            // NaN as well: it would mean no clipping.
            Some(norm) if norm.is_nan() || norm <= 0.0 => bad("max_norm", norm, "above 0"),
            _ => Ok(()),
        }
    }

    /// Whether the step reads gradients for their norm.
    pub(crate) fn measures(&self) -> bool {
        self.skip_nonfinite || self.max_norm.is_some()
    }

    /// What ranks must have in common in step `number` of `groups`.
    pub(crate) fn common(&self, number: u64, groups: &[Group]) -> [(&'static str, u64); 9] {
        let max_norm = self.max_norm.map_or(u64::MAX, |x| x.to_bits().into());
        let of = |bits: fn(&Group) -> u64| digest(groups.iter().map(bits));
        [
            ("the number of steps", number),
            ("lr_factor", self.lr_factor.to_bits().into()),
            ("grad_scale", self.grad_scale.to_bits().into()),
            ("max_norm", max_norm),
            ("skip_nonfinite", self.skip_nonfinite.into()),
            ("lr", of(|group| group.lr.to_bits().into())),
            (
                "betas",
                of(|group| {
                    let (beta1, beta2) = group.betas;
                    (u64::from(beta1.to_bits()) << 32) | u64::from(beta2.to_bits())
                }),
            ),
            ("eps", of(|group| group.eps.to_bits().into())),
            (
                "weight_decay",
                of(|group| group.weight_decay.to_bits().into()),
            ),
        ]
    }

    /// The scalars of a step of `groups`; the device makes bias corrections, clipping and skip of them.
    pub(crate) fn scalars(&self, groups: &[Group]) -> StepScalars {
        let scalars = |group: &Group| group.scalars(1, self.lr_factor);
        StepScalars {
            groups: groups.iter().map(scalars).collect(),
            grad_scale: self.grad_scale,
            max_norm: self.max_norm.unwrap_or(f32::INFINITY),
            ..StepScalars::default()
        }
    }

    /// This rank's part of step `number` as [`GradContribution`] has it, without the gradients: options, what was `done` before, and a digest of
    /// which parameters are `present`.
    pub(crate) fn part(
        &self,
        number: u64,
        groups: &[Group],
        done: &[CallLog],
        present: u64,
    ) -> GradContribution {
        let of = |among| {
            let done = done.iter().filter(move |done| done.among == among);
            done.map(CallLog::digest)
        };
        let values = self.common(number, groups).into_iter();
        let values = values.map(|(_, bits)| bits).chain([present]);
        GradContribution {
            consensus: digest(values.chain(of(CompareAmong::World))),
            within: digest(of(CompareAmong::Shards)),
            ..GradContribution::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_hyperparameter_and_the_number_of_the_step_show() {
        let good = StepOptions::default();
        let group = Group::default();
        let with = |group: Group| good.part(1, &[Group::default(), group], &[], 0);
        let all = [
            with(group),
            with(Group { lr: 0.5, ..group }),
            with(Group {
                betas: (0.5, group.betas.1),
                ..group
            }),
            with(Group {
                betas: (group.betas.0, 0.5),
                ..group
            }),
            with(Group { eps: 0.5, ..group }),
            with(Group {
                weight_decay: 0.5,
                ..group
            }),
            // The same values, each in the other group.
            good.part(1, &[Group { lr: 0.5, ..group }, group], &[], 0),
            good.part(1, &[], &[], 0),
            good.part(2, &[], &[], 0),
            good.part(1, &[], &[], 1),
            StepOptions {
                lr_factor: 0.5,
                ..good
            }
            .part(1, &[], &[], 0),
            StepOptions {
                grad_scale: 0.5,
                ..good
            }
            .part(1, &[], &[], 0),
            StepOptions {
                skip_nonfinite: false,
                ..good
            }
            .part(1, &[], &[], 0),
            StepOptions {
                max_norm: Some(0.5),
                ..good
            }
            .part(1, &[], &[], 0),
            StepOptions {
                max_norm: Some(f32::INFINITY),
                ..good
            }
            .part(1, &[], &[], 0),
        ];
        for (i, a) in all.iter().enumerate() {
            for b in &all[..i] {
                assert_ne!(a.consensus, b.consensus);
            }
        }
        assert_eq!(with(group), with(group));
    }
}

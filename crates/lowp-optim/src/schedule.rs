//! [`Schedule`]: linear warm-up of the learning rate, then its decay.

/// How a learning rate falls after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decay {
    /// By half a cosine, from the highest rate to the last.
    #[default]
    Cosine,
    /// In a straight line.
    Linear,
    /// Not before the last steps, then in a line (warmup-stable-decay).
    Stable {
        /// The last steps.
        decay: u64,
    },
}

impl Decay {
    /// `cosine`, `linear` or `wsd`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cosine => "cosine",
            Self::Linear => "linear",
            Self::Stable { .. } => "wsd",
        }
    }
}

/// A learning-rate schedule as a factor of the base rate: `step / warmup` up to step `warmup`, then
/// from 1 down to `floor` at step `total`, as `decay` says. Pass its factor as
/// [`StepOptions::lr_factor`](crate::StepOptions::lr_factor).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Steps of linear warm-up; the first step already has a rate above zero.
    pub warmup: u64,
    /// Total steps; the factor stays at `floor` afterwards.
    pub total: u64,
    /// The factor at the end, 0 to 1.
    pub floor: f32,
    /// How the rate falls after the warm-up.
    pub decay: Decay,
}

impl Schedule {
    /// The factor of step `step`, which starts at 1.
    ///
    /// Evaluated in binary64 and rounded once: the same on every rank.
    pub fn factor(&self, step: u64) -> f32 {
        if step <= self.warmup {
            return (step as f64 / self.warmup.max(1) as f64) as f32;
        }
        let span = self.total.saturating_sub(self.warmup).max(1);
        let since = |start: u64, span: u64| {
            let steps = step.saturating_sub(start) as f64;
            (steps / span.max(1) as f64).min(1.0)
        };
        let rest = match self.decay {
            Decay::Cosine => {
                let progress = since(self.warmup, span);
                0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
            }
            Decay::Linear => 1.0 - since(self.warmup, span),
            Decay::Stable { decay } => {
                let decay = decay.min(span);
                1.0 - since(self.total.saturating_sub(decay), decay)
            }
        };
        let floor = f64::from(self.floor);
        (floor + (1.0 - floor) * rest) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warms_up_linearly_and_ends_at_the_floor() {
        let schedule = Schedule {
            warmup: 4,
            total: 20,
            floor: 0.1,
            decay: Decay::Cosine,
        };
        assert_eq!([1, 2, 4].map(|s| schedule.factor(s)), [0.25, 0.5, 1.0]);
        assert_eq!(schedule.factor(20), 0.1);
        assert_eq!(schedule.factor(99), 0.1);
        let factors: Vec<f32> = (4..=20).map(|s| schedule.factor(s)).collect();
        assert!(factors.windows(2).all(|w| w[1] < w[0]));
    }

    #[test]
    fn a_run_shorter_than_its_warmup_ends_at_the_floor() {
        for total in 0..=4 {
            let schedule = Schedule {
                warmup: 4,
                total,
                floor: 0.25,
                decay: Decay::Cosine,
            };
            let factors = [3, 4, 5, 6].map(|step| schedule.factor(step));
            assert_eq!(factors, [0.75, 1.0, 0.25, 0.25], "total {total}");
        }
    }

    #[test]
    fn no_warmup_starts_at_the_top() {
        let schedule = Schedule {
            warmup: 0,
            total: 10,
            floor: 0.0,
            decay: Decay::Cosine,
        };
        assert!(schedule.factor(1) > 0.97);
    }
    #[test]
    fn a_stable_rate_falls_in_the_last_steps() {
        let schedule = |decay| Schedule {
            warmup: 2,
            total: 12,
            floor: 0.0,
            decay,
        };
        let factors = |decay| [2, 7, 8, 10, 12, 13].map(|step| schedule(decay).factor(step));
        let stable = factors(Decay::Stable { decay: 4 });
        assert_eq!(stable, [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]);
        assert_eq!(factors(Decay::Linear), [1.0, 0.5, 0.4, 0.2, 0.0, 0.0]);
        // All steps after warm-up.
        assert_eq!(factors(Decay::Stable { decay: 99 }), factors(Decay::Linear));
    }
}

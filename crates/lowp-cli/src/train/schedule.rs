//! Learning rate as a function of the step.

/// Linear warm-up to `peak`, then half a cosine down to a tenth of it at the last step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub(crate) peak: f64,
    pub(crate) warmup: usize,
    pub(crate) steps: usize,
}

impl Schedule {
    /// The rate of step `step`, counted from zero.
    pub(crate) fn rate(&self, step: usize) -> f64 {
        const FLOOR: f64 = 0.1;
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let span = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let done = ((step - self.warmup) as f64 / span).min(1.0);
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        self.peak * (FLOOR + (1.0 - FLOOR) * cosine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_peaks_and_falls_to_a_tenth() {
        let s = Schedule {
            peak: 1.0,
            warmup: 10,
            steps: 110,
        };
        assert_eq!(s.rate(0), 0.1);
        assert_eq!(s.rate(9), 1.0);
        assert_eq!(s.rate(10), 1.0);
        assert!((s.rate(60) - 0.55).abs() < 1e-12);
        assert!((s.rate(110) - 0.1).abs() < 1e-12);
    }

    #[test]
    fn no_warm_up_is_legal() {
        let s = Schedule {
            peak: 1.0,
            warmup: 0,
            steps: 1,
        };
        assert_eq!(s.rate(0), 1.0);
    }
}

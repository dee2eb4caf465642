//! [`Summary`]: what the runs of a recipe say together, against the baseline.

use lowp_format::PlainF32;

use crate::result::RunResult;

/// The name of the run that every gap is measured against.
pub const BASELINE: &str = PlainF32::NAME;

/// The baseline that `run` is compared with: that of the same seed, where there is one.
pub fn baseline<'a>(runs: &'a [RunResult], run: &RunResult) -> Option<&'a RunResult> {
    let mut others = runs.iter();
    others.find(|other| other.seed == run.seed && other.recipe == BASELINE)
}

/// The runs of one recipe over all seeds, at least one.
#[derive(Clone, Debug)]
pub struct Summary<'a> {
    /// The first run, for what does not depend on the seed.
    pub first: &'a RunResult,
    /// One run per seed.
    pub runs: Vec<&'a RunResult>,
    /// The gap to the baseline of each, in percent; empty for the baseline itself.
    pub gaps: Vec<f64>,
}

/// One summary per recipe, in the order of the runs.
pub fn summaries(runs: &[RunResult]) -> Vec<Summary<'_>> {
    let mut summaries: Vec<Summary<'_>> = Vec::new();
    for run in runs {
        let gap = baseline(runs, run)
            .filter(|base| base.recipe != run.recipe)
            .map(|base| run.gap_percent(base));
        match summaries.iter_mut().find(|s| s.first.recipe == run.recipe) {
            Some(summary) => {
                summary.runs.push(run);
                summary.gaps.extend(gap);
            }
            None => summaries.push(Summary {
                first: run,
                runs: vec![run],
                gaps: gap.into_iter().collect(),
            }),
        }
    }
    summaries
}

/// The mean of some losses or gaps; NaN if one is.
pub fn mean(values: &[f64]) -> Option<f64> {
    let sum: f64 = values.iter().sum();
    (!values.is_empty()).then(|| sum / values.len() as f64)
}

/// The smallest and the largest of some losses or gaps; NaN if one is.
pub fn range(values: &[f64]) -> Option<[f64; 2]> {
    // `min` and `max` would drop a NaN, which is the worst gap there is.
    let pick = |keep: fn(f64, f64) -> bool| {
        let values = values.iter().copied();
        values.reduce(|a, b| if a.is_nan() || keep(a, b) { a } else { b })
    };
    Some([pick(|a, b| a <= b)?, pick(|a, b| a >= b)?])
}

impl Summary<'_> {
    /// Mean of a number over the seeds.
    pub fn mean(&self, of: impl Fn(&RunResult) -> f64) -> f64 {
        self.runs.iter().map(|run| of(run)).sum::<f64>() / self.runs.len() as f64
    }

    /// Mean gap to the baseline in percent.
    pub fn gap(&self) -> Option<f64> {
        mean(&self.gaps)
    }

    /// Smallest and largest gap of a seed, where there are several.
    pub fn gap_range(&self) -> Option<[f64; 2]> {
        range(&self.gaps).filter(|_| self.gaps.len() > 1)
    }

    /// Mean training loss of each step.
    pub fn train_loss(&self) -> Vec<f64> {
        let at = |step: usize| self.mean(|run| f64::from(run.train_loss[step]));
        (0..self.first.train_loss.len()).map(at).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::made_up as run;

    #[test]
    fn gaps_are_to_the_baseline_of_the_same_seed() {
        let runs = [
            run(BASELINE, 0, 2.0),
            run("x", 0, 2.2),
            run(BASELINE, 1, 4.0),
            run("x", 1, 4.0),
        ];
        let all = summaries(&runs);
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].gap(), all[0].gap_range()), (None, None));
        assert!((all[1].gap().expect("a gap") - 5.0).abs() < 1e-9);
        let [low, high] = all[1].gap_range().expect("two seeds");
        assert!(low == 0.0 && (high - 10.0).abs() < 1e-9);
        assert_eq!(all[1].train_loss(), [5.5, 4.5, 3.0]);
    }

    #[test]
    fn a_diverged_seed_is_not_hidden() {
        let runs = [
            run(BASELINE, 0, 2.0),
            run("x", 0, 2.2),
            run(BASELINE, 1, 4.0),
            run("x", 1, f64::NAN),
        ];
        let all = summaries(&runs);
        assert!(all[1].gap().is_some_and(f64::is_nan));
        assert!(
            all[1]
                .gap_range()
                .is_some_and(|[low, high]| low.is_nan() && high.is_nan())
        );
    }
}

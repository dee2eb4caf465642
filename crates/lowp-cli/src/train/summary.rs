//! What the runs of a recipe say together, against the baseline.

use super::recipes::BASELINE;
use lowp_train::result::RunResult;

/// A gap with its sign and two decimals; what rounds to zero has none.
pub(crate) fn percent(gap: f64) -> String {
    let text = format!("{gap:+.2}");
    if text == "-0.00" {
        "+0.00".to_owned()
    } else {
        text
    }
}

/// The baseline that `run` is compared with: that of the same seed, where there is one.
pub(crate) fn baseline<'a>(runs: &'a [RunResult], run: &RunResult) -> Option<&'a RunResult> {
    let mut others = runs.iter();
    others.find(|other| other.seed == run.seed && other.recipe == BASELINE)
}

/// The runs of one recipe over all seeds, at least one.
#[derive(Clone, Debug)]
pub(crate) struct Summary<'a> {
    /// The first run, for what does not depend on the seed.
    pub(crate) first: &'a RunResult,
    /// One run per seed.
    pub(crate) runs: Vec<&'a RunResult>,
    /// The gap to the baseline of each, in percent; empty for the baseline itself.
    pub(crate) gaps: Vec<f64>,
}

/// One summary per recipe, in the order of the runs.
pub(crate) fn summaries(runs: &[RunResult]) -> Vec<Summary<'_>> {
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

impl Summary<'_> {
    /// Mean of a number over the seeds.
    pub(crate) fn mean(&self, of: impl Fn(&RunResult) -> f64) -> f64 {
        self.runs.iter().map(|run| of(run)).sum::<f64>() / self.runs.len() as f64
    }

    /// Mean gap to the baseline in percent.
    pub(crate) fn gap(&self) -> Option<f64> {
        let sum: f64 = self.gaps.iter().sum();
        (!self.gaps.is_empty()).then(|| sum / self.gaps.len() as f64)
    }

    /// Smallest and largest gap of a seed, where there are several.
    pub(crate) fn gap_range(&self) -> Option<[f64; 2]> {
        // `min` and `max` would drop a NaN, which is the worst gap there is.
        let pick = |keep: fn(f64, f64) -> bool| {
            self.gaps
                .iter()
                .copied()
                .reduce(|a, b| if a.is_nan() || keep(a, b) { a } else { b })
        };
        (self.gaps.len() > 1)
            .then(|| Some([pick(|a, b| a <= b)?, pick(|a, b| a >= b)?]))
            .flatten()
    }

    /// Mean training loss of each step.
    pub(crate) fn train_loss(&self) -> Vec<f64> {
        let at = |step: usize| self.mean(|run| f64::from(run.train_loss[step]));
        (0..self.first.train_loss.len()).map(at).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A run with made-up numbers.
    pub(crate) fn run(recipe: &str, seed: u64, val_loss: f64) -> RunResult {
        RunResult {
            recipe: recipe.to_owned(),
            seed,
            ranks: 2,
            steps: 3,
            resumed_at: 0,
            train_loss: vec![5.5, 4.0 + seed as f32, 3.0],
            val_loss,
            wire_bytes_per_step: 2000,
            wire_bytes_formula: 2000,
            wire_bytes_tail: None,
            resident_weight_bytes: 1000,
            master_weight_bytes: 4000,
            peak_weight_bytes: 7000,
            parameters: 1000,
            model_parameters: 1500,
            skipped_steps: 0,
            seconds_per_step: 0.25,
            tokens_per_second: 8000.0,
            flops_per_second: 2.5e12,
            parameter_bytes_per_rank: 12_000,
            device_bytes_per_rank: None,
            gather_seconds_exposed: 0.025,
            gather_seconds: None,
            gather_seconds_hidden: Some(0.0),
        }
    }

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

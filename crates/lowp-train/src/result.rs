//! What a run leaves behind, and what the runs of a recipe say together.

use super::recipes::BASELINE;
use anyhow::{Result, bail};
use serde::Serialize;

/// One trained recipe; the field names are the keys of the JSON file.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RunResult {
    pub(crate) recipe: String,
    /// Seed of the initial weights, the batches and stochastic rounding.
    pub(crate) seed: u64,
    pub(crate) ranks: usize,
    /// Steps that are done.
    pub(crate) steps: usize,
    /// Those of the checkpoint that the run went on behind.
    pub(crate) resumed_at: u64,
    /// Loss of each step's batch before its update, nats per byte.
    pub(crate) train_loss: Vec<f32>,
    /// Loss on the validation split after the last step, nats per byte.
    pub(crate) val_loss: f64,
    /// Bytes of weights that the ranks of one replica put on the wire per step, as counted.
    pub(crate) wire_bytes_per_step: u64,
    /// The value of the gather plan's formula for the same.
    pub(crate) wire_bytes_formula: u64,
    /// Both of the steps of the precision tail, where there is one.
    pub(crate) wire_bytes_tail: Option<[u64; 2]>,
    /// Bytes of weight shards that stay allocated between steps, all ranks of one replica together.
    pub(crate) resident_weight_bytes: u64,
    /// Bytes of the optimizer's f32 masters of these weights, all ranks of one replica together.
    pub(crate) master_weight_bytes: u64,
    /// The most bytes that held these weights at once: the two above, and the memory in which the
    /// ranks gather and decode.
    pub(crate) peak_weight_bytes: u64,
    /// Weights of the linear layers, which the byte counts are about.
    pub(crate) parameters: usize,
    /// Parameters of the whole model, those that stay in f32 included.
    pub(crate) model_parameters: usize,
    /// Steps that non-finite gradients skipped.
    pub(crate) skipped_steps: u64,
    pub(crate) seconds_per_step: f64,
    pub(crate) tokens_per_second: f64,
    /// By [`GptConfig::flops_per_token`](super::model::GptConfig::flops_per_token).
    pub(crate) flops_per_second: f64,
    /// The most bytes of parameters and optimizer state that a rank held.
    pub(crate) parameter_bytes_per_rank: u64,
    /// The most bytes of a GPU's memory that a rank held, as counted (parameters, optimizer state, activations and what the model works
    /// in) and as measured; none on a CPU.
    pub(crate) device_bytes_per_rank: Option<[u64; 2]>,
    /// Seconds of a step in which rank 0 did nothing but wait for gathered weights.
    pub(crate) gather_seconds_exposed: f64,
    /// Seconds of gathers from begin to end, where a device timed them.
    pub(crate) gather_seconds: Option<f64>,
    /// Seconds of gathers that ran beside other work, where that is known.
    pub(crate) gather_seconds_hidden: Option<f64>,
}

impl RunResult {
    /// Validation loss above `baseline`, in percent of it.
    pub(crate) fn gap_percent(&self, baseline: &Self) -> f64 {
        (self.val_loss / baseline.val_loss - 1.0) * 100.0
    }

    /// `bytes` per parameter of the linear layers.
    pub(crate) fn per_weight(&self, bytes: u64) -> f64 {
        bytes as f64 / self.parameters as f64
    }

    /// Holds the bytes that were counted against those that the plans predict.
    ///
    /// # Errors
    /// If they differ.
    pub(crate) fn check_wire(&self) -> Result<()> {
        let main = [self.wire_bytes_per_step, self.wire_bytes_formula];
        let mut parts = [Some(main), self.wire_bytes_tail].into_iter().flatten();
        if let Some([counted, formula]) = parts.find(|[counted, formula]| counted != formula) {
            bail!(
                "{}, seed {}: the ranks sent {counted} bytes of weights per step and their gather plans say {formula}; \
                 this is a defect in lowp: please report it",
                self.recipe,
                self.seed
            );
        }
        Ok(())
    }

    /// Checks that training did not diverge to infinity or NaN.
    ///
    /// # Errors
    /// Names the first step whose loss is not finite.
    pub(crate) fn check_finite(&self) -> Result<()> {
        let (recipe, seed) = (&self.recipe, self.seed);
        let step = self.train_loss.iter().position(|loss| !loss.is_finite());
        if let Some(step) = step {
            bail!(
                "{recipe}, seed {seed}: the loss of step {} of {} is not finite: training diverged; choose a smaller --lr \
                 or a longer --warmup",
                step + 1,
                self.steps
            );
        }
        if !self.val_loss.is_finite() {
            bail!(
                "{recipe}, seed {seed}: the validation loss is not finite: training diverged; choose a smaller --lr or a \
                 longer --warmup"
            );
        }
        Ok(())
    }
}

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

    #[test]
    fn a_loss_that_is_not_finite_is_an_error() {
        let mut result = run("x", 7, 2.0);
        result.check_finite().expect("finite losses");
        result.val_loss = f64::INFINITY;
        let error = result.check_finite().unwrap_err().to_string();
        assert!(
            error.starts_with("x, seed 7: the validation loss"),
            "{error}"
        );
        result.train_loss[1] = f32::NAN;
        let error = result.check_finite().unwrap_err().to_string();
        assert!(
            error.starts_with("x, seed 7: the loss of step 2 of 3"),
            "{error}"
        );
    }

    #[test]
    fn bytes_that_differ_from_the_plan_are_an_error() {
        let mut result = run("x", 7, 2.0);
        result.check_wire().expect("equal");
        result.wire_bytes_per_step += 1;
        let error = result.check_wire().unwrap_err().to_string();
        assert!(
            error.starts_with("x, seed 7: the ranks sent 2001 bytes"),
            "{error}"
        );
        assert!(error.contains("say 2000"), "{error}");
    }
}

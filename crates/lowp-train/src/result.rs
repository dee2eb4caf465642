//! [`RunResult`]: the losses, bytes and times of a run.

use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// A loss on the validation split.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps that were done.
    pub step: usize,
    /// Nats per token, byte or example ([`Data::unit`](crate::Data::unit)).
    pub loss: f64,
}

/// One trained recipe; the field names are the keys of the JSON file.
#[derive(Clone, Debug, Serialize)]
pub struct RunResult {
    /// The name of the run.
    pub recipe: String,
    /// Seed of the initial weights, the batches and stochastic rounding.
    pub seed: u64,
    /// Ranks of all replicas.
    pub ranks: usize,
    /// Steps that are done.
    pub steps: usize,
    /// Those of the checkpoint that the run resumed from.
    pub resumed_at: u64,
    /// Loss of each step's batch before its update, in nats ([`Data::unit`](crate::Data::unit)).
    pub train_loss: Vec<f32>,
    /// Loss on the validation split after the last step, in nats.
    pub val_loss: f64,
    /// The same after every so many steps, as the configuration says.
    pub evaluations: Vec<Evaluation>,
    /// Bytes of weights that the ranks of one replica put on the wire per step, as counted.
    pub wire_bytes_per_step: u64,
    /// The value of the gather plan's formula for the same.
    pub wire_bytes_formula: u64,
    /// Both of the steps of the precision tail, where there is one.
    pub wire_bytes_tail: Option<[u64; 2]>,
    /// Bytes of weight shards that stay allocated between steps, all ranks of one replica together.
    pub resident_weight_bytes: u64,
    /// Bytes of the optimizer's masters of these weights, all ranks of one replica together.
    pub master_weight_bytes: u64,
    /// The most bytes that held these weights at once: the two above, and the memory in which the
    /// ranks gather and decode.
    pub peak_weight_bytes: u64,
    /// Weights of the linear layers, which the byte counts are about.
    pub parameters: usize,
    /// Parameters of the whole model, those that stay in f32 included.
    pub model_parameters: usize,
    /// Steps that non-finite gradients skipped.
    pub skipped_steps: u64,
    /// Wall time, without evaluations.
    pub seconds_per_step: f64,
    /// Those of them in which rank 0 waited for its data.
    pub data_seconds_per_step: f64,
    /// Tokens that all ranks together train in a second.
    pub tokens_per_second: f64,
    /// Floating-point operations of all ranks in a second, by [`Model::flops_per_token`](crate::Model::flops_per_token).
    pub flops_per_second: f64,
    /// The most bytes of parameters and optimizer state that a rank held.
    pub parameter_bytes_per_rank: u64,
    /// The most bytes of a GPU's memory that a rank held, as counted (parameters, optimizer state, activations and what the model works
    /// in) and as measured; none on a CPU.
    pub device_bytes_per_rank: Option<[u64; 2]>,
    /// The most bytes of masters and states that a rank held in page-locked memory of the host; none where a device, or a CPU, has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_locked_bytes_per_rank: Option<u64>,
    /// How the network ran what may run in several ways, as attention on a GPU ([`Network::ways`](crate::Network::ways)); none where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ways: Option<String>,
    /// Seconds of a step in which rank 0 did nothing but wait for gathered weights.
    pub gather_seconds_exposed: f64,
    /// Seconds of gathers from begin to end, where a device timed them.
    pub gather_seconds: Option<f64>,
    /// Seconds of gathers that ran during other work, where that is known.
    pub gather_seconds_hidden: Option<f64>,
}

impl RunResult {
    /// `bytes` per parameter of the linear layers.
    pub fn per_weight(&self, bytes: u64) -> f64 {
        bytes as f64 / self.parameters as f64
    }

    /// Validation loss above `baseline`, in percent of it.
    pub fn gap_percent(&self, baseline: &Self) -> f64 {
        (self.val_loss / baseline.val_loss - 1.0) * 100.0
    }

    /// Holds the bytes that were counted against those that the plans predict.
    ///
    /// # Errors
    /// They differ.
    pub fn check_wire(&self) -> Result<(), TrainError> {
        let main = [self.wire_bytes_per_step, self.wire_bytes_formula];
        let mut parts = [Some(main), self.wire_bytes_tail].into_iter().flatten();
        match parts.find(|[counted, formula]| counted != formula) {
            Some([counted, formula]) => Err(TrainError::Bytes {
                recipe: self.recipe.clone(),
                seed: self.seed,
                counted,
                formula,
            }),
            None => Ok(()),
        }
    }

    /// Checks that a step was applied.
    ///
    /// # Errors
    /// All steps were skipped.
    pub fn check_trained(&self) -> Result<(), TrainError> {
        match self.steps > 0 && self.skipped_steps == self.steps as u64 {
            true => Err(TrainError::NothingTrained {
                recipe: self.recipe.clone(),
                seed: self.seed,
                steps: self.steps,
            }),
            false => Ok(()),
        }
    }

    /// Checks that training did not diverge to infinity or NaN.
    ///
    /// # Errors
    /// Names the first step whose loss is not finite.
    pub fn check_finite(&self) -> Result<(), TrainError> {
        let step = self.train_loss.iter().position(|loss| !loss.is_finite());
        let what = match step {
            Some(step) => format!("loss of step {} of {}", step + 1, self.steps),
            None if self.val_loss.is_finite() => return Ok(()),
            None => "validation loss".to_owned(),
        };
        Err(TrainError::Diverged {
            recipe: self.recipe.clone(),
            seed: self.seed,
            what,
        })
    }
}

/// A run with made-up numbers.
#[cfg(test)]
pub(crate) fn made_up(recipe: &str, seed: u64, val_loss: f64) -> RunResult {
    RunResult {
        recipe: recipe.to_owned(),
        seed,
        ranks: 2,
        steps: 3,
        resumed_at: 0,
        train_loss: vec![5.5, 4.0 + seed as f32, 3.0],
        val_loss,
        evaluations: Vec::new(),
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
        data_seconds_per_step: 0.0005,
        tokens_per_second: 8000.0,
        flops_per_second: 2.5e12,
        parameter_bytes_per_rank: 12_000,
        device_bytes_per_rank: None,
        page_locked_bytes_per_rank: None,
        ways: None,
        gather_seconds_exposed: 0.025,
        gather_seconds: None,
        gather_seconds_hidden: Some(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_is_not_finite_is_an_error() {
        let mut result = made_up("x", 7, 2.0);
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
    fn a_run_without_a_step_that_was_applied_is_an_error() {
        let mut result = made_up("x", 7, 2.0);
        result.skipped_steps = 2;
        result.check_trained().expect("one step of three");
        result.skipped_steps = 3;
        let error = result.check_trained().unwrap_err().to_string();
        assert!(
            error.starts_with("x, seed 7: nothing was trained"),
            "{error}"
        );
        result.steps = 0;
        result.skipped_steps = 0;
        result.check_trained().expect("no step was asked for");
    }

    #[test]
    fn bytes_that_differ_from_the_plan_are_an_error() {
        let mut result = made_up("x", 7, 2.0);
        result.check_wire().expect("equal");
        result.wire_bytes_tail = Some([1500, 1500]);
        result.check_wire().expect("equal");
        result.wire_bytes_tail = Some([1500, 1501]);
        let error = result.check_wire().unwrap_err().to_string();
        assert!(error.contains("sent 1500 bytes"), "{error}");
        result.wire_bytes_per_step += 1;
        let error = result.check_wire().unwrap_err().to_string();
        assert!(
            error.starts_with("x, seed 7: the ranks sent 2001 bytes"),
            "{error}"
        );
        assert!(error.contains("say 2000"), "{error}");
    }
}

//! [`RunResult`]: what a run leaves behind.

use serde::Serialize;

use crate::error::TrainError;

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
    /// Those of the checkpoint that the run went on behind.
    pub resumed_at: u64,
    /// Loss of each step's batch before its update, nats per byte.
    pub train_loss: Vec<f32>,
    /// Loss on the validation split after the last step, nats per byte.
    pub val_loss: f64,
    /// Bytes of weights that the ranks of one replica put on the wire per step, as counted.
    pub wire_bytes_per_step: u64,
    /// The value of the gather plan's formula for the same.
    pub wire_bytes_formula: u64,
    /// Both of the steps of the precision tail, where there is one.
    pub wire_bytes_tail: Option<[u64; 2]>,
    /// Bytes of weight shards that stay allocated between steps, all ranks of one replica together.
    pub resident_weight_bytes: u64,
    /// Bytes of the optimizer's f32 masters of these weights, all ranks of one replica together.
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
    /// Wall time.
    pub seconds_per_step: f64,
    /// Over all ranks.
    pub tokens_per_second: f64,
    /// By [`Model::flops_per_token`](crate::Model::flops_per_token).
    pub flops_per_second: f64,
    /// The most bytes of parameters and optimizer state that a rank held.
    pub parameter_bytes_per_rank: u64,
    /// The most bytes of a GPU's memory that a rank held, as counted (parameters, optimizer state, activations and what the model works
    /// in) and as measured; none on a CPU.
    pub device_bytes_per_rank: Option<[u64; 2]>,
    /// Seconds of a step in which rank 0 did nothing but wait for gathered weights.
    pub gather_seconds_exposed: f64,
    /// Seconds of gathers from begin to end, where a device timed them.
    pub gather_seconds: Option<f64>,
    /// Seconds of gathers that ran beside other work, where that is known.
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

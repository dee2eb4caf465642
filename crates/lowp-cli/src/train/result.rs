//! What a run leaves behind.

use serde::Serialize;

/// One trained recipe; the field names are the keys of the JSON file.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RunResult {
    pub(crate) recipe: String,
    /// Seed of the initial weights, the batches and stochastic rounding.
    pub(crate) seed: u64,
    pub(crate) ranks: usize,
    pub(crate) steps: usize,
    /// Loss of each step's batch before its update, nats per byte.
    pub(crate) train_loss: Vec<f32>,
    /// Loss on the validation split after the last step, nats per byte.
    pub(crate) val_loss: f64,
    /// Bytes of weights that the ranks of one replica put on the wire per step, as counted.
    pub(crate) wire_bytes_per_step: u64,
    /// The value of the gather plan's formula for the same.
    pub(crate) wire_bytes_formula: u64,
    /// Bytes of weight shards that stay allocated between steps, all ranks of one replica together.
    pub(crate) resident_weight_bytes: u64,
    /// Weights of the linear layers, which the byte counts are about.
    pub(crate) parameters: usize,
    /// Parameters of the whole model, those that stay in f32 included.
    pub(crate) model_parameters: usize,
    /// Steps that non-finite gradients skipped.
    pub(crate) skipped_steps: u64,
    pub(crate) seconds_per_step: f64,
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
}

//! What a run leaves behind.

use serde::Serialize;

/// One trained recipe; the field names are the keys of the JSON file.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RunResult {
    pub(crate) recipe: String,
    pub(crate) ranks: usize,
    pub(crate) steps: usize,
    /// Loss of each step's batch before its update, nats per byte.
    pub(crate) train_loss: Vec<f32>,
    /// Loss on the validation split after the last step, nats per byte.
    pub(crate) val_loss: f64,
    /// Bytes of gathered weights that one rank group sends per step, all ranks together.
    pub(crate) wire_bytes_per_step: u64,
    /// The value of the gather plan's formula for the same.
    pub(crate) wire_bytes_formula: u64,
    /// Bytes of weights that stay allocated between steps, all ranks together.
    pub(crate) resident_weight_bytes: u64,
    /// Parameters of the whole model.
    pub(crate) parameters: usize,
    /// Parameters of the linear layers, which the byte counts are about.
    pub(crate) weight_parameters: usize,
    pub(crate) seconds_per_step: f64,
}

impl RunResult {
    /// Validation loss above `baseline`, in percent of it.
    pub(crate) fn gap_percent(&self, baseline: &Self) -> f64 {
        (self.val_loss / baseline.val_loss - 1.0) * 100.0
    }

    /// `bytes` per parameter of the linear layers.
    pub(crate) fn per_weight(&self, bytes: u64) -> f64 {
        bytes as f64 / self.weight_parameters as f64
    }
}

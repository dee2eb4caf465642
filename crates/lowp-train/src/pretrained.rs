//! [`Pretrained`]: the model that a run begins with, in place of random values.

use std::error::Error;
use std::fmt;
use std::ops::Range;

use lowp_file::Values;
use lowp_fsdp::FirstValues;
use serde_json::Value;

/// A model that was trained before. What is not given is as in a new model.
#[derive(Clone, Copy, Default)]
pub struct Pretrained<'a> {
    /// The first values of all parameters.
    pub values: Option<&'a (dyn FirstValues + Sync)>,
    /// Its `config.json`, which checkpoints keep for exports.
    pub config: Option<&'a Value>,
}

impl fmt::Debug for Pretrained<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pretrained")
            .field("values", &self.values.is_some())
            .field("config", &self.config)
            .finish()
    }
}

/// The values of a Hugging Face folder, whose tensors have the names of the parameters.
#[derive(Debug)]
pub struct HubValues<'a>(pub Values<'a>);

impl FirstValues for HubValues<'_> {
    fn read(
        &self,
        name: &str,
        shape: &[usize],
        elements: Range<usize>,
    ) -> Result<Vec<f32>, Box<dyn Error + Send + Sync>> {
        Ok(self.0.read(name, shape, elements)?)
    }
}

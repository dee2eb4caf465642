//! [`Pretrained`]: the model that a run begins with, in place of random values.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::ops::Range;

use lowp_file::Values;
use lowp_fsdp::FirstValues;
use serde_json::Value;

use crate::error::TrainError;

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

impl HubValues<'_> {
    /// Checks that the folder has all `parameters` of a network, and nothing else that would be lost. Tensors whose values follow from
    /// others are neither: a tied head, the frequencies of rotary positions, and scales that inference casts activations with.
    ///
    /// # Errors
    /// What is missing, or would be lost.
    pub fn check(&self, parameters: &BTreeSet<String>) -> Result<(), TrainError> {
        if let Some(name) = parameters.iter().find(|name| !self.0.has(name)) {
            return Err(TrainError::Pretrained(format!(
                "there is no tensor '{name}', which config.json asks for; give a whole model"
            )));
        }
        let names = self.0.names();
        let names = names.map_err(|error| TrainError::Pretrained(error.to_string()))?;
        let extra = extra(&names, parameters);
        if extra.is_empty() {
            return Ok(());
        }
        let first = extra.iter().take(3).map(|name| format!("'{name}'"));
        Err(TrainError::Pretrained(format!(
            "{} of {} tensors are no parameters of the network in config.json, so they would be lost: {}{}; give a model without them",
            extra.len(),
            names.len(),
            first.collect::<Vec<_>>().join(", "),
            if extra.len() > 3 { ", .." } else { "" }
        )))
    }
}

/// The `names` that are none of `parameters`, and do not follow from them; a network with a head of its own has it as a parameter.
fn extra<'a>(names: &'a BTreeSet<String>, parameters: &'a BTreeSet<String>) -> Vec<&'a str> {
    let follows = |name: &&str| {
        let ends = [
            ".rotary_emb.inv_freq",
            ".input_scale",
            ".output_scale",
            ".q_scale",
            ".k_scale",
            ".v_scale",
        ];
        *name == "lm_head.weight" || ends.iter().any(|end| name.ends_with(end))
    };
    let names = names.difference(parameters).map(String::as_str);
    names.filter(|name| !follows(name)).collect()
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_follows_from_parameters_may_be_left_out() {
        let set = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let names = set(&[
            "a.weight",
            "a.bias",
            "lm_head.weight",
            "b.rotary_emb.inv_freq",
            "a.input_scale",
        ]);
        assert_eq!(extra(&names, &set(&["a.weight"])), ["a.bias"]);
    }
}

//! [`Model`]: the parameters of a model that is planned, and what the plan says of it.

use crate::output::shown;
use crate::usage::{UsageError, of_patterns};
use lowp_file::patterns::{self, weight_of};
use lowp_fsdp::cost::ModelShapes;
use lowp_train::Model as _;
use lowp_transformer::{GptConfig, HubModel, Sizes};

/// The linear layers in the order of forward, and what stays in f32.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) blocks: usize,
    pub(super) shapes: ModelShapes,
    /// Of a network that `lowp train` runs on GPUs.
    pub(super) sizes: Option<Sizes>,
    /// Why `lowp train` runs no such network on GPUs.
    pub(super) unplanned: Option<String>,
    /// What the plan takes for granted.
    pub(super) notes: Vec<String>,
}

impl Model {
    /// The model of `lowp train` with these sizes.
    pub(super) fn of_sizes(name: &str, sizes: GptConfig) -> Result<Self, UsageError> {
        let shapes = ModelShapes::of_specs(&sizes.linears(), &sizes.vars());
        let shapes = shapes.map_err(|e| UsageError::new(format!("{}: {e}", shown(name))))?;
        Ok(Self {
            name: name.to_owned(),
            blocks: sizes.layers,
            shapes,
            sizes: Some(sizes.sizes()),
            unplanned: None,
            notes: Vec::new(),
        })
    }

    /// For each layer, whether its name matches one of the patterns.
    pub(super) fn matching(&self, keep_bf16: &[String]) -> Result<Vec<bool>, UsageError> {
        let layers = &self.shapes.layers;
        // Files name layers, presets of Llama their weights.
        let names = layers.iter().map(|layer| weight_of(&layer.name));
        let names: Vec<String> = names.collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let matching = patterns::matching(keep_bf16, &names, || {
            let first = layers.iter().filter(|layer| layer.block == 0).take(8);
            let first: Vec<&str> = first.map(|layer| layer.name.as_str()).collect();
            format!(
                "no linear layer of {}; the first are {}",
                shown(&self.name),
                first.join(", ")
            )
        });
        matching.map_err(of_patterns("--keep-bf16"))
    }
}

impl From<HubModel> for Model {
    fn from(model: HubModel) -> Self {
        let HubModel {
            name,
            blocks,
            shapes,
            notes,
        } = model;
        Self {
            name,
            blocks,
            shapes,
            sizes: None,
            unplanned: None,
            notes,
        }
    }
}

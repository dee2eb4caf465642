//! [`Model`]: the parameters of a model that is planned, and what the plan says of it.

use crate::globs::{self, weight_of};
use crate::output::shown;
use crate::usage::UsageError;
use lowp_format::Shape;
use lowp_fsdp::cost::{CostError, ModelShapes};
use lowp_train::Model as _;
use lowp_transformer::{GptConfig, Sizes};

/// The linear layers in the order of forward, and what stays in f32.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) blocks: usize,
    pub(super) shapes: ModelShapes,
    /// Of a preset, whose layers run on GPUs.
    pub(super) sizes: Option<Sizes>,
    /// What the plan takes for granted.
    pub(super) notes: Vec<String>,
}

impl Model {
    /// The model of `lowp train` with these sizes.
    ///
    /// # Errors
    /// A variable that no model has.
    pub(super) fn of_sizes(name: &str, sizes: GptConfig) -> Result<Self, UsageError> {
        let shapes = ModelShapes::of_specs(&sizes.linears(), &sizes.vars());
        let shapes = shapes.map_err(|e| UsageError::new(format!("{}: {e}", shown(name))))?;
        Ok(Self {
            name: name.to_owned(),
            blocks: sizes.layers,
            shapes,
            sizes: Some(sizes.sizes()),
            notes: Vec::new(),
        })
    }

    /// Adds a linear layer of `block`.
    pub(super) fn linear(&mut self, block: usize, name: String, rows: usize, cols: usize) {
        self.shapes.linear(block, name, rows, cols);
    }

    /// Adds a vector that stays in f32.
    pub(super) fn vector(&mut self, len: usize) {
        self.shapes.vector(len);
    }

    /// Adds a matrix that stays in f32.
    pub(super) fn matrix(&mut self, rows: usize, cols: usize) {
        self.shapes.vars.push(Shape::new(rows, cols));
    }

    /// Checks that bytes can be counted.
    ///
    /// # Errors
    /// A layer or a model that is too large, with its numbers.
    pub(super) fn check(&self) -> Result<(), UsageError> {
        self.shapes.check().map_err(|error| {
            let name = shown(&self.name);
            UsageError::new(match error {
                CostError::Parameters { .. } => format!("{name} has {error}"),
                _ => format!("{name}: {error}"),
            })
        })
    }

    /// For each layer, whether its name matches one of the patterns.
    ///
    /// # Errors
    /// A pattern that is none, or that matches no layer.
    pub(super) fn matching(&self, patterns: &[String]) -> Result<Vec<bool>, UsageError> {
        let layers = &self.shapes.layers;
        // Files name layers, presets of Llama their weights.
        let names = layers.iter().map(|layer| weight_of(&layer.name));
        let names: Vec<String> = names.collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        globs::matching("--keep-bf16", patterns, &names, || {
            let first = layers.iter().filter(|layer| layer.block == 0).take(8);
            let first: Vec<&str> = first.map(|layer| layer.name.as_str()).collect();
            format!(
                "no linear layer of {}; the first are {}",
                shown(&self.name),
                first.join(", ")
            )
        })
    }
}

//! [`Model`]: the parameters of a model that is planned.

use crate::globs::{self, weight_of};
use crate::output::shown;
use crate::train::GptConfig;
use crate::usage::UsageError;
use lowp_format::Shape;

/// Most parameters of a model: what follows from them fits into the numbers of a plan.
const MAX_PARAMETERS: u128 = 1 << 48;

/// A linear layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layer {
    pub(super) name: String,
    /// The transformer block that it belongs to, from 0.
    pub(super) block: usize,
    /// Output x input features.
    pub(super) shape: Shape,
}

/// The linear layers in the order of forward, and what stays in f32.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) blocks: usize,
    pub(super) layers: Vec<Layer>,
    /// Embeddings, norms, biases, routers and the head; a vector is one row.
    pub(super) vars: Vec<Shape>,
    /// What the plan takes for granted.
    pub(super) notes: Vec<String>,
}

impl Model {
    /// The model of `lowp train` with these sizes.
    pub(super) fn of_sizes(name: &str, sizes: GptConfig) -> Self {
        let layer = |spec: lowp_fsdp::LinearSpec| Layer {
            name: spec.name,
            block: spec.block,
            shape: Shape::new(spec.rows, spec.cols),
        };
        let var = |spec: lowp_fsdp::VarSpec| match spec.shape[..] {
            [rows, cols] => Shape::new(rows, cols),
            _ => Shape::new(1, spec.shape.iter().product()),
        };
        Self {
            name: name.to_owned(),
            blocks: sizes.layers,
            layers: sizes.linears().into_iter().map(layer).collect(),
            vars: sizes.vars().into_iter().map(var).collect(),
            notes: Vec::new(),
        }
    }

    /// Adds a linear layer of `block`.
    pub(super) fn linear(&mut self, block: usize, name: String, rows: usize, cols: usize) {
        let shape = Shape::new(rows, cols);
        self.layers.push(Layer { name, block, shape });
    }

    /// Adds a vector that stays in f32.
    pub(super) fn vector(&mut self, len: usize) {
        self.vars.push(Shape::new(1, len));
    }

    /// Parameters of the linear layers and of the variables.
    pub(super) fn parameters(&self) -> [u128; 2] {
        let elements = |shape: &Shape| shape.rows as u128 * shape.cols as u128;
        [
            self.layers.iter().map(|layer| elements(&layer.shape)).sum(),
            self.vars.iter().map(elements).sum(),
        ]
    }

    /// Checks that bytes can be counted.
    ///
    /// # Errors
    /// A layer or a model that is too large, with its numbers.
    pub(super) fn check(&self) -> Result<(), UsageError> {
        let named = self.layers.iter().map(|l| (l.name.as_str(), l.shape));
        let vars = self.vars.iter().map(|&shape| ("a variable", shape));
        for (name, shape) in named.chain(vars) {
            shape.check().map_err(|error| {
                UsageError::new(format!("{}: {name} is {shape}: {error}", shown(&self.name)))
            })?;
        }
        let total: u128 = self.parameters().iter().sum();
        if total > MAX_PARAMETERS {
            return Err(UsageError::new(format!(
                "{} has {total} parameters; a plan is made for at most {MAX_PARAMETERS}",
                shown(&self.name)
            )));
        }
        Ok(())
    }

    /// For each layer, whether its name matches one of the patterns.
    ///
    /// # Errors
    /// A pattern that is none, or that matches no layer.
    pub(super) fn matching(&self, patterns: &[String]) -> Result<Vec<bool>, UsageError> {
        // Files name layers, presets of Llama their weights.
        let names = self.layers.iter().map(|layer| weight_of(&layer.name));
        let names: Vec<String> = names.collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        globs::matching("--keep-bf16", patterns, &names, || {
            let first = self.layers.iter().filter(|layer| layer.block == 0).take(8);
            let first: Vec<&str> = first.map(|layer| layer.name.as_str()).collect();
            format!(
                "no linear layer of {}; the first are {}",
                shown(&self.name),
                first.join(", ")
            )
        })
    }
}

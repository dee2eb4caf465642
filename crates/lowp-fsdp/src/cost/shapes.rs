//! [`ModelShapes`]: the parameters of a model that is planned.

use super::config::CostError;
use crate::plain_vars::shape_of;
use crate::{LinearSpec, VarSpec, VarUse};
use lowp_format::Shape;

/// Most parameters of a model: what follows from them fits into the numbers of a plan.
const MAX_PARAMETERS: u128 = 1 << 48;

/// A linear layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Its name in the model, `model.layers.0.mlp.up_proj` for example.
    pub name: String,
    /// The transformer block that it belongs to, from 0.
    pub block: usize,
    /// Output x input features.
    pub shape: Shape,
}

/// A parameter that stays in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VarShape {
    /// A vector is one row.
    pub shape: Shape,
    /// When a pass reads it.
    pub used: VarUse,
}

/// The linear layers in the order of forward, and what stays in f32.
#[derive(Clone, Debug, Default)]
pub struct ModelShapes {
    /// The linear layers in the order of forward; those of one block follow each other.
    pub layers: Vec<LayerShape>,
    /// Embeddings, norms, biases, routers and the head.
    pub vars: Vec<VarShape>,
}

impl ModelShapes {
    /// Those of a [`crate::ShardedModel`] of these parameters.
    ///
    /// # Errors
    /// A variable that the model cannot have.
    pub fn of_specs(linears: &[LinearSpec], vars: &[VarSpec]) -> Result<Self, CostError> {
        let layer = |spec: &LinearSpec| LayerShape {
            name: spec.name.clone(),
            block: spec.block,
            shape: Shape::new(spec.rows, spec.cols),
        };
        let var = |spec: &VarSpec| {
            Ok(VarShape {
                shape: shape_of(spec)?,
                used: spec.used,
            })
        };
        Ok(Self {
            layers: linears.iter().map(layer).collect(),
            vars: vars.iter().map(var).collect::<Result<_, CostError>>()?,
        })
    }

    /// Adds a linear layer of `block`.
    pub fn linear(&mut self, block: usize, name: String, rows: usize, cols: usize) {
        let shape = Shape::new(rows, cols);
        self.layers.push(LayerShape { name, block, shape });
    }

    /// Adds a vector that stays in f32.
    pub fn vector(&mut self, len: usize) {
        self.matrix(1, len, VarUse::Throughout);
    }

    /// Adds a matrix that stays in f32.
    pub fn matrix(&mut self, rows: usize, cols: usize, used: VarUse) {
        let shape = Shape::new(rows, cols);
        self.vars.push(VarShape { shape, used });
    }

    /// Parameters of the linear layers and of the variables.
    pub fn parameters(&self) -> [u128; 2] {
        let elements = |shape: &Shape| shape.rows as u128 * shape.cols as u128;
        [
            self.layers.iter().map(|layer| elements(&layer.shape)).sum(),
            self.vars.iter().map(|var| elements(&var.shape)).sum(),
        ]
    }

    /// Checks that bytes can be counted.
    ///
    /// # Errors
    /// A layer or a model that is too large, with its numbers.
    pub fn check(&self) -> Result<(), CostError> {
        let named = self.layers.iter().map(|l| (l.name.as_str(), l.shape));
        let vars = self.vars.iter().map(|var| ("a variable", var.shape));
        for (name, shape) in named.chain(vars) {
            shape.check().map_err(|source| CostError::Shape {
                name: name.to_owned(),
                shape,
                source,
            })?;
        }
        let parameters: u128 = self.parameters().iter().sum();
        if parameters > MAX_PARAMETERS {
            return Err(CostError::Parameters {
                parameters,
                most: MAX_PARAMETERS,
            });
        }
        Ok(())
    }
}

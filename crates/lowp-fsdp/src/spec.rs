//! The parameters of a model, as its builder states them.

use lowp_shard::Init;

/// A linear layer of a [`ShardedModel`](crate::ShardedModel): its weight is sharded and quantized.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearSpec {
    /// Its name in errors, for example `block2.fc`.
    pub name: String,
    /// The transformer block that the layer belongs to, from 0. Weights of layers of one block that follow each other are gathered
    /// together: from the first use of one in a phase to the last, all are in memory.
    pub block: usize,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Initial values.
    pub init: Init,
    /// The number of the layers that its scale is made together with, where their scales follow from amaxes of tensors: layers that
    /// serve as one, such as those of query, key and value.
    pub amax_group: Option<usize>,
}

impl LinearSpec {
    /// A layer of block 0 whose scales are its own.
    pub fn new(name: impl Into<String>, rows: usize, cols: usize, init: Init) -> Self {
        Self {
            name: name.into(),
            block: 0,
            rows,
            cols,
            init,
            amax_group: None,
        }
    }
}

/// A parameter of a [`ShardedModel`](crate::ShardedModel) that stays in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct VarSpec {
    /// Its name in errors, for example `block2.norm1.gamma`.
    pub name: String,
    /// Shape, one or two axes.
    pub shape: Vec<usize>,
    /// Initial values.
    pub init: Init,
    /// Whether weight decay applies: matrices yes, norms no.
    pub decay: bool,
}

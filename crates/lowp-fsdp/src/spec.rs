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
    /// Output features, the rows of the weight.
    pub rows: usize,
    /// Input features, the columns of the weight: `y = x W^T`.
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
    /// When a pass reads it.
    pub used: VarUse,
}

/// When a pass reads the full values of a variable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum VarUse {
    /// Throughout: they are gathered once per step, and stay.
    #[default]
    Throughout,
    /// Once, before the layers, as those of an embedding: they are gathered for this use and freed after it. The gradient comes after
    /// those of the layers.
    First,
    /// Once, after the layers, as those of a head: they are gathered for this use and freed after it. The gradient comes before
    /// those of the layers.
    Last,
    /// Before and after the layers, as those of an embedding that is the head: they are gathered for each of both uses. The gradient
    /// comes after those of the layers.
    FirstAndLast,
}

impl VarUse {
    /// Whether the full values are there only while they are used.
    pub fn is_transient(self) -> bool {
        self != Self::Throughout
    }

    /// Whether their gradient is there before those of the layers.
    pub(crate) fn is_first_in_backward(self) -> bool {
        self == Self::Last
    }
}

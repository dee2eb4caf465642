//! [`ModelError`]: what can be wrong with a sharded model.

use lowp_checkpoint::CheckpointError;
use lowp_comm::CommError;
use lowp_format::{FormatError, Shape};
use lowp_kernels::KernelError;
use lowp_optim::OptimError;
use lowp_shard::ShardError;
use thiserror::Error;

use crate::FormatMismatch;

/// What is wrong with the shape of a variable.
#[derive(Debug, Error)]
pub enum VarShapeError {
    /// No axes, or more than two.
    #[error("variable '{name}' has shape {shape:?}; give one or two axes")]
    Axes {
        /// The variable.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// More elements than a matrix has.
    #[error("variable '{name}': {source}")]
    TooLarge {
        /// The variable.
        name: String,
        /// What is wrong.
        source: FormatError,
    },
}

/// What is wrong, with the layer where one layer is the cause.
#[derive(Debug, Error)]
pub enum ModelError {
    /// A parameter that cannot be made.
    #[error("{name}: {source}")]
    Param {
        /// The parameter's name.
        name: String,
        /// What is wrong with it.
        source: Box<OptimError>,
    },
    /// A checkpoint of another optimizer.
    #[error(
        "the checkpoint has {saved} of '{name}', as {saved_by} keeps it, and this model is trained by {rule}, which keeps {needed}; {differ} of {params} parameters differ so; load it into a model of \
         that optimizer, or start from its weights alone"
    )]
    OtherOptimizer {
        /// The first parameter that differs.
        name: String,
        /// Its states in the checkpoint.
        saved: Box<str>,
        /// The rule that has them.
        saved_by: &'static str,
        /// Its rule in the model.
        rule: &'static str,
        /// The states of that rule.
        needed: Box<str>,
        /// How many parameters have other states in the checkpoint than in the model.
        differ: usize,
        /// How many there are.
        params: usize,
    },
    /// Variables that a rule of matrices would update.
    #[error(
        "variable '{name}' would be updated by {rule}, which makes matrices orthogonal; give variables a group of another rule \
         (`ModelOptions::var_group`), such as AdamW"
    )]
    VarRule {
        /// The first variable.
        name: String,
        /// The rule.
        rule: &'static str,
    },
    /// Products of a layer would read operands in different formats.
    #[error("layer '{name}': {source}")]
    Formats {
        /// The layer's name.
        name: String,
        /// Which, and how they differ.
        source: Box<FormatMismatch>,
    },
    /// A weight whose gradient has nowhere to go.
    #[error("no optimizer is connected to this weight")]
    NotConnected,
    /// A gradient of another length than its parameter.
    #[error("the gradient of a {shape} parameter has {found} values")]
    GradientLength {
        /// Its values.
        found: usize,
        /// The parameter.
        shape: Shape,
    },
    /// A number of a variable that the model does not have.
    #[error("no variable {index}: the model has {len}, counted from 0")]
    NoSuchVar {
        /// The number.
        index: usize,
        /// Variables of the model.
        len: usize,
    },
    /// A variable that no matrix holds.
    #[error(transparent)]
    VarShape(#[from] VarShapeError),
    /// A thread panicked over a weight.
    #[error("a thread failed while it used a {shape} weight")]
    PoisonedWeight {
        /// The weight.
        shape: Shape,
    },
    /// A thread panicked over the casts of a layer.
    #[error("a thread failed in a cast")]
    PoisonedCast,
    /// Values or gradients on the host, of variables that are on the backend.
    #[error(
        "the variables of this model are buffers of its backend: push their gradients with `push_var_gradient` and end with \
         `finish_micro_batch`, or build it with `VarPlace::Host`"
    )]
    VarsOnBackend,
    /// A micro-batch failed, or was left, after its backward pass reduced gradients.
    #[error(
        "{open} of {total} parameters hold gradients of a micro-batch that was not finished by `finish_micro_batch`; \
         call `discard_gradients` on every rank and run all micro-batches of the step again"
    )]
    UnfinishedMicroBatch {
        /// Those with a gradient of it.
        open: usize,
        /// All of them.
        total: usize,
    },
    /// Gradients that belong to no step yet.
    #[error(
        "{added} micro-batches were added since the last step and would be lost; call `finish_step` or `discard_gradients` first"
    )]
    AddedMicroBatches {
        /// Micro-batches.
        added: usize,
    },
    /// A checkpoint is damaged, or of another model.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The optimizer failed.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A collective or a gather failed.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// A kernel rejected its job.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A shape is wrong.
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl From<CommError> for ModelError {
    fn from(error: CommError) -> Self {
        ShardError::from(error).into()
    }
}

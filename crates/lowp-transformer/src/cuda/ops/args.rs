//! What operations of a transformer read and write, where that is much.

use std::ops::Range;

use lowp_kernels::CudaBuffer;

use super::{Sums, Values};

/// Gamma and, in layer norms, beta.
#[derive(Clone, Debug)]
pub(in super::super) struct NormParams {
    pub(in super::super) gamma: Sums,
    pub(in super::super) beta: Option<Sums>,
    /// What is added to the variance.
    pub(in super::super) eps: f32,
}

/// How heads lie in rows of tokens.
#[derive(Clone, Debug)]
pub(in super::super) struct Heads {
    /// Heads in the rows.
    pub(in super::super) count: usize,
    /// Heads that each of them serves.
    pub(in super::super) groups: usize,
    pub(in super::super) dim: usize,
    pub(in super::super) seq: usize,
    /// Values of a row.
    pub(in super::super) stride: usize,
    /// First value of the heads in a row.
    pub(in super::super) first: usize,
    /// Cosine and sine by position and half a head, where pairs are turned.
    pub(in super::super) angles: Option<Sums>,
}

/// What a norm adds to what it is of.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Branch<'a> {
    pub(in super::super) values: &'a Values,
    /// Where the sum goes.
    pub(in super::super) sum: &'a Values,
}

/// What the backward pass of a norm reads and writes.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct NormBackward<'a> {
    /// The gradient of the norm.
    pub(in super::super) dh: &'a Values,
    /// What the norm is of.
    pub(in super::super) x: &'a Values,
    /// What forward kept of each row.
    pub(in super::super) stats: &'a Sums,
    /// What is added to the gradient for `x`, which goes to `dx`.
    pub(in super::super) residual: Option<&'a Values>,
    pub(in super::super) dx: &'a Values,
    /// Memory for the sums of blocks.
    pub(in super::super) partial: &'a Sums,
    pub(in super::super) dgamma: &'a Sums,
    pub(in super::super) dbeta: Option<&'a Sums>,
}

/// Heads that have norms.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct NormedHeads<'a> {
    pub(in super::super) heads: &'a Heads,
    pub(in super::super) tokens: usize,
    pub(in super::super) params: &'a NormParams,
}

/// The sizes of an embedding.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct EmbeddingSizes {
    pub(in super::super) tokens: usize,
    pub(in super::super) dim: usize,
    pub(in super::super) seq: usize,
    pub(in super::super) vocab: usize,
}

/// What the loss of some tokens of a batch reads and writes.
#[derive(Clone, Debug)]
pub(in super::super) struct CrossEntropy<'a> {
    pub(in super::super) tokens: Range<usize>,
    pub(in super::super) vocab: usize,
    /// `[tokens, vocab]`.
    pub(in super::super) logits: &'a Sums,
    /// Of the whole batch.
    pub(in super::super) targets: &'a CudaBuffer<u8>,
    /// Of the whole batch.
    pub(in super::super) losses: &'a Sums,
    /// Where `scale` times the gradients of losses go, with that of a z-loss.
    pub(in super::super) gradients: Option<&'a Values>,
    pub(in super::super) scale: f32,
    /// Coefficient of the z-loss.
    pub(in super::super) z_loss: f32,
}

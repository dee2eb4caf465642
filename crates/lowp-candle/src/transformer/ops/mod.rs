//! candle custom operations of the transformer with analytic gradients.
//!
//! candle builds each of these from several element-wise passes over fresh tensors; one pass each is what makes a
//! training step on two cores fit its time budget. All of them take contiguous f32 tensors on the CPU.

mod attention;
mod embedding;
mod gelu;
mod head_loss;
mod layer_norm;
mod math;
mod rms_norm;
mod rotary;
mod swiglu;

pub(crate) use attention::{CausalAttention, Seen};
pub(crate) use embedding::{Positions, add_rows, embed};
pub(crate) use gelu::Gelu;
pub(crate) use head_loss::{HeadLoss, LOGITS, LossOptions};
pub(crate) use layer_norm::LayerNorm;
pub(crate) use rms_norm::RmsNorm;
pub(crate) use rotary::Rotary;
pub(crate) use swiglu::SwiGlu;

use candle_core::Result;

/// The state that a forward pass leaves for its backward pass.
pub(crate) type Saved = std::sync::Mutex<Vec<f32>>;

/// Takes what the forward pass saved.
pub(crate) fn saved<'a>(
    state: &'a Saved,
    op: &'static str,
) -> Result<std::sync::MutexGuard<'a, Vec<f32>>> {
    match state.lock() {
        Ok(guard) => Ok(guard),
        Err(_) => candle_core::bail!("{op}: its forward pass panicked"),
    }
}

//! candle custom operations of the transformer with analytic gradients.
//!
//! candle builds each of these from several element-wise passes over fresh tensors; one pass each is what makes a
//! training step on two cores fit its time budget. All of them take contiguous f32 tensors on the CPU.

mod attention;
mod cross_entropy;
mod dense;
mod embedding;
mod gelu;
mod layer_norm;
mod math;

pub use attention::CausalAttention;
pub use cross_entropy::CrossEntropy;
pub use dense::Dense;
pub use embedding::Embedding;
pub use gelu::Gelu;
pub use layer_norm::LayerNorm;

use candle_core::{CpuStorage, Layout, Result, Shape, Storage, Tensor};

/// The values of a contiguous f32 operand of a custom operation.
pub(crate) fn values<'a>(
    storage: &'a CpuStorage,
    layout: &Layout,
    op: &'static str,
) -> Result<&'a [f32]> {
    let all = storage.as_slice::<f32>()?;
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&all[start..end]),
        None => candle_core::bail!(
            "{op} needs a contiguous operand, got strides {:?}",
            layout.stride()
        ),
    }
}

/// Calls `f` with the values of a contiguous f32 CPU tensor.
pub(crate) fn with_values<T>(
    tensor: &Tensor,
    op: &'static str,
    f: impl FnOnce(&[f32]) -> Result<T>,
) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => f(values(cpu, layout, op)?),
        _ => candle_core::bail!("{op} runs on the CPU only"),
    }
}

/// Wraps freshly computed values as the result of a custom operation.
pub(crate) fn output(data: Vec<f32>, shape: impl Into<Shape>) -> (CpuStorage, Shape) {
    (CpuStorage::F32(data), shape.into())
}

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

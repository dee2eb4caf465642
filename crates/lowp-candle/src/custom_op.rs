//! Operands and results of candle custom operations that run on f32 values of the CPU.

use candle_core::{CpuStorage, Layout, Result, Shape, Storage, Tensor};

/// The values of a contiguous f32 operand of the custom operation called `op`.
///
/// # Errors
/// An operand of another type, or one that is not contiguous.
pub fn values<'a>(storage: &'a CpuStorage, layout: &Layout, op: &'static str) -> Result<&'a [f32]> {
    let all = storage.as_slice::<f32>()?;
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&all[start..end]),
        None => candle_core::bail!(
            "{op} needs a contiguous operand, got strides {:?}",
            layout.stride()
        ),
    }
}

/// Calls `f` with the values of contiguous f32 CPU tensors, for the custom operation called `op`.
///
/// # Errors
/// A tensor of another type or device, one that is not contiguous, or what `f` returns.
pub fn with_values<const N: usize, T>(
    tensors: [&Tensor; N],
    op: &'static str,
    f: impl FnOnce([&[f32]; N]) -> Result<T>,
) -> Result<T> {
    let held = tensors.map(|tensor| tensor.storage_and_layout());
    let mut all = [&[][..]; N];
    for (slot, (storage, layout)) in all.iter_mut().zip(&held) {
        *slot = match &**storage {
            Storage::Cpu(cpu) => values(cpu, layout, op)?,
            _ => candle_core::bail!("{op} runs on the CPU only"),
        };
    }
    f(all)
}

/// The result of a custom operation, of values that it computed.
pub fn output(data: Vec<f32>, shape: impl Into<Shape>) -> (CpuStorage, Shape) {
    (CpuStorage::F32(data), shape.into())
}

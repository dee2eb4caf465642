//! What encodes know about their tensors ([`TensorInput`]), and how observations are consumed.

use lowp_format::{KernelKey, ScaleRule, tensor_scale};

use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::buffer::CpuBuffer;
use crate::{KernelError, TensorInput};

/// Consumes the observed amax of `input`, if it has one. Call [`value`] after the last of a plan.
pub(super) fn consume(
    input: Option<&TensorInput<Cpu>>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    match input {
        Some(TensorInput::Observed { slot, .. }) => {
            consume_range(&slot.buffer, slot.index, 1, views)
        }
        _ => Ok(()),
    }
}

/// Consumes `count` entries of `buffer` from `start` on.
pub(super) fn consume_range(
    buffer: &CpuBuffer<f32>,
    start: usize,
    count: usize,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    for entry in &mut views.floats.shared(buffer)?[start..start + count] {
        *entry = -entry.abs();
    }
    Ok(())
}

/// The encode scale, or the amax of two-level scales: what [`crate::cpu::ingredients::dispatch`] takes.
pub(super) fn value(
    input: Option<&TensorInput<Cpu>>,
    key: &KernelKey,
    views: &mut AllViews<'_>,
) -> Result<f32, KernelError> {
    let Some(input) = input else { return Ok(1.0) };
    let slot = input.slot();
    views.floats.freeze(&slot.buffer)?;
    let entry = views.floats.read(&slot.buffer)?[slot.index];
    Ok(match *input {
        // Another encode may have consumed the amax: its magnitude stays.
        TensorInput::Known(_) if key.scale == ScaleRule::TwoLevel => entry.abs(),
        TensorInput::Known(_) => entry,
        TensorInput::Observed { pow2, epsilon, .. } => match key.scale {
            ScaleRule::Tensor => tensor_scale(entry.abs(), key.element, pow2, epsilon),
            _ => entry.abs(),
        },
    })
}

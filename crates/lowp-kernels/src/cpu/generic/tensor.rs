//! What encodes know about their tensors ([`TensorInput`]), and how observations are consumed.

use lowp_format::{KernelKey, Orientation, ScaleRule, Shape, tensor_scale};

use crate::check::encode::{input_of, outer_kernel_of};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::buffer::CpuBuffer;
use crate::{KernelError, Target, TensorInput};

/// Consumes the observed amaxes of `inputs`. Call [`values`] after the last of a plan.
pub(super) fn consume(
    shape: Shape,
    kernels: &[KernelKey; 2],
    inputs: &[Option<TensorInput<Cpu>>; 2],
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    for orientation in Orientation::ALL {
        let (input, key) = (
            &inputs[orientation as usize],
            &kernels[orientation as usize],
        );
        if let (Some(TensorInput::Observed(slot)), Some((extent, _))) = (input, key.scale.outer()) {
            let entries = extent.entries(orientation, shape);
            consume_range(&slot.buffer, slot.index, entries, views)?;
        }
    }
    Ok(())
}

/// Consumes `count` entries of `buffer` from `start` on.
pub(super) fn consume_range(
    buffer: &CpuBuffer<f32>,
    start: usize,
    count: usize,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    if count == 0 {
        return Ok(());
    }
    for entry in &mut views.floats.shared(buffer)?[start..start + count] {
        *entry = -entry.abs();
    }
    Ok(())
}

/// Encode scales, or the amaxes of two-level scales, of the tensor or its lines: what
/// [`crate::cpu::ingredients::dispatch`] takes; 1 where there are none.
pub(super) fn values(
    shape: Shape,
    orientation: Orientation,
    key: &KernelKey,
    input: Option<&TensorInput<Cpu>>,
    views: &mut AllViews<'_>,
) -> Result<Vec<f32>, KernelError> {
    let (Some(input), Some((extent, _))) = (input, key.scale.outer()) else {
        return Ok(vec![1.0]);
    };
    let (slot, entries) = (input.slot(), extent.entries(orientation, shape));
    if entries == 0 {
        return Ok(Vec::new());
    }
    views.floats.freeze(&slot.buffer)?;
    let entries = &views.floats.read(&slot.buffer)?[slot.index..slot.index + entries];
    let value = |&entry: &f32| match (input, key.scale) {
        (TensorInput::Observed(_), ScaleRule::Current { pow2, epsilon, .. }) => {
            tensor_scale(entry.abs(), key.element, pow2, epsilon)
        }
        // Another encode may have consumed the amax: its magnitude stays.
        (_, ScaleRule::TwoLevel { .. }) => entry.abs(),
        _ => entry,
    };
    Ok(entries.iter().map(value).collect())
}

/// Writes the targets that hold scales or amaxes of the tensor or its lines.
pub(super) fn write(
    shape: Shape,
    kernels: &[KernelKey; 2],
    inputs: &[Option<TensorInput<Cpu>>; 2],
    targets: &[Target<Cpu>],
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    for target in targets.iter().filter(|t| t.spec.key.part.is_outer()) {
        let usage = target.spec.key.usage;
        let (orientation, key) = outer_kernel_of(kernels, usage)?;
        let input = input_of(inputs, orientation, usage == lowp_format::Usage::BOTH);
        let values = values(shape, orientation, key, input, views)?;
        let bytes = views.bytes.take(&target.bytes)?;
        for (bytes, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
            let entry = match key.scale {
                ScaleRule::TwoLevel { .. } => value,
                _ => 1.0 / value,
            };
            *bytes = entry.to_le_bytes();
        }
    }
    Ok(())
}

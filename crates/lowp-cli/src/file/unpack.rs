//! A quantized tensor from its fields in a file.

use super::cast::Tensor;
use super::fields::{holding, worked};
use super::meta::Quantized;
use super::model::Model;
use super::source::own;
use super::spare::Spare;
use crate::output::shown;
use anyhow::{Context, Result};
use lowp_format::{
    BufferList, BufferSpec, Form, Orientation, Part, QuantizedTensor, ScaleLayout, Usage,
};
use lowp_kernels::{Backend, DecodeJob, RepackJob, Source, Work};

/// The orientations that `tensor` can be decoded for.
pub(super) fn served(tensor: &Quantized) -> Usage {
    tensor
        .specs
        .iter()
        .filter(|spec| spec.key.part == Part::Data)
        .fold(Usage::empty(), |usage, spec| usage | spec.key.usage)
}

/// Reads what serves `orientation`, or every buffer if it is `None`.
///
/// # Errors
/// The file cannot be read.
pub(super) fn unpack<B: Backend>(
    backend: &B,
    model: &Model,
    tensor: &Quantized,
    orientation: Option<Orientation>,
) -> Result<Tensor<B>> {
    let serves =
        |spec: &&BufferSpec| orientation.is_none_or(|o| spec.key.usage.contains(o.usage()));
    let specs: BufferList = tensor.specs.iter().filter(serves).copied().collect();
    let shape = worked([tensor.shape, tensor.full], &specs);
    QuantizedTensor::with_buffers(tensor.recipe, shape, specs, |spec, _| {
        read(backend, model, tensor, spec, orientation)
    })
}

/// The values of `tensor` as `orientation` serves them, in the buffer of `spare`.
///
/// # Errors
/// The tensor cannot serve it.
pub(super) fn decode<B: Backend>(
    backend: &B,
    tensor: &Tensor<B>,
    orientation: Orientation,
    spare: &Spare<B::Buffer<f32>>,
) -> Result<B::Buffer<f32>> {
    let len = tensor.shape().elements();
    let out = spare.take(
        |out| backend.len::<f32>(out) == len,
        || backend.alloc::<f32>(len),
    )?;
    decode_into(backend, tensor, orientation, &out)?;
    Ok(out)
}

/// Writes the values of `tensor` as `orientation` serves them to `out`.
///
/// # Errors
/// The tensor cannot serve it.
pub(super) fn decode_into<B: Backend>(
    backend: &B,
    tensor: &Tensor<B>,
    orientation: Orientation,
    out: &B::Buffer<f32>,
) -> Result<()> {
    let job = DecodeJob::new(tensor, orientation, Source::F32(out.clone()))?;
    Ok(backend.once(Work::Decode(vec![job]))?)
}

/// One buffer in its Compact form.
fn read<B: Backend>(
    backend: &B,
    model: &Model,
    tensor: &Quantized,
    spec: &BufferSpec,
    orientation: Option<Orientation>,
) -> Result<B::Buffer<u8>> {
    let orientation = orientation
        .or_else(|| (spec.key.usage & tensor.usage).orientations().next())
        .unwrap_or(Orientation::Rowwise);
    let field = holding(&tensor.fields, spec.key, orientation)
        .with_context(|| format!("'{}' has no field for {}", shown(&tensor.name), spec.key))?;
    let found = model.expect(&field.name(&tensor.name), field.dtype, &field.shape)?;
    let bytes = match found.values().and_then(own::<u8, B>) {
        Some(mapped) => mapped,
        None => {
            let bytes = backend.alloc::<u8>(found.len())?;
            found.pieces(0..found.len(), |start, piece| {
                Ok(backend.write(&bytes, start, piece)?)
            })?;
            bytes
        }
    };
    let Some(from_layout) = field.layout.filter(|layout| layout.form() != Form::Compact) else {
        return Ok(bytes);
    };
    if found.len() == 0 {
        return Ok(bytes);
    }
    let to_layout = ScaleLayout::new(spec, tensor.shape, orientation, Form::Compact)?;
    let to = backend.alloc::<u8>(to_layout.bytes())?;
    backend.once(Work::Repack(vec![RepackJob {
        from_layout,
        to_layout,
        from: bytes,
        to: to.clone(),
    }]))?;
    Ok(to)
}

//! Quantize, decode and repack one whole tensor: the shortest path for tools and tests.

use lowp_format::{
    Form, KernelKey, Orientation, Part, QuantizedTensor, Recipe, ScaleLayout, Shape, Usage,
};
use lowp_kernels::{Backend, DecodeJob, RepackJob, Source, StepScalars, Work};

use crate::{CastItem, CastPlan, ScaleBookBuilder, ShardError};
use lowp_comm::LocalComm;

/// Quantizes a whole matrix of `shape` (row-major) for `usage`.
///
/// Every scale follows from the values, unless `encode_scale` gives the scale of a recipe with
/// delayed scaling. The source is rounded as the recipe says; NaN elements do not affect scales.
///
/// # Errors
/// A shape that the recipe cannot take, or a source of another length.
pub fn quantize<B: Backend, R: Recipe>(
    backend: &B,
    recipe: R,
    shape: Shape,
    usage: Usage,
    source: Source<B>,
    encode_scale: Option<f32>,
) -> Result<QuantizedTensor<B::Buffer<u8>, R>, ShardError> {
    quantize_in_group(backend, recipe, shape, usage, source, encode_scale, None)
}

/// [`quantize`] of a matrix whose amax is that of several, `amax` ([`ScaleBookBuilder::group`]).
pub(crate) fn quantize_in_group<B: Backend, R: Recipe>(
    backend: &B,
    recipe: R,
    shape: Shape,
    usage: Usage,
    source: Source<B>,
    encode_scale: Option<f32>,
    amax: Option<f32>,
) -> Result<QuantizedTensor<B::Buffer<u8>, R>, ShardError> {
    let tensor = QuantizedTensor::new(recipe, shape, usage, |_, bytes| {
        Ok::<_, ShardError>(backend.alloc::<u8>(bytes)?)
    })?;
    let mut book = ScaleBookBuilder::default();
    let item = CastItem::rows(&tensor, source, &mut book);
    let delayed = |key: &KernelKey| key.scale.is_delayed();
    let slots = item.kernels.iter().zip(item.slots);
    let slot = slots
        .filter(|(key, _)| delayed(key))
        .find_map(|(_, slot)| slot);
    let book = book.build(backend)?;
    for slot in item.slots.into_iter().flatten() {
        if let Some(amax) = amax {
            book.begin_observation(slot, amax)?;
        }
    }
    let cast = CastPlan::new(backend, &book, &[item])?;
    let comm = LocalComm::solo(backend);
    match (encode_scale, slot) {
        (Some(scale), Some(slot)) => {
            book.set_scale(slot, scale)?;
            cast.run(&book, &comm)?;
        }
        _ => cast.calibrate(&book, &comm)?,
    }
    Ok(tensor)
}

/// Decodes `orientation` of `tensor` to f32 values in row-major order (docs/numerics.md 5.3, 6.4,
/// 7.4).
///
/// # Errors
/// The tensor cannot serve that orientation.
pub fn dequantize<B: Backend, R: Recipe>(
    backend: &B,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    orientation: Orientation,
) -> Result<Vec<f32>, ShardError> {
    let out = backend.alloc::<f32>(tensor.shape().elements())?;
    let job = DecodeJob::new(tensor, orientation, Source::F32(out.clone()))?;
    let plan = backend.plan(Work::Decode(vec![job]))?;
    backend.run(&plan, &StepScalars::default())?;
    Ok(backend.download(&out)?)
}

/// The block scales of `orientation` in another form, padding zero; `None` where the recipe has no
/// block scales.
///
/// # Errors
/// The tensor cannot serve that orientation, or its scales do not have that form.
pub fn scales_in_form<B: Backend, R: Recipe>(
    backend: &B,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    orientation: Orientation,
    form: Form,
) -> Result<Option<(ScaleLayout, Vec<u8>)>, ShardError> {
    tensor.data(orientation)?;
    let Some(scales) = tensor.part(orientation, Part::BlockScale) else {
        return Ok(None);
    };
    let layout = |form| ScaleLayout::new(&scales.spec, tensor.shape(), orientation, form);
    let to_layout = layout(form)?;
    let to = backend.alloc::<u8>(to_layout.bytes())?;
    backend.once(Work::Repack(vec![RepackJob {
        from_layout: layout(Form::Compact)?,
        to_layout,
        from: scales.storage.clone(),
        to: to.clone(),
    }]))?;
    Ok(Some((to_layout, backend.download(&to)?)))
}

//! Casts of whole tensors, into buffers that Python allocated.

use lowp_format::{KernelKey, Orientation, Shape};
use lowp_kernels::{Backend, DecodeJob, Work};
use lowp_shard::{CastItem, LocalComm, Requantize, ScaleBookBuilder};
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{Device, DeviceArg, MemoryArg, Place, on_device};
use crate::recipe::Recipe;
use crate::tensor::{Named, tensor};

/// Quantizes the `rows` x `cols` values of `source` into `buffers`. Every scale follows from the values, unless `encode_scale`
/// gives the delayed one.
#[pyfunction]
#[pyo3(signature = (device, recipe, shape, source, dtype, buffers, encode_scale = None))]
#[expect(clippy::too_many_arguments, reason = "one for each argument of Python")]
pub(crate) fn quantize(
    py: Python<'_>,
    device: DeviceArg,
    recipe: &Recipe,
    shape: (usize, usize),
    source: MemoryArg,
    dtype: &str,
    buffers: Named,
    encode_scale: Option<f32>,
) -> Result<(), Error> {
    let recipe = recipe.recipe;
    let device = Device::new(&device)?;
    on_device!(&device, |backend| {
        let source = backend.source(source.into(), dtype)?;
        let tensor = tensor(backend, recipe, Shape::new(shape.0, shape.1), buffers)?;
        py.detach(|| {
            let mut book = ScaleBookBuilder::default();
            let item = CastItem::rows(&tensor, source, &mut book);
            let delayed = |key: &KernelKey| key.scale.is_delayed();
            let slots = item.kernels.iter().zip(item.slots);
            let slot = slots.filter(|(k, _)| delayed(k)).find_map(|(_, slot)| slot);
            let book = book.build(backend)?;
            let cast = Requantize::new(backend, &book, &[item])?;
            let comm = LocalComm::solo(backend);
            match (encode_scale, slot) {
                (Some(scale), Some(slot)) => {
                    book.set_scale(slot, scale)?;
                    Ok(cast.run(&book, &comm)?)
                }
                (Some(_), None) => Err(Error::new("encode_scale is of delayed scales alone")),
                (None, _) => Ok(cast.calibrate(&book, &comm)?),
            }
        })
    })
}

/// Decodes `orientation` of a tensor to `out`, f32 in the order of rows.
#[pyfunction]
pub(crate) fn dequantize(
    py: Python<'_>,
    device: DeviceArg,
    recipe: &Recipe,
    shape: (usize, usize),
    buffers: Named,
    orientation: &str,
    out: MemoryArg,
) -> Result<(), Error> {
    let recipe = recipe.recipe;
    let orientation = match orientation {
        "rowwise" => Orientation::Rowwise,
        "columnwise" => Orientation::Columnwise,
        other => return Err(Error::new(format!("orientation '{other}'"))),
    };
    let device = Device::new(&device)?;
    on_device!(&device, |backend| {
        let tensor = tensor(backend, recipe, Shape::new(shape.0, shape.1), buffers)?;
        let out = backend.wrap::<f32>(out.into())?;
        py.detach(|| {
            let job = DecodeJob::new(&tensor, orientation, out)?;
            Ok(backend.once(Work::Decode(vec![job]))?)
        })
    })
}

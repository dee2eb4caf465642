//! Casts of whole tensors, into buffers that Python allocated.

use lowp_comm::LocalComm;
use lowp_format::{KernelKey, Shape};
use lowp_kernels::{AmaxJob, Backend as _, Work};
use lowp_shard::{CastItem, CastPlan, ScaleBookBuilder};
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{Device, DeviceArg, MemoryArg, Place, on_device};
use crate::recipe::Recipe;
use crate::tensor::{Named, tensor};

/// Quantizes the `rows` x `cols` values of `source` into `buffers`. Every scale follows from the values, unless `encode_scale`
/// gives the delayed one. `amax` is raised to that of the source, where a scale follows from the amax of a tensor.
#[pyfunction]
#[pyo3(signature = (device, recipe, shape, source, dtype, buffers, encode_scale = None, amax = None))]
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
    amax: Option<MemoryArg>,
) -> Result<(), Error> {
    encode_scale.map_or(Ok(()), |scale| recipe.check_encode_scale(scale))?;
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
            if let (Some(amax), Some(job)) = (amax, item.amax_job(&book)?) {
                let (out, tensor, blocks) = (backend.wrap(amax.into())?, Some(0), Vec::new());
                backend.once(Work::Amax(vec![AmaxJob {
                    out,
                    tensor,
                    blocks,
                    ..job
                }]))?;
            }
            let cast = CastPlan::new(backend, &book, &[item])?;
            let comm = LocalComm::solo(backend);
            match (encode_scale, slot) {
                (Some(scale), Some(slot)) => {
                    book.set_scale(slot, scale)?;
                    Ok(cast.run(&book, &comm)?)
                }
                _ => Ok(cast.calibrate(&book, &comm)?),
            }
        })
    })
}

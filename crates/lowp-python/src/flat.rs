//! Casts of full weights of which each rank has a flat slice of the masters, as Megatron's distributed optimizer has them.

use std::sync::Arc;

use lowp_comm::{Communicator, or_abort};
use lowp_format::Shape;
use lowp_shard::FlatMaster;
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{Device, DeviceArg, MemoryArg, Place, on_device};
use crate::ranks::communicator;
use crate::recipe::Recipe;
use crate::tensor::{Named, tensor};

/// A weight as Python gives it.
#[derive(FromPyObject)]
pub(crate) struct FlatArg {
    recipe: Py<Recipe>,
    shape: (usize, usize),
    buffers: Named,
    start: usize,
    master: MemoryArg,
    dtype: String,
}

/// Casts `weights`, each a full weight with this rank's slice of its masters, over the ranks of `ranks`. Collective.
#[pyfunction]
#[pyo3(signature = (device, weights, ranks = None))]
pub(crate) fn cast_master_weights(
    py: Python<'_>,
    device: DeviceArg,
    weights: Vec<FlatArg>,
    ranks: Option<Py<PyAny>>,
) -> Result<(), Error> {
    let device = Device::new(&device)?;
    on_device!(&device, |backend| {
        let comm = communicator(backend, ranks)?;
        py.detach(|| or_abort(&*comm, cast(backend, &comm, weights)))
    })
}

fn cast<B: Place>(
    backend: &B,
    comm: &Arc<dyn Communicator<B>>,
    weights: Vec<FlatArg>,
) -> Result<(), Error> {
    let mut tensors = Vec::new();
    let mut slices = Vec::new();
    for weight in weights {
        let recipe = weight.recipe.get().recipe;
        let shape = Shape::new(weight.shape.0, weight.shape.1);
        tensors.push(tensor(backend, recipe, shape, weight.buffers)?);
        let master = backend.source(weight.master.into(), &weight.dtype)?;
        slices.push((weight.start, master));
    }
    let masters = tensors.iter().zip(slices);
    let masters = masters.map(|(tensor, (start, master))| FlatMaster {
        tensor,
        start,
        master,
    });
    let masters: Vec<_> = masters.collect();
    Ok(lowp_shard::cast_master_weights(backend, comm, &masters)?)
}

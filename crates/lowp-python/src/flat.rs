//! [`FlatCasts`]: casts of full weights of which each rank has a flat slice of the masters, as Megatron's distributed optimizer has them.

use std::sync::Arc;

use lowp_comm::{Communicator, or_abort};
use lowp_format::Shape;
use lowp_shard::{FlatMaster, MasterCast};
use pyo3::prelude::*;

use crate::error::Error;
use crate::place::{Device, DeviceArg, MemoryArg, Owned, Place, on_device};
use crate::planned::{Kept, Planned, Planning};
use crate::ranks::communicator;
use crate::recipe::{ByName, Recipe};
use crate::tensor::{Named, tensor};

/// Sets of addresses that casts stay planned for.
const SETS: usize = 8;

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

/// What a cast of one weight is planned over.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct WeightKey {
    recipe: ByName,
    shape: (usize, usize),
    buffers: Vec<(String, u64, usize)>,
    start: usize,
    master: (u64, usize),
    dtype: String,
}

/// Weights, device and stream.
pub(crate) type Key = (Vec<WeightKey>, usize, u64);

/// The casts of a process group, each planned once for where weights and masters lie.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct FlatCasts(Owned<Planned<Self>>);

impl Planning for FlatCasts {
    type Key = Key;
    type Plan<B: Place> = MasterCast<B>;
}

#[pymethods]
impl FlatCasts {
    /// No casts yet.
    #[new]
    fn new() -> Self {
        Self(Owned::new(Planned::new(SETS)))
    }

    /// Casts `weights`, each a full weight with this rank's slice of its masters, over the ranks of `ranks`. Collective.
    #[pyo3(signature = (device, weights, ranks = None))]
    fn run(
        &self,
        py: Python<'_>,
        device: DeviceArg,
        weights: Vec<FlatArg>,
        ranks: Option<Py<PyAny>>,
    ) -> Result<(), Error> {
        let key = (weights.iter().map(key).collect(), device.1, device.2);
        on_device!(&Device::new(&device)?, |backend| {
            let comm = communicator(backend, ranks)?;
            py.detach(|| or_abort(&*comm, self.cast(backend, &comm, key, weights)))
        })
    }

    /// How many casts are planned.
    fn __len__(&self) -> usize {
        self.0.len()
    }
}

impl FlatCasts {
    fn cast<B: Kept>(
        &self,
        backend: &B,
        comm: &Arc<dyn Communicator<B>>,
        key: Key,
        weights: Vec<FlatArg>,
    ) -> Result<(), Error> {
        let known = self.0.take(&key);
        // Planning is collective, and addresses are a matter of one rank.
        let answers = match comm.world_size() {
            1 => vec![],
            _ => comm.control().all_gather(
                "the plan of cast_master_weights",
                vec![known.is_some().into()],
            )?,
        };
        let planned = match known {
            Some(planned) if answers.iter().all(|known| known[..] == [1]) => planned,
            _ => Arc::new(plan(backend, comm, weights)?),
        };
        planned.run()?;
        // A cast that failed is planned anew.
        self.0.put(key, planned);
        Ok(())
    }
}

fn key(weight: &FlatArg) -> WeightKey {
    let buffers = weight.buffers.iter();
    WeightKey {
        recipe: ByName(weight.recipe.get().recipe),
        shape: weight.shape,
        buffers: buffers
            .map(|(name, (pointer, bytes, ..))| (name.clone(), *pointer, *bytes))
            .collect(),
        start: weight.start,
        master: (weight.master.0, weight.master.1),
        dtype: weight.dtype.clone(),
    }
}

fn plan<B: Place>(
    backend: &B,
    comm: &Arc<dyn Communicator<B>>,
    weights: Vec<FlatArg>,
) -> Result<MasterCast<B>, Error> {
    let parts = || {
        let mut tensors = Vec::new();
        let mut slices = Vec::new();
        for weight in weights {
            let recipe = weight.recipe.get().recipe;
            let shape = Shape::new(weight.shape.0, weight.shape.1);
            tensors.push(tensor(backend, recipe, shape, weight.buffers)?);
            let master = backend.source(weight.master.into(), &weight.dtype)?;
            slices.push((weight.start, master));
        }
        Ok::<_, Error>((tensors, slices))
    };
    let (tensors, slices) = or_abort(&**comm, parts())?;
    let masters = tensors.iter().zip(slices);
    let masters = masters.map(|(tensor, (start, master))| FlatMaster {
        tensor,
        start,
        master,
    });
    Ok(MasterCast::new(
        backend,
        comm,
        &masters.collect::<Vec<_>>(),
    )?)
}

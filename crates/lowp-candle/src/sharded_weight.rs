//! [`ShardedWeight`]: a layer's weight that lives as a low-precision shard and is gathered for
//! each use.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{Error, Result, bail};
use lowp_format::{Orientation, Phase, Recipe, Shape};
use lowp_kernels::{Backend, KernelError, Work};
use lowp_shard::{
    Divergence, GatherAccount, GatherGroup, GatherPool, GradWire, MeshComm, ReduceItem, ShardError,
    ShardedTensor, audit, decode_job,
};

use crate::linear::WeightSource;

/// A sharded, quantized weight as [`WeightSource`]: gathered, decoded and freed around each use;
/// its gradient is reduced and scattered into this rank's rows as soon as it is known.
#[derive(Debug)]
pub struct ShardedWeight<B: Backend, R: Recipe> {
    shape: Shape,
    backend: B,
    mesh: MeshComm<B>,
    wire: GradWire,
    ranges: Vec<Range<usize>>,
    state: Mutex<State<B, R>>,
}

#[derive(Debug)]
struct State<B: Backend, R: Recipe> {
    group: GatherGroup<B, R>,
    /// The gathered weight, decoded.
    decoded: B::Buffer<f32>,
    values: Vec<f32>,
    /// This rank's contribution to the gradient of the full weight.
    full_grad: B::Buffer<f32>,
    /// The optimizer's gradient of this rank's rows.
    grad: Option<B::Buffer<f32>>,
    /// Contributions reduced since the last step.
    arrived: usize,
}

impl<B: Backend, R: Recipe> ShardedWeight<B, R> {
    /// The weight whose shard is `tensor`; gathered into memory of `pool`.
    ///
    /// # Errors
    /// Ranks that planned different gathers, or no room.
    pub fn new(
        backend: &B,
        mesh: &MeshComm<B>,
        pool: &Arc<GatherPool<B>>,
        tensor: ShardedTensor<B, R>,
        reshard_after_forward: bool,
        wire: GradWire,
    ) -> std::result::Result<Self, ShardError> {
        let shape = tensor.spec().full();
        let ranges = tensor.spec().all_elements();
        let comm = mesh.shard.clone();
        let group = GatherGroup::new(backend, comm, pool, vec![tensor], reshard_after_forward)?;
        let state = State {
            group,
            decoded: backend.alloc::<f32>(shape.elements())?,
            values: vec![0.0; shape.elements()],
            full_grad: backend.alloc::<f32>(shape.elements())?,
            grad: None,
            arrived: 0,
        };
        let (backend, mesh) = (backend.clone(), mesh.clone());
        Ok(Self {
            shape,
            backend,
            mesh,
            wire,
            ranges,
            state: Mutex::new(state),
        })
    }

    /// Connects the optimizer's gradient buffer of this rank's rows.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn connect(&self, grad: B::Buffer<f32>) -> Result<()> {
        self.lock()?.grad = Some(grad);
        Ok(())
    }

    /// Ends the accumulation of a step: sums the gradient over the replicas. Collective over the
    /// replicate group. Returns how many contributions arrived.
    ///
    /// # Errors
    /// A rank failed.
    pub fn finish_gradient(&self) -> Result<usize> {
        let mut state = self.lock()?;
        let arrived = std::mem::take(&mut state.arrived);
        if let (Some(grad), true) = (&state.grad, self.mesh.mesh.replicate > 1) {
            self.mesh
                .replicate
                .all_reduce_sum(grad)
                .map_err(Error::wrap)?;
        }
        Ok(arrived)
    }

    /// The elements of the flattened weight that each rank owns, in rank order.
    pub fn element_ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Frees the gathered weight whatever the policy: after an evaluation, and after every
    /// optimizer step.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn release(&self) -> Result<()> {
        self.lock()?.group.release();
        Ok(())
    }

    /// What was sent and what is held.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn account(&self) -> Result<GatherAccount> {
        Ok(self.lock()?.group.account())
    }

    /// Gathers the weight for each phase and compares it with a full cast of `master`, the f32
    /// values of the whole matrix. Collective over the shard group.
    ///
    /// # Errors
    /// A rank failed.
    pub fn audit(
        &self,
        master: &B::Buffer<f32>,
    ) -> std::result::Result<Vec<(Phase, Divergence)>, ShardError> {
        let Ok(mut state) = self.state.lock() else {
            return Err(KernelError::Poisoned.into());
        };
        let mut found = Vec::new();
        for phase in Phase::ALL {
            state.group.unshard(phase)?;
            let tensor = state.group.tensor(0)?;
            let divergence = audit(&self.backend, tensor, orientation(phase), master)?;
            found.extend(divergence.map(|d| (phase, d)));
        }
        state.group.release();
        Ok(found)
    }

    fn lock(&self) -> Result<MutexGuard<'_, State<B, R>>> {
        match self.state.lock() {
            Ok(state) => Ok(state),
            Err(_) => bail!("a thread failed while it used a {} weight", self.shape),
        }
    }
}

impl<B: Backend, R: Recipe> State<B, R> {
    fn gather(&mut self, backend: &B, phase: Phase) -> std::result::Result<(), ShardError> {
        self.group.unshard(phase)?;
        let tensor = self.group.tensor(0)?;
        let job = decode_job(tensor, orientation(phase), self.decoded.clone())?;
        backend.once(Work::Decode(vec![job]))?;
        Ok(backend.read(&self.decoded, 0, &mut self.values)?)
    }
}

/// The operand that a phase multiplies by.
fn orientation(phase: Phase) -> Orientation {
    match phase {
        Phase::Forward => Orientation::Rowwise,
        Phase::Backward => Orientation::Columnwise,
    }
}

impl<B: Backend, R: Recipe> WeightSource for ShardedWeight<B, R> {
    fn shape(&self) -> (usize, usize) {
        (self.shape.rows, self.shape.cols)
    }

    fn with_weight(
        &self,
        phase: Phase,
        use_weight: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let mut state = self.lock()?;
        state.gather(&self.backend, phase).map_err(Error::wrap)?;
        let used = use_weight(&state.values);
        state.group.reshard();
        used
    }

    fn sink_gradient(&self, gradient: Vec<f32>) -> Result<()> {
        let mut state = self.lock()?;
        let Some(out) = &state.grad else {
            bail!("no optimizer is connected to this weight")
        };
        self.backend
            .write(&state.full_grad, 0, &gradient)
            .map_err(Error::wrap)?;
        let item = ReduceItem {
            grad: &state.full_grad,
            ranges: &self.ranges,
            out,
            accumulate: state.arrived > 0,
        };
        self.mesh
            .shard
            .reduce_scatter(&[item], self.wire)
            .map_err(Error::wrap)?;
        state.arrived += 1;
        Ok(())
    }
}

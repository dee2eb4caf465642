//! [`ShardedWeight`]: a layer's weight that lives in low precision, as a shard that is gathered for
//! each use, or whole.

use std::fmt::Display;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lowp_checkpoint::{Checkpoint, Late, Piece, weight_record};
use lowp_comm::{MeshComm, or_abort};
use lowp_format::{
    Phase, QuantizedTensor, Recipe, RowCuts, Shape, ShardTiles, SourceRounding, Usage,
};
use lowp_kernels::{Backend, DecodeJob, FloatDtype, KernelError, Source, StepScalars, Work};
use lowp_shard::{
    Divergence, GATHER_PLAN, GatherAccount, GatherGroup, GatherWatch, Reshard, Scratches,
    ShardError, ShardSpec, ShardedTensor, audit_in_group,
};
use serde_json::Value;

use crate::code_counts::{self, CodeCounts};
use crate::error::ModelError;
use crate::grad_tiles::GradTiles;
use crate::gradients::Gradients;
use crate::memory::LayerMemory;
use crate::weight_pieces::{restore_tiles, restore_weight, weight_pieces, weight_tiles};
use crate::weight_storage::{LockedWeight, WeightBlock, WeightStorage};

/// A quantized weight: its rows are sharded, gathered, decoded and freed around each use, or
/// every rank has it whole and decodes it. Its gradient is reduced and scattered into this rank's
/// elements as soon as it is known.
#[derive(Debug)]
pub struct ShardedWeight<B: Backend, R: Recipe> {
    recipe: R,
    shape: Shape,
    backend: B,
    mesh: MeshComm<B>,
    tiles: ShardTiles,
    ranges: Vec<Range<usize>>,
    memory: Arc<LayerMemory<B>>,
    state: Mutex<State<B, R>>,
}

/// What a planned decode reads and writes: the pool's gathered buffers, as the phase uses them, and
/// the pool's scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DecodeKey {
    set: Option<u64>,
    phase: Phase,
    scratch: u64,
}

/// Where the gradient of a weight goes.
#[derive(Clone, Debug)]
struct ConnectedGradient<B: Backend> {
    gradients: Arc<Gradients<B>>,
    /// The number of the weight among their parameters.
    param: usize,
}

#[derive(Debug)]
struct State<B: Backend, R: Recipe> {
    storage: WeightStorage<B, R>,
    /// Memory that the weight is decoded into.
    scratches: Arc<Scratches<B>>,
    /// Planned once per place that the pool lends.
    decodes: Vec<(DecodeKey, B::Plan)>,
    /// Where the gradient goes.
    gradients: Option<ConnectedGradient<B>>,
    /// Where the gradient is in the order of rows, if ranks own it in another one.
    by_rows: Option<GradTiles<B>>,
    /// Whether a micro-batch that is not finished left a gradient.
    open: bool,
    /// How long the host waited for gathers.
    gathering: Duration,
}

impl<B: Backend, R: Recipe> ShardedWeight<B, R> {
    /// The weights of a block whose shards are `tensors`: gathered together, and decoded in `memory`. Each is used once in a phase.
    ///
    /// # Errors
    /// Ranks that planned different gathers, or no room.
    pub fn block(
        backend: &B,
        mesh: &MeshComm<B>,
        memory: &Arc<LayerMemory<B>>,
        tensors: Vec<ShardedTensor<B, R>>,
        reshard: &Reshard<B>,
    ) -> Result<Vec<Self>, ShardError> {
        let (block, plan) = Self::uncompared(backend, mesh, memory, tensors, reshard)?;
        mesh.shard.control().all_equal(GATHER_PLAN, &plan)?;
        Ok(block)
    }

    /// As [`ShardedWeight::block`], and leaves to the caller to compare over the ranks what comes with the weights ([`GatherGroup::uncompared`]).
    pub(crate) fn uncompared(
        backend: &B,
        mesh: &MeshComm<B>,
        memory: &Arc<LayerMemory<B>>,
        tensors: Vec<ShardedTensor<B, R>>,
        reshard: &Reshard<B>,
    ) -> Result<(Vec<Self>, String), ShardError> {
        let specs: Vec<_> = tensors
            .iter()
            .map(|tensor| (tensor.recipe(), tensor.spec().clone()))
            .collect();
        let comm = mesh.shard.clone();
        let reshard = reshard.clone();
        let group = GatherGroup::uncompared(backend, comm, memory.pool(), tensors, reshard)?;
        let (group, plan) = group;
        let block = WeightBlock::new(group);
        let weight = |(param, (recipe, spec)): (usize, (R, ShardSpec))| {
            let storage = WeightStorage::Rows(Arc::clone(&block), param);
            let (tiles, ranges) = (*spec.tiles(), spec.all_elements());
            Self::of(backend, mesh, memory, recipe, tiles, storage, ranges)
        };
        Ok((specs.into_iter().enumerate().map(weight).collect(), plan))
    }

    /// The weight that every rank has whole in `tensor`, decoded in `memory`; its gradient is reduced and scattered
    /// into slices of the flattened weight, `ranges` of the ranks.
    pub fn whole(
        backend: &B,
        mesh: &MeshComm<B>,
        memory: &Arc<LayerMemory<B>>,
        tensor: QuantizedTensor<B::Buffer<u8>, R>,
        ranges: Vec<Range<usize>>,
    ) -> Self {
        let recipe = tensor.recipe();
        let tiles = ShardTiles::of_rows(&recipe, tensor.shape(), Usage::BOTH);
        let storage = WeightStorage::Whole(Box::new(tensor));
        Self::of(backend, mesh, memory, recipe, tiles, storage, ranges)
    }

    fn of(
        backend: &B,
        mesh: &MeshComm<B>,
        memory: &Arc<LayerMemory<B>>,
        recipe: R,
        tiles: ShardTiles,
        storage: WeightStorage<B, R>,
        ranges: Vec<Range<usize>>,
    ) -> Self {
        let shape = tiles.full();
        let state = State {
            storage,
            scratches: memory.pool().scratches(FloatDtype::F32, shape.elements()),
            decodes: Vec::new(),
            gradients: None,
            by_rows: GradTiles::new(&tiles),
            open: false,
            gathering: Duration::ZERO,
        };
        Self {
            recipe,
            shape,
            backend: backend.clone(),
            mesh: mesh.clone(),
            tiles,
            ranges,
            memory: memory.clone(),
            state: Mutex::new(state),
        }
    }

    /// Has the gradient go to parameter `param` of `gradients` from now on.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn connect(&self, gradients: &Arc<Gradients<B>>, param: usize) -> Result<(), ModelError> {
        let gradients = Arc::clone(gradients);
        self.lock()?.gradients = Some(ConnectedGradient { gradients, param });
        Ok(())
    }

    /// Whether a backward pass left a gradient here and its micro-batch is not finished.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn is_open(&self) -> Result<bool, ModelError> {
        Ok(self.lock()?.open)
    }

    /// Says that the micro-batch is finished or forgotten.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn finish_micro_batch(&self) -> Result<(), ModelError> {
        let mut state = self.lock()?;
        state.open = false;
        if let Some(by_rows) = &mut state.by_rows {
            by_rows.forget();
        }
        Ok(())
    }

    /// The tiles that ranks own of it.
    pub fn tiles(&self) -> &ShardTiles {
        &self.tiles
    }

    /// The elements of the flattened weight, or of its flattened tall matrix where ranks own tiles, that each rank owns, in rank order.
    pub fn element_ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Frees the gathered weights of the block whatever the policy: after an evaluation, and after every
    /// optimizer step.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn release(&self) -> Result<(), ModelError> {
        self.lock()?.storage.lock()?.release();
        Ok(())
    }

    /// The recipe that it lives in.
    pub fn recipe(&self) -> R {
        self.recipe
    }

    /// The shape of the full weight.
    pub fn full_shape(&self) -> Shape {
        self.shape
    }

    /// Elements of the full weight.
    pub(crate) fn elements(&self) -> usize {
        self.shape.elements()
    }

    /// How the weight's values are rounded before they are cast.
    pub(crate) fn source_rounding(&self) -> SourceRounding {
        self.recipe.source_rounding()
    }

    /// What the bytes of the weight follow from.
    pub(crate) fn about(&self) -> Value {
        weight_record(&self.recipe, self.shape)
    }

    /// This rank's rows of the stored buffers, as pieces of tensors whose names begin with `name`; what all ranks have is a piece of
    /// the `first`.
    pub(crate) fn pieces(
        &self,
        stream: &B,
        name: &str,
        first: bool,
    ) -> Result<Vec<Piece<Late>>, ShardError> {
        let state = self.locked()?;
        let held = state.storage.lock()?;
        match held.rows() {
            Some((group, param)) => {
                let shard = &group.params()[param];
                let (local, rows) = (shard.local(), shard.spec().rows());
                if !self.tiles.are_rows() {
                    return weight_tiles(stream, name, local, &self.tiles, rows, first);
                }
                weight_pieces(stream, name, local, self.shape, rows, false, first)
            }
            None => {
                let tensor = held.tensor()?;
                let (shard, quantum) = (&self.mesh.shard, self.recipe.row_quantum(Usage::BOTH));
                let cuts = RowCuts::new(self.shape.rows, shard.world_size(), quantum)?;
                let rows = cuts.range(shard.rank());
                weight_pieces(stream, name, tensor, self.shape, rows, true, first)
            }
        }
    }

    /// Takes the stored buffers of a checkpoint over.
    pub(crate) fn restore(&self, name: &str, checkpoint: &Checkpoint) -> Result<(), ModelError> {
        let state = self.locked()?;
        let (backend, full) = (&self.backend, self.shape);
        let held = state.storage.lock()?;
        match held.rows() {
            Some((group, param)) => {
                let shard = &group.params()[param];
                shard.begin_write();
                let (local, rows) = (shard.local(), shard.spec().rows());
                if !self.tiles.are_rows() {
                    return restore_tiles(backend, name, local, &self.tiles, rows, checkpoint);
                }
                restore_weight(backend, name, local, full, rows, checkpoint)
            }
            None => restore_weight(
                backend,
                name,
                held.tensor()?,
                full,
                0..full.rows,
                checkpoint,
            ),
        }
    }

    /// How long the host waited for gathers so far.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn gathering(&self) -> Result<Duration, ModelError> {
        Ok(self.lock()?.gathering)
    }

    /// Counts of the codes that this rank stores: of its rows, or of all.
    ///
    /// # Errors
    /// A thread failed while it used the weight, or the device did.
    pub fn count_codes(&self) -> Result<CodeCounts, ModelError> {
        let state = self.lock()?;
        let held = state.storage.lock()?;
        let counts = match held.rows() {
            Some((group, param)) => {
                code_counts::count(&self.backend, group.params()[param].local())
            }
            None => code_counts::count(&self.backend, held.tensor()?),
        };
        Ok(counts?)
    }

    /// What was sent and what is held. What a block counts, and what it sends beside the pieces of its weights, is in the account of its
    /// first weight.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn account(&self) -> Result<GatherAccount, ModelError> {
        Ok(self.lock()?.storage.lock()?.account())
    }

    /// Gathers the weight for each phase and compares it with a full cast of `master`, the f32
    /// values of the whole matrix, whose amax is `amax` where it has one with others. Collective over the shard group.
    ///
    /// # Errors
    /// A rank failed.
    pub fn audit(
        &self,
        master: &B::Buffer<f32>,
        amax: Option<f32>,
    ) -> Result<Vec<(Phase, Divergence)>, ShardError> {
        let mut found = Vec::new();
        for phase in Phase::ALL {
            let divergence = self.audit_phase(phase, master, amax)?;
            found.extend(divergence.map(|d| (phase, d)));
        }
        self.locked()?.storage.lock()?.release();
        Ok(found)
    }

    /// Audits one phase as [`ShardedWeight::audit`] does; the block stays gathered.
    pub(crate) fn audit_phase(
        &self,
        phase: Phase,
        master: &B::Buffer<f32>,
        amax: Option<f32>,
    ) -> Result<Option<Divergence>, ShardError> {
        let state = self.locked()?;
        let mut held = state.storage.lock()?;
        let audit = |held: &mut LockedWeight<'_, B, R>| {
            held.unshard(phase)?;
            let (tensor, orientation) = (held.tensor()?, phase.orientation());
            audit_in_group(&self.backend, tensor, orientation, master, amax)
        };
        let found = audit(&mut held);
        if found.is_err() {
            // What this rank alone holds, it would not gather with the others.
            held.release();
        }
        or_abort(&*self.mesh.world, found)
    }

    /// Whether both weights are of one block, which is gathered together.
    ///
    /// # Errors
    /// A thread failed while it used a weight.
    pub fn is_with(&self, other: &Self) -> Result<bool, ModelError> {
        if std::ptr::eq(self, other) {
            return Ok(true);
        }
        Ok(self.lock()?.storage.is_with(&other.lock()?.storage))
    }

    fn lock(&self) -> Result<MutexGuard<'_, State<B, R>>, ModelError> {
        let poisoned = |_| ModelError::PoisonedWeight { shape: self.shape };
        self.state.lock().map_err(poisoned)
    }
}

impl<B: Backend, R: Recipe> State<B, R> {
    /// Gathers the weight and decodes it into `values`.
    fn gather(&mut self, backend: &B, phase: Phase, values: &mut [f32]) -> Result<(), ShardError> {
        let scratch = self.scratches.lend()?;
        let begun = Instant::now();
        let mut held = self.storage.lock()?;
        held.unshard(phase)?;
        self.gathering += begun.elapsed();
        let key = DecodeKey {
            set: held.set(),
            phase,
            scratch: scratch.id(),
        };
        let known = self.decodes.iter().position(|(known, _)| *known == key);
        let index = match known {
            Some(index) => index,
            None => {
                let out = scratch.values().clone();
                let job = DecodeJob::new(held.tensor()?, phase.orientation(), out)?;
                let plan = backend.plan(Work::Decode(vec![job]))?;
                self.decodes.push((key, plan));
                self.decodes.len() - 1
            }
        };
        backend.run(&self.decodes[index].1, &StepScalars::default())?;
        Ok(scratch.values().read(backend, 0, values)?)
    }
}

impl<B: Backend, R: Recipe> State<B, R> {
    /// Where the gradient goes.
    fn connected(&self) -> Result<ConnectedGradient<B>, ModelError> {
        self.gradients.clone().ok_or(ModelError::NotConnected)
    }
}

impl<B: Backend, R: Recipe> ShardedWeight<B, R> {
    /// Gathers the weight's block for `phase`, unless it is there, lends the weight's decoded values, row-major on the host, to
    /// `use_weight`, and ends the phase with the last weight of the block. Collective over the shard group.
    ///
    /// # Errors
    /// What `use_weight` reports, or a rank failed.
    pub fn with_values<T, E: From<ModelError> + Display>(
        &self,
        phase: Phase,
        use_weight: impl FnOnce(&[f32]) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut state = self.lock()?;
        let len = self.shape.elements();
        self.memory.with_host(len, |values| {
            let gathered = state.gather(&self.backend, phase, values);
            let used = gathered
                .map_err(|error| ModelError::from(error).into())
                .and_then(|()| use_weight(values));
            let ended = state.storage.lock().map(|mut held| match &used {
                Ok(_) => held.end_use(),
                // What this rank alone holds, it would not gather with the others.
                Err(_) => held.release(),
            });
            let used = used.and_then(|value| {
                ended.map_err(ModelError::from)?;
                Ok(value)
            });
            or_abort(&*self.mesh.world, used)
        })
    }

    /// Sends `gradient`, of the full weight and row-major on the host, to the owners of its elements. Collective over the shard group.
    ///
    /// # Errors
    /// No optimizer is connected, values of another length, or a rank failed.
    pub fn add_gradient(&self, gradient: &[f32]) -> Result<(), ModelError> {
        or_abort(&*self.mesh.world, self.reduce(gradient))
    }

    /// Has `watch` called for every gather of the weight's block; where the optimizer's step gathers all weights, for none.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn watch_gathers(&self, watch: GatherWatch<B>) -> Result<(), ShardError> {
        self.locked()?.storage.lock()?.watch(watch);
        Ok(())
    }

    /// How many writes of the weight began, where it is gathered: what was made of the gathered weight stays right until the next one.
    ///
    /// # Errors
    /// A thread failed while it used the weight.
    pub fn version(&self) -> Result<Option<u64>, ShardError> {
        let state = self.locked()?;
        let held = state.storage.lock()?;
        let rows = held.rows();
        Ok(rows.map(|(group, param)| group.params()[param].version()))
    }

    /// Starts the gather of the weight's block for `phase`, beside the work that the backend's stream has; that for backward gathers beside what is held for
    /// forward, which then stays until backward ([`GatherGroup::prefetch`](lowp_shard::GatherGroup::prefetch)). Collective over the shard group.
    ///
    /// # Errors
    /// A rank failed.
    pub fn prefetch(&self, phase: Phase) -> Result<(), ShardError> {
        self.locked()?.storage.lock()?.prefetch(phase)
    }

    /// Starts the gathers of the weight's block where it runs forward again and then backward: what forward needs, which stays, and what backward needs beside it. What
    /// has begun goes on. Collective over the shard group.
    ///
    /// # Errors
    /// A rank failed.
    pub fn gather_again(&self) -> Result<(), ShardError> {
        Phase::ALL
            .into_iter()
            .try_for_each(|phase| self.prefetch(phase))
    }

    /// Gathers the weight's block for `phase`, unless it is there, lends the weight to `enqueue`, which gives the backend's stream what
    /// reads it and uses no other weight of the block, and ends the phase with the last weight of the block. The number tells apart the
    /// memory that it may be in: work over it can be planned once for each. Collective over the shard group.
    ///
    /// # Errors
    /// What `enqueue` reports, or a rank failed.
    pub fn with_gathered<T, E: From<ShardError>>(
        &self,
        phase: Phase,
        enqueue: impl FnOnce(&QuantizedTensor<B::Buffer<u8>, R>, Option<u64>) -> Result<T, E>,
    ) -> Result<T, E> {
        let state = &mut *self.locked()?;
        let mut held = state.storage.lock()?;
        let begun = Instant::now();
        held.unshard(phase)?;
        state.gathering += begun.elapsed();
        let used = enqueue(held.tensor()?, held.set());
        match &used {
            Ok(_) => held.end_use(),
            Err(_) => held.release(),
        }
        used
    }

    /// Memory for the full gradient, row-major, which work of the backend writes whole before [`ShardedWeight::push_gradient`].
    ///
    /// # Errors
    /// No optimizer is connected, no room, or a rank failed.
    pub fn gradient(&self) -> Result<Source<B>, ModelError> {
        or_abort(&*self.mesh.world, self.try_gradient())
    }

    fn try_gradient(&self) -> Result<Source<B>, ModelError> {
        let mut state = self.lock()?;
        let ConnectedGradient { gradients, param } = state.connected()?;
        state.open = true;
        let place = gradients.lock().grad(param)?;
        match &mut state.by_rows {
            Some(by_rows) => Ok(by_rows.lend(self.memory.pool(), place.dtype())?),
            None => Ok(place),
        }
    }

    /// Says that the backend was given the work that writes the gradient, which goes to the owners of its elements. Collective over
    /// the shard group.
    ///
    /// # Errors
    /// No optimizer is connected, no memory was taken for it, or a rank failed.
    pub fn push_gradient(&self) -> Result<(), ModelError> {
        or_abort(&*self.mesh.world, self.try_push_gradient())
    }

    fn try_push_gradient(&self) -> Result<(), ModelError> {
        let mut state = self.lock()?;
        let ConnectedGradient { gradients, param } = state.connected()?;
        let mut gradients = gradients.lock();
        let place = gradients.taken(param)?;
        if let Some(by_rows) = &mut state.by_rows
            && !by_rows.put(&self.backend, &place)?
        {
            let name = format!("a weight of {}", self.shape);
            return Err(ShardError::NoGradMemory { name }.into());
        }
        Ok(gradients.push(param)?)
    }

    fn locked(&self) -> Result<MutexGuard<'_, State<B, R>>, ShardError> {
        self.state.lock().map_err(|_| KernelError::Poisoned.into())
    }

    fn reduce(&self, gradient: &[f32]) -> Result<(), ModelError> {
        let mut state = self.lock()?;
        let ConnectedGradient { gradients, param } = state.connected()?;
        if gradient.len() != self.shape.elements() {
            let (shape, found) = (self.shape, gradient.len());
            return Err(ModelError::GradientLength { found, shape });
        }
        // Also one that fails may have added something.
        state.open = true;
        if self.tiles.are_in_order() {
            return Ok(gradients.add(param, gradient)?);
        }
        let tall = self.tiles.gather(gradient, 0..gradient.len());
        Ok(gradients.add(param, &tall)?)
    }
}

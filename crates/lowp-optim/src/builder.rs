//! [`OptimizerBuilder`]: what an [`Optimizer`] is made from.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lowp_comm::{CommError, Communicator, Mesh, or_abort};
use lowp_format::{QuantizedTensor, Recipe, is_in_bf16};
use lowp_gemm::Products;
use lowp_kernels::{Backend, KernelError, Master, MasterDtype, Source, UpdateRandom, bf16};
use lowp_shard::{
    CastItem, CastPlan, CastTensor, FlatGather, FlatParam, ScaleBook, ScaleBookBuilder, ShardError,
    check_flat,
};

use crate::memory::{ParamMemory, check_length};
use crate::muon::Muon;
use crate::optimizer::Optimizer;
use crate::param::{Param, ParamId, ParamPlace, ParamSpec};
use crate::planned_sets::PlannedSets;
use crate::report::Compared;
use crate::work::{NewStep, StepWork};
use crate::{Group, MatrixCut, OptimError};

/// The streams of random bits of parameters, apart from those of operands with the same seed.
const RANDOM: u64 = 1 << 63;

/// Collects groups and parameters; recipes and plain parameters mix in any order.
#[derive(Debug)]
pub struct OptimizerBuilder<B: Backend> {
    id: u64,
    backend: B,
    /// Whether masters and states are memory of the host.
    offload: bool,
    /// Bytes of masters and states in page-locked memory of the host.
    host_bytes: usize,
    /// Streams that wrote masters of earlier parameters.
    earlier: Vec<B>,
    world: Arc<dyn Communicator<B>>,
    mesh: Mesh,
    scales: ScaleBookBuilder,
    groups: Vec<Group>,
    params: Vec<Param<B>>,
    seed: u64,
    /// Those of them that have flat slices.
    flats: Vec<FlatParam<B>>,
    /// What multiplies matrices.
    products: Option<Arc<dyn Products<B>>>,
}

impl<B: Backend> OptimizerBuilder<B> {
    /// An optimizer with no groups and no parameters yet, whose rows the ranks of `world` share out. It
    /// works on the communicator's stream.
    pub fn new(world: impl Into<Arc<dyn Communicator<B>>>) -> Self {
        static OPTIMIZERS: AtomicU64 = AtomicU64::new(0);
        let world = world.into();
        Self {
            id: OPTIMIZERS.fetch_add(1, Ordering::Relaxed),
            backend: world.backend().clone(),
            offload: false,
            host_bytes: 0,
            earlier: Vec::new(),
            mesh: Mesh::sharded(world.world_size()),
            world,
            scales: ScaleBookBuilder::default(),
            groups: Vec::new(),
            params: Vec::new(),
            seed: 0,
            flats: Vec::new(),
            products: None,
        }
    }

    /// Works on the stream of `backend`, a handle of the communicator's device, beside the communicator's.
    #[must_use]
    pub fn on(self, backend: &B) -> Self {
        let backend = backend.clone();
        let earlier = [self.earlier, vec![self.backend]].concat();
        Self {
            backend,
            earlier,
            ..self
        }
    }

    /// Keeps the masters and states of parameters that follow in page-locked memory of the host ([`Backend::with_host_buffers`]), which a step
    /// reads and writes over the device's bus. All results stay the same. Memory of the caller ([`OptimizerBuilder::param_in`]) stays where it is.
    #[must_use]
    pub fn offload(self, offload: bool) -> Self {
        Self { offload, ..self }
    }

    /// Has the ranks of the world hold `mesh.replicate` replicas of `mesh.shard` shards; the default is one
    /// replica.
    #[must_use]
    pub fn mesh(self, mesh: Mesh) -> Self {
        Self { mesh, ..self }
    }

    /// Multiplies matrices with `products`, for rules of matrices ([`Rule::is_of_matrices`](crate::Rule::is_of_matrices)).
    #[must_use]
    pub fn products(self, products: Arc<dyn Products<B>>) -> Self {
        let products = Some(products);
        Self { products, ..self }
    }

    /// Says which elements of the matrix `id` each rank has, for rules of matrices; of other rules it is dropped. Where one rank has all
    /// of the matrix, nobody need say so.
    ///
    /// # Errors
    /// An id of another optimizer.
    pub fn matrix(&mut self, id: ParamId, cut: MatrixCut) -> Result<(), OptimError> {
        let len = self.params.len();
        let param = self.params.get_mut(id.index);
        let param = param.filter(|_| id.optimizer == self.id);
        let param = param.ok_or(OptimError::OtherOptimizer { len })?;
        param.cut = param.rule.is_of_matrices().then(|| Arc::new(cut));
        Ok(())
    }

    /// The seed of the random bits that states in fp8 and masters in bf16 round by; the default is 0. It is the same on all ranks.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Where scales of other tensors, such as activations, are registered: they are agreed on together with
    /// those of the parameters.
    pub fn scales(&mut self) -> &mut ScaleBookBuilder {
        &mut self.scales
    }

    /// Adds a group and returns its index.
    pub fn group(&mut self, group: Group) -> usize {
        self.groups.push(group);
        self.groups.len() - 1
    }

    /// Adds a parameter whose low-precision form is `tensor`, this rank's shard (any recipe; the
    /// plain recipes keep it in high precision).
    ///
    /// # Errors
    /// A name twice, an unknown group, or master values that do not fit the shard.
    pub fn param(
        &mut self,
        tensor: &impl CastTensor<B>,
        spec: ParamSpec,
    ) -> Result<ParamId, OptimError> {
        let needed = tensor.tensor().shape().elements();
        check_length(&spec.name, "the master", spec.master.len(), needed)?;
        let parameter = half_of(tensor.tensor(), spec.state.master).cloned();
        self.add(spec, parameter, |builder, master| {
            Ok(CastItem::rows(tensor, master, &mut builder.scales))
        })
    }

    /// Adds a parameter like [`OptimizerBuilder::param`] over memory that the caller allocated: for libraries that own masters,
    /// states and gradients. The gradients may lie elsewhere in later steps ([`Optimizer::take_grads`]). A `tensor` without
    /// buffers is a parameter that lives in its master alone.
    ///
    /// # Errors
    /// As [`OptimizerBuilder::param`]; memory of another length, or of another device, or halves of which `tensor` is none.
    pub fn param_in(
        &mut self,
        tensor: &impl CastTensor<B>,
        name: impl Into<String>,
        group: usize,
        memory: ParamMemory<B>,
    ) -> Result<ParamId, OptimError> {
        let (name, len) = (name.into(), tensor.tensor().shape().elements());
        self.check_new(&name, group)?;
        memory.check(&self.backend, &name, self.groups[group].rule, len)?;
        if let Master::Bf16Plus16 { parameter, .. } = &memory.master {
            let half = half_of(tensor.tensor(), MasterDtype::Bf16Plus16);
            let span = |half| self.backend.span::<u8>(half);
            if half.map(span) != Some(span(parameter)) {
                return Err(OptimError::Halves { name });
            }
        }
        self.add_in(name, group, len, memory, |builder, master| {
            Ok(CastItem::rows(tensor, master, &mut builder.scales))
        })
    }

    /// Adds a parameter whose low-precision form is `tensor`, the full weight on every rank of a replica, and of
    /// whose masters, states and gradients this rank has a slice of the flattened matrix: the elements from
    /// `start` on, as many as `spec.master` has (ZeRO-1). Slices of the ranks follow each other in rank order,
    /// cut anywhere, and may be empty. A step casts the slices and gathers the full weights.
    ///
    /// # Errors
    /// A name twice, an unknown group, a slice outside the matrix, or a recipe that slices cannot have
    /// ([`check_flat`]).
    pub fn flat_param<R: Recipe>(
        &mut self,
        tensor: &QuantizedTensor<B::Buffer<u8>, R>,
        start: usize,
        spec: ParamSpec,
    ) -> Result<ParamId, OptimError> {
        check_flat(&tensor.recipe(), tensor.usage())?;
        let place = ParamPlace { start, tiles: None };
        let spec = ParamSpec { place, ..spec };
        let own = 2 * start..2 * (start + spec.master.len());
        let parameter = half_of(tensor, spec.state.master);
        let parameter = parameter.map(|all| self.backend.view::<u8>(all, own));
        let parameter = parameter.transpose()?;
        self.add(spec, parameter, |builder, master| {
            let scales = &mut builder.scales;
            let flat = FlatParam::new(&builder.backend, tensor, start, master, scales)?;
            let item = flat.item().clone();
            builder.flats.push(flat);
            Ok(item)
        })
    }

    /// Adds a parameter whose masters are cast by what `item` returns for them; `parameter` is the half of them that there is.
    fn add(
        &mut self,
        spec: ParamSpec,
        parameter: Option<B::Buffer<u8>>,
        item: impl FnOnce(&mut Self, Master<B>) -> Result<CastItem<B>, OptimError>,
    ) -> Result<ParamId, OptimError> {
        let ParamSpec {
            name,
            group,
            master,
            grad,
            state,
            place,
        } = spec;
        let len = master.len();
        self.check_new(&name, group)?;
        let keeps = match self.offload {
            true => self.backend.with_host_buffers(),
            false => self.backend.clone(),
        };
        let mut first = None;
        let master = match (parameter, state.master) {
            (Some(parameter), _) => {
                first = Some(master);
                Master::Bf16Plus16 {
                    parameter,
                    remainder: keeps.alloc(2 * len)?,
                }
            }
            (None, MasterDtype::Bf16) => {
                let narrow = master.into_iter().map(bf16::from_f32);
                Source::Bf16(keeps.adopt(narrow.collect())?).into()
            }
            (None, _) => Source::F32(keeps.adopt(master)?).into(),
        };
        let rule = self.groups[group].rule;
        let states = rule.alloc(&keeps, |name| state.of(name), len)?;
        if self.offload && B::HAS_HOST_BUFFERS {
            self.host_bytes += len * master.dtype().bytes() + state.bytes(rule, len);
        }
        let grad = Some(Source::alloc(&self.backend, grad, len)?);
        let memory = ParamMemory {
            master,
            states,
            grad,
            place,
        };
        let id = self.add_in(name, group, len, memory, item)?;
        if let Some(values) = first {
            self.params[id.index].write_master(&self.backend, &values)?;
        }
        Ok(id)
    }

    /// Rejects a name that is taken, and a group that does not exist.
    fn check_new(&self, name: &str, group: usize) -> Result<(), OptimError> {
        let groups = self.groups.len();
        if self.params.iter().any(|p| p.name == name) {
            let name = name.to_owned();
            return Err(OptimError::DuplicateParam { name });
        }
        if group >= groups {
            let name = name.to_owned();
            return Err(OptimError::NoGroup {
                name,
                group,
                groups,
            });
        }
        Ok(())
    }

    /// Adds a parameter of `len` elements over its memory, cast by what `item` returns for the master.
    fn add_in(
        &mut self,
        name: String,
        group: usize,
        len: usize,
        memory: ParamMemory<B>,
        item: impl FnOnce(&mut Self, Master<B>) -> Result<CastItem<B>, OptimError>,
    ) -> Result<ParamId, OptimError> {
        let ParamMemory {
            master,
            states,
            grad,
            place,
        } = memory;
        let item = item(self, master.clone())?;
        let left_out = grad.is_none();
        let grad = match grad {
            Some(grad) => grad,
            None => Source::F32(self.backend.alloc(0)?),
        };
        let param = Param {
            name,
            group,
            rule: self.groups[group].rule,
            len,
            master,
            states,
            random: UpdateRandom {
                seed: self.seed,
                stream: RANDOM | self.params.len() as u64,
                tiles: place.tiles,
                first: place.start,
            },
            grad,
            cut: None,
            piece: None,
            item,
            ready: false,
            left_out,
        };
        self.params.push(param);
        Ok(ParamId {
            optimizer: self.id,
            index: self.params.len() - 1,
        })
    }

    /// Plans the step, compares the parameters over the ranks, and casts the masters for the first time.
    /// Every rank must call it.
    ///
    /// # Errors
    /// As [`OptimizerBuilder::build_uncast`].
    pub fn build(self) -> Result<Optimizer<B>, OptimError> {
        let optimizer = self.build_uncast()?;
        optimizer.calibrate()?;
        Ok(optimizer)
    }

    /// Plans the step: one job per parameter over buffers that no other job writes, so every
    /// parameter is updated exactly once. Compares the parameters over the ranks. The rows are not cast:
    /// they hold the bytes of the masters already, or [`Optimizer::calibrate`] follows. Every rank must call it.
    ///
    /// # Errors
    /// Hyperparameters out of range, buffers that two parameters share, ingredients without a kernel, a
    /// mesh of another size than the world, or ranks with other parameters or groups.
    pub fn build_uncast(self) -> Result<Optimizer<B>, OptimError> {
        let world = Arc::clone(&self.world);
        let optimizer = or_abort(&*world, self.plan())?;
        let control = world.control();
        control.all_equal(
            "the parameters of the optimizer",
            &optimizer.describe(|_| true),
        )?;
        control.all_equal("the hyperparameters", &optimizer.describe_groups())?;
        Ok(optimizer)
    }

    /// Plans the step of `of` over memory that its parameters lie in now: those of this builder, the same ones in the same order. It goes on
    /// after the steps of `of`, with its delayed scales. Where memory lies is a matter of one rank, so this is not collective: no
    /// other rank need do it, nor hears of it.
    ///
    /// # Errors
    /// As [`OptimizerBuilder::build_uncast`]; parameters that ranks would have to agree on again, and flat slices, which are
    /// planned with all ranks.
    pub fn build_moved(self, of: &Optimizer<B>) -> Result<Optimizer<B>, OptimError> {
        let what = |what: String| Err(OptimError::Moved { what });
        if !self.flats.is_empty() {
            return what(format!("{} are flat slices", self.flats.len()));
        }
        let matrices = self
            .params
            .iter()
            .filter(|param| param.rule.is_of_matrices());
        let matrices = matrices.count();
        if matrices > 0 && self.mesh.replicate > 1 {
            return what(format!("{matrices} are matrices of several replicas"));
        }
        let mut optimizer = self.plan()?;
        // A matrix that is frozen has no elements, until it is thawed.
        let has_elements = |params: &[Param<B>], index: usize| {
            let cut = params.get(index).and_then(|param| param.cut.as_ref());
            cut.is_none_or(|cut| cut.full.elements() > 0)
        };
        let [old, new] = [&of.params, &optimizer.params];
        let compares_cut = |index| has_elements(old, index) && has_elements(new, index);
        let (before, now) = (of.describe(compares_cut), optimizer.describe(compares_cut));
        let mut parts = before.split("; ").zip(now.split("; "));
        if before != now {
            let (before, now) = parts.find(|(a, b)| a != b).unwrap_or((&before, &now));
            return what(format!("it was {before}, and is {now}"));
        }
        optimizer.go_on(of)?;
        Ok(optimizer)
    }

    fn plan(self) -> Result<Optimizer<B>, OptimError> {
        let Self {
            id,
            backend,
            offload: _,
            host_bytes,
            earlier,
            world,
            mesh,
            scales,
            groups,
            mut params,
            seed,
            flats,
            products,
        } = self;
        params.iter_mut().for_each(|p| p.random.seed = seed);
        if mesh.world() != world.world_size() {
            return Err(CommError::MeshWorld {
                replicate: mesh.replicate,
                shard: mesh.shard,
                world: world.world_size(),
            }
            .into());
        }
        for (index, group) in groups.iter().enumerate() {
            group.check(index)?;
        }
        for stream in &earlier {
            backend.wait_for(stream)?;
        }
        let book = Arc::new(scales.build(&backend)?);
        let items: Vec<CastItem<B>> = params.iter().map(|p| p.item.clone()).collect();
        let cast_plan = CastPlan::new(&backend, &book, &items).map_err(|error| match error {
            ShardError::Kernel(KernelError::Aliased { .. }) => {
                shared_buffer(&backend, &book, &params).unwrap_or(error.into())
            }
            error => error.into(),
        })?;
        let matrices = params.iter().any(|param| param.rule.is_of_matrices());
        let (mut muon, mut gather) = (None, None);
        if matrices || !flats.is_empty() {
            let shards = shards(&world, mesh)?;
            if matrices {
                let products = products.as_ref();
                muon = Some(Muon::of(&backend, &shards, products, &mut params)?);
            }
            if !flats.is_empty() {
                gather = Some(FlatGather::new(&backend, &shards, &book, &flats)?);
            }
        }
        let grad = |p: &Param<B>| (!p.left_out).then(|| p.grad.clone());
        let grads: Vec<Option<Source<B>>> = params.iter().map(grad).collect();
        let work = StepWork::new(NewStep {
            backend: &backend,
            world: &world,
            mesh,
            book: &book,
            params: &params,
            groups: groups.len(),
            grads: &grads,
            muon,
            flat: gather,
        })?;
        Ok(Optimizer {
            id,
            backend,
            host_bytes,
            world,
            mesh,
            book,
            groups,
            params,
            cast_plan,
            work,
            graph: None,
            planned: PlannedSets::default(),
            number: 0,
            launched: 0,
            done: Vec::new(),
            compared: Compared::default(),
        })
    }
}

/// The elements of `tensor`, where they are a half of masters in `dtype`.
fn half_of<S, R: Recipe>(tensor: &QuantizedTensor<S, R>, dtype: MasterDtype) -> Option<&S> {
    let halves = dtype == MasterDtype::Bf16Plus16 && is_in_bf16(&tensor.recipe());
    match tensor.buffers() {
        [elements] if halves => Some(&elements.storage),
        _ => None,
    }
}

/// The ranks that share out a replica, one of which is this one.
fn shards<B: Backend>(
    world: &Arc<dyn Communicator<B>>,
    mesh: Mesh,
) -> Result<Arc<dyn Communicator<B>>, CommError> {
    if mesh.replicate == 1 {
        return Ok(Arc::clone(world));
    }
    let (replica, part) = mesh.coordinates(world.rank())?;
    world.split(replica, part)
}

/// The first two parameters that write the same buffer.
fn shared_buffer<B: Backend>(
    backend: &B,
    book: &ScaleBook<B>,
    params: &[Param<B>],
) -> Option<OptimError> {
    let clash = |of: &[&Param<B>]| {
        let items: Vec<CastItem<B>> = of.iter().map(|p| p.item.clone()).collect();
        let planned = CastPlan::new(backend, book, &items);
        matches!(
            planned,
            Err(ShardError::Kernel(KernelError::Aliased { .. }))
        )
    };
    for (index, second) in params.iter().enumerate() {
        let first = if clash(&[second]) {
            Some(second)
        } else {
            params[..index].iter().find(|first| clash(&[first, second]))
        };
        if let Some(first) = first {
            return Some(OptimError::SharedBuffer {
                first: first.name.clone(),
                second: second.name.clone(),
            });
        }
    }
    None
}

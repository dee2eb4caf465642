//! [`Optimizer`]: `lowp_optim::Optimizer` over masters, states and gradients of PyTorch.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use lowp_comm::{Communicator, Mesh, or_abort};
use lowp_format::Shape;
use lowp_kernels::{Master, State, StepCounts};
use lowp_optim::{
    Group, MasterDtype, MatrixCut, OptimError, OptimizerBuilder, ParamId, ParamMemory, ParamPlace,
    PendingStep, Rule, StateDtype, StepOptions, StepReport,
};
use lowp_shard::DelayedState;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::Error;
use crate::gather::{Held, Shard};
use crate::locks::lock;
use crate::place::{
    Current, Device, DeviceArg, Memory, MemoryArg, Owned, check_process, on_device,
};
use crate::ranks::communicator;
use crate::recipe::Recipe;
use crate::tensor::{Named, tensor};

/// Sets of addresses of gradients that work stays planned for.
const SETS: usize = 8;

/// Steps whose reports the host does not wait for.
const UNREAD: usize = 2;

/// lr, beta1, beta2, eps, weight decay.
type GroupArg = (f32, f32, f32, f32, f32);

/// The rule and the hyperparameters of a group.
fn group(rule: Rule, (lr, beta1, beta2, eps, weight_decay): GroupArg) -> Group {
    Group {
        lr,
        betas: (beta1, beta2),
        eps,
        weight_decay,
        ..Group::of(rule)
    }
}

/// A matrix of which the elements of each rank follow each other.
fn cut(full: Shape, ends: &[usize]) -> MatrixCut {
    let starts = std::iter::once(&0).chain(ends);
    MatrixCut {
        full,
        ranges: starts.zip(ends).map(|(&start, &end)| start..end).collect(),
        tiles: None,
    }
}

/// A parameter as Python gives it.
#[derive(FromPyObject)]
pub(crate) struct ParamArg {
    name: String,
    group: usize,
    recipe: Py<Recipe>,
    shape: (usize, usize),
    /// Of rules of matrices over several ranks: the rows of the whole, and where the elements of each rank end.
    cut: Option<(usize, Vec<usize>)>,
    /// Rows that FSDP2 gathers, in the place of `buffers`.
    shard: Option<Py<Shard>>,
    buffers: Named,
    /// The first element of the rows in the flattened matrix.
    first: usize,
    master: MemoryArg,
    /// Its dtype: `bf16+16` of remainders, beside elements in bf16.
    master_is: String,
    /// Those of the rule, in its order.
    states: Vec<MemoryArg>,
    /// Their dtype, `fp8` of codes and scales.
    states_are: String,
    /// Its gradient and the dtype of that, if it has one.
    grad: Option<(MemoryArg, String)>,
}

/// A gradient: address, bytes, dtype. None for a parameter that a step leaves out.
type GradArg = Option<(u64, usize, String)>;

/// The optimizer of this rank.
#[pyclass(frozen, module = "lowp._lowp")]
pub(crate) struct Optimizer {
    of: Owned<Mutex<Box<dyn Steps>>>,
}

/// What became of a step.
struct Report {
    step: StepReport,
    /// Whether it took the norm.
    measured: bool,
}

/// What the optimizers of all backends can do.
trait Steps: Send + Sync {
    fn step(
        &mut self,
        device: &Device,
        grads: Option<Vec<GradArg>>,
        groups: Vec<GroupArg>,
        options: &StepOptions,
    ) -> Result<(), Error>;
    fn again(&mut self, device: &Device, grads: &[GradArg]) -> Result<(), Error>;
    /// The same over parameters that lie elsewhere now. Not collective.
    fn moved(
        &mut self,
        device: &Device,
        groups: Vec<GroupArg>,
        params: Vec<ParamArg>,
    ) -> Result<Box<dyn Steps>, Error>;
    /// Tells the other ranks that this one cannot take part.
    fn abort(&self, message: &str);
    fn calibrate(&self) -> Result<(), Error>;
    fn report(&self) -> Result<Report, Error>;
    fn counts(&self) -> Result<(StepCounts, Vec<u64>), Error>;
    fn set_counts(&mut self, counts: StepCounts, steps: &[u64]) -> Result<(), Error>;
    fn delayed(&self, param: usize) -> Result<Vec<DelayedState>, Error>;
    fn set_delayed(&self, param: usize, states: Vec<DelayedState>) -> Result<(), Error>;
}

struct Of<B: Held> {
    optimizer: lowp_optim::Optimizer<B>,
    comm: Arc<dyn Communicator<B>>,
    mesh: Option<(usize, usize)>,
    backend: B,
    ids: Vec<ParamId>,
    rule: Rule,
    /// What masters and states round by, where they do stochastically.
    seed: u64,
    groups: Vec<GroupArg>,
    /// Where the gradients of the last step lie.
    last: Vec<Option<Range<usize>>>,
    /// Whether the last step took the norm.
    measured: bool,
    /// Reports of the last steps, where the device does the collectives.
    reports: VecDeque<PendingStep<B>>,
}

impl<B: Held> Of<B> {
    fn new(
        backend: &B,
        ranks: Option<Py<PyAny>>,
        mesh: Option<(usize, usize)>,
        (rule, seed, groups): (Rule, u64, Vec<GroupArg>),
        params: Vec<ParamArg>,
    ) -> Result<Self, Error> {
        let comm = communicator(backend, ranks)?;
        let (builder, ids) = or_abort(
            &*comm,
            Self::builder((backend, &comm), mesh, (rule, seed, &groups), params),
        )?;
        let mut optimizer = builder.build_uncast()?;
        optimizer.keep_sets(SETS);
        Ok(Self {
            optimizer,
            comm,
            mesh,
            backend: backend.clone(),
            ids,
            rule,
            seed,
            groups,
            last: Vec::new(),
            measured: true,
            reports: VecDeque::new(),
        })
    }

    fn builder(
        (backend, comm): (&B, &Arc<dyn Communicator<B>>),
        mesh: Option<(usize, usize)>,
        (rule, seed, groups): (Rule, u64, &[GroupArg]),
        params: Vec<ParamArg>,
    ) -> Result<(OptimizerBuilder<B>, Vec<ParamId>), Error> {
        let builder = OptimizerBuilder::new(Arc::clone(comm)).on(backend);
        let mut builder = builder.seed(seed);
        if let Some((replicate, shard)) = mesh {
            builder = builder.mesh(Mesh { replicate, shard });
        }
        for &of in groups {
            builder.group(group(rule, of));
        }
        if rule.is_of_matrices() {
            builder = builder.products(backend.products().map_err(OptimError::from)?);
        }
        let mut ids = Vec::new();
        for param in params {
            let states = param.states.into_iter();
            let states = states.map(|state| state_in(backend, state, &param.states_are));
            let grad = param
                .grad
                .map(|(grad, dtype)| backend.source(grad.into(), &dtype));
            let (states, grad) = (states.collect::<Result<_, _>>()?, grad.transpose()?);
            let memory = |master| ParamMemory {
                master,
                states,
                grad,
                place: ParamPlace {
                    start: param.first,
                    tiles: None,
                },
            };
            let id = match &param.shard {
                Some(shard) => {
                    let shard = B::shard(&shard.get().of);
                    let shard = shard.ok_or_else(|| {
                        Error::new(format!(
                            "the shard of {} is on another device than the optimizer; make the optimizer after the model was moved",
                            param.name
                        ))
                    })?;
                    let master = backend.source(param.master.into(), &param.master_is)?;
                    let memory = memory(master.into());
                    builder.param_in(shard.local(), param.name, param.group, memory)?
                }
                None => {
                    let recipe = param.recipe.get().recipe;
                    let shape = Shape::new(param.shape.0, param.shape.1);
                    let tensor = tensor(backend, recipe, shape, param.buffers)?;
                    let in_halves = param.master_is == MasterDtype::Bf16Plus16.name();
                    let master = match tensor.buffers().first().filter(|_| in_halves) {
                        Some(elements) => Master::Bf16Plus16 {
                            parameter: elements.storage.clone(),
                            remainder: backend.wrap(param.master.into())?,
                        },
                        None => {
                            let values = backend.source(param.master.into(), &param.master_is)?;
                            values.into()
                        }
                    };
                    builder.param_in(&tensor, param.name, param.group, memory(master))?
                }
            };
            if let Some((rows, ends)) = param.cut {
                builder.matrix(id, cut(Shape::new(rows, param.shape.1), &ends))?;
            }
            ids.push(id);
        }
        Ok((builder, ids))
    }
}

impl<B: Held> Of<B> {
    /// What of a step can fail on this rank alone.
    fn make_ready(
        &mut self,
        grads: Option<Vec<GradArg>>,
        groups: Vec<GroupArg>,
        options: &StepOptions,
    ) -> Result<(), Error> {
        for (index, (&new, old)) in groups.iter().zip(&mut self.groups).enumerate() {
            if new != *old {
                self.optimizer.set_group(index, group(self.rule, new))?;
                *old = new;
            }
        }
        self.measured = options.skip_nonfinite || options.max_norm.is_some();
        let Some(grads) = grads else {
            if !self.optimizer.take_grads_at(&self.last) {
                return Err(Error::new(
                    "the addresses of the gradients were left out, as if they were those of the last step, but there was no step; give the addresses",
                ));
            }
            return Ok(self.optimizer.prepare(options)?);
        };
        let spans = self.spans(&grads)?;
        self.last.clear();
        if !self.optimizer.take_grads_at(&spans) {
            let source = |grad: GradArg| {
                let source = |(pointer, bytes, dtype): (u64, usize, String)| {
                    self.backend
                        .source(memory(&self.backend, pointer, bytes), &dtype)
                };
                grad.map(source).transpose()
            };
            let sources = grads.into_iter().map(source);
            let sources = sources.collect::<Result<Vec<_>, Error>>()?;
            self.optimizer.take_grads(sources)?;
        }
        self.last = spans;
        Ok(self.optimizer.prepare(options)?)
    }

    /// Fails on every rank where ranks gave other hyperparameters or options: such a step is skipped. Where the device does the
    /// collectives the host looks at the step before the last one, so that it need not wait for the device.
    fn check_ranks(&mut self, options: &StepOptions) -> Result<(), Error> {
        if self.comm.world_size() == 1 {
            return Ok(());
        }
        if !self.comm.is_enqueued() {
            self.optimizer.finish(options)?;
            return Ok(());
        }
        self.reports.push_back(self.optimizer.outcome()?);
        if self.reports.len() > UNREAD
            && let Some(report) = self.reports.pop_front()
        {
            let _: StepReport = report.wait()?;
        }
        Ok(())
    }

    /// Where gradients lie. Handles are made of those at new addresses alone: on a GPU the end of each costs a look at every
    /// stream.
    fn spans(&self, grads: &[GradArg]) -> Result<Vec<Option<Range<usize>>>, Error> {
        let span = |(pointer, bytes, _): &(u64, usize, String)| match bytes {
            0 => {
                let none = self
                    .backend
                    .wrap::<f32>(memory(&self.backend, *pointer, 0))?;
                Ok(self.backend.span(&none))
            }
            _ => Ok(memory(&self.backend, *pointer, *bytes).span()),
        };
        let span = |grad: &GradArg| grad.as_ref().map(span).transpose();
        grads.iter().map(span).collect()
    }
}

impl<B: Held> Steps for Of<B> {
    fn step(
        &mut self,
        device: &Device,
        grads: Option<Vec<GradArg>>,
        groups: Vec<GroupArg>,
        options: &StepOptions,
    ) -> Result<(), Error> {
        let stream = B::of_or(device, "the optimizer");
        let ready = stream.and_then(|stream| {
            self.make_ready(grads, groups, options)?;
            Ok(stream)
        });
        let stream = or_abort(&*self.comm, ready)?;
        self.optimizer.agree()?;
        // Nothing where both are the same stream.
        self.backend.wait_for(&stream)?;
        self.optimizer.enqueue()?;
        stream.wait_for(&self.backend)?;
        self.check_ranks(options)
    }

    fn abort(&self, message: &str) {
        self.comm.control().abort(message);
    }

    fn again(&mut self, device: &Device, grads: &[GradArg]) -> Result<(), Error> {
        let stream = B::of_or(device, "the optimizer")?;
        let spans = self.spans(grads)?;
        if !self.optimizer.take_grads_at(&spans) {
            return Err(Error::new(
                "step() was called while a CUDA graph is captured, with gradients at new addresses; take a step with the same gradients before the capture",
            ));
        }
        // PyTorch's graph launches what is planned, for as long as it likes.
        self.optimizer.pin_grads();
        self.backend.wait_for(&stream)?;
        self.optimizer.enqueue()?;
        Ok(stream.wait_for(&self.backend)?)
    }

    fn moved(
        &mut self,
        device: &Device,
        groups: Vec<GroupArg>,
        params: Vec<ParamArg>,
    ) -> Result<Box<dyn Steps>, Error> {
        let backend = B::of_or(device, "the optimizer")?;
        let (builder, ids) = Self::builder(
            (&backend, &self.comm),
            self.mesh,
            (self.rule, self.seed, &groups),
            params,
        )?;
        let mut optimizer = builder.build_moved(&self.optimizer)?;
        optimizer.keep_sets(SETS);
        Ok(Box::new(Self {
            optimizer,
            comm: Arc::clone(&self.comm),
            mesh: self.mesh,
            backend,
            ids,
            rule: self.rule,
            seed: self.seed,
            groups,
            last: Vec::new(),
            measured: self.measured,
            reports: std::mem::take(&mut self.reports),
        }))
    }

    fn calibrate(&self) -> Result<(), Error> {
        Ok(self.optimizer.calibrate()?)
    }

    fn report(&self) -> Result<Report, Error> {
        Ok(Report {
            step: self.optimizer.outcome()?.wait()?,
            measured: self.measured,
        })
    }

    fn counts(&self) -> Result<(StepCounts, Vec<u64>), Error> {
        Ok((self.optimizer.counts()?, self.optimizer.steps()?))
    }

    fn set_counts(&mut self, counts: StepCounts, steps: &[u64]) -> Result<(), Error> {
        Ok(self.optimizer.set_steps(counts, steps)?)
    }

    fn delayed(&self, param: usize) -> Result<Vec<DelayedState>, Error> {
        let book = self.optimizer.scales();
        let slots = self.optimizer.slots(self.ids[param])?;
        let states = slots.into_iter().flatten();
        let states = states.filter_map(|slot| book.delayed_state(slot).transpose());
        Ok(states.collect::<Result<_, _>>()?)
    }

    fn set_delayed(&self, param: usize, states: Vec<DelayedState>) -> Result<(), Error> {
        let book = self.optimizer.scales();
        let slots = self.optimizer.slots(self.ids[param])?;
        for (slot, state) in slots.into_iter().flatten().zip(&states) {
            book.set_delayed_state(slot, state)?;
        }
        Ok(())
    }
}

/// A state in memory of PyTorch.
fn state_in<B: Held>(backend: &B, memory: MemoryArg, dtype: &str) -> Result<State<B>, Error> {
    match dtype == StateDtype::Fp8.name() {
        true => Ok(State::Fp8(backend.wrap(memory.into())?)),
        false => Ok(backend.source(memory.into(), dtype)?.into()),
    }
}

fn memory<B: Held>(backend: &B, pointer: u64, bytes: usize) -> Memory {
    (pointer, bytes, backend.number(), None).into()
}

impl Optimizer {
    fn made(of: Box<dyn Steps>) -> Self {
        Self {
            of: Owned::new(Mutex::new(of)),
        }
    }

    /// Does `work` with the optimizer, while other threads of Python run.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut dyn Steps) -> Result<T, Error> + Send,
    ) -> Result<T, Error> {
        py.detach(|| {
            check_process()?;
            let _current = Current::keep();
            // Whoever failed in between said what became of the parameters.
            work(lock(&self.of).as_mut())
        })
    }
}

#[pymethods]
impl Optimizer {
    /// Plans the step over `params`, whose rows the ranks of `ranks` share out as `mesh`, replicas x shards. Collective.
    #[new]
    #[pyo3(signature = (device, rule, seed, groups, params, ranks = None, mesh = None))]
    #[expect(clippy::too_many_arguments, reason = "one for each argument of Python")]
    fn new(
        py: Python<'_>,
        device: DeviceArg,
        rule: &str,
        seed: u64,
        groups: Vec<GroupArg>,
        params: Vec<ParamArg>,
        ranks: Option<Py<PyAny>>,
        mesh: Option<(usize, usize)>,
    ) -> Result<Self, Error> {
        let device = Device::new(&device)?;
        let known = Rule::from_name(rule);
        let rule = known.ok_or_else(|| Error::new(format!("there is no rule {rule:?}")))?;
        let of: Box<dyn Steps> = py.detach(|| {
            on_device!(&device, |backend| {
                let of = Of::new(backend, ranks, mesh, (rule, seed, groups), params)?;
                Ok::<_, Error>(Box::new(of) as Box<dyn Steps>)
            })
        })?;
        Ok(Self::made(of))
    }

    /// The optimizer over `params`, the same parameters that lie elsewhere now: it goes on after the last step. Not collective.
    fn moved(
        &self,
        py: Python<'_>,
        device: DeviceArg,
        groups: Vec<GroupArg>,
        params: Vec<ParamArg>,
    ) -> Result<Self, Error> {
        let device = Device::new(&device)?;
        let of = self.with(py, |of| of.moved(&device, groups, params));
        of.map(Self::made)
    }

    /// One step with the gradients where they lie, `None` of a parameter that has none; `None` where they lie as in the last one. Collective.
    #[pyo3(signature = (device, grads, groups, grad_scale = 1.0, max_norm = None, skip_nonfinite = false))]
    #[expect(clippy::too_many_arguments, reason = "one for each argument of Python")]
    fn step(
        &self,
        py: Python<'_>,
        device: DeviceArg,
        grads: Option<Vec<GradArg>>,
        groups: Vec<GroupArg>,
        grad_scale: f32,
        max_norm: Option<f32>,
        skip_nonfinite: bool,
    ) -> Result<(), Error> {
        let device = Device::new(&device)?;
        let options = StepOptions {
            lr_factor: 1.0,
            grad_scale,
            max_norm,
            skip_nonfinite,
        };
        self.with(py, |of| of.step(&device, grads, groups, &options))
    }

    /// A step with the options of the last one, over gradients that one was taken over: what a capture of PyTorch records.
    fn again(&self, py: Python<'_>, device: DeviceArg, grads: Vec<GradArg>) -> Result<(), Error> {
        let device = Device::new(&device)?;
        self.with(py, |of| of.again(&device, &grads))
    }

    /// Tells the other ranks that this one failed: they get `message`.
    fn abort(&self, py: Python<'_>, message: &str) -> Result<(), Error> {
        self.with(py, |of| {
            of.abort(message);
            Ok(())
        })
    }

    /// Casts the masters with scales from the values. Collective.
    fn calibrate(&self, py: Python<'_>) -> Result<(), Error> {
        self.with(py, |of| of.calibrate())
    }

    /// What became of the last step: waits for it.
    fn report<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>, Error> {
        let Report { step, measured } = self.with(py, |of| of.report())?;
        let dict = PyDict::new(py);
        dict.set_item("applied", step.applied)?;
        dict.set_item("grad_norm", measured.then_some(step.grad.norm))?;
        dict.set_item("nonfinite", step.grad.non_finite)?;
        dict.set_item("clip", step.clip)?;
        dict.set_item("steps", step.steps)?;
        dict.set_item("skipped", step.skipped)?;
        Ok(dict)
    }

    /// Steps that were applied and skipped, and those that each parameter was updated in.
    fn counts(&self, py: Python<'_>) -> Result<(u64, u64, Vec<u64>), Error> {
        let (counts, steps) = self.with(py, |of| of.counts())?;
        Ok((counts.applied, counts.skipped, steps))
    }

    /// Sets the step counts of the optimizer and of each parameter.
    #[expect(clippy::needless_pass_by_value, reason = "as Python gives it")]
    fn set_counts(
        &self,
        py: Python<'_>,
        applied: u64,
        skipped: u64,
        steps: Vec<u64>,
    ) -> Result<(), Error> {
        let counts = StepCounts { applied, skipped };
        self.with(py, |of| of.set_counts(counts, &steps))
    }

    /// The delayed scales of a parameter with their histories.
    fn delayed(&self, py: Python<'_>, param: usize) -> Result<Vec<(f32, Vec<f32>)>, Error> {
        let states = self.with(py, |of| of.delayed(param))?;
        Ok(states.into_iter().map(|s| (s.scale, s.history)).collect())
    }

    /// Replaces them.
    fn set_delayed(
        &self,
        py: Python<'_>,
        param: usize,
        states: Vec<(f32, Vec<f32>)>,
    ) -> Result<(), Error> {
        let states = states.into_iter();
        let states = states.map(|(scale, history)| DelayedState { scale, history });
        let states = states.collect();
        self.with(py, |of| of.set_delayed(param, states))
    }
}

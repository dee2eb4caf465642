//! A training step without the host: gathers, casts, norm, clipping, skip, update and encode over two
//! streams, captured as one graph, for every recipe. Every backend gives the bits of the CPU that does the
//! same call by call.

use std::sync::Arc;

use lowp_comm::{Communicator, LocalComm};
use lowp_format::{AnyRecipe, Orientation, Phase, QuantizedTensor, Shape, Usage};
use lowp_kernels::{Backend, Cpu, DecodeJob, Source, StepScalars, Work};
use lowp_optim::{
    Group, MasterDtype, OptimError, Optimizer, OptimizerBuilder, ParamId, ParamSpec, StateDtype,
    StateDtypes, StepOptions, StepReport,
};
use lowp_shard::{
    CastItem, CastPlan, GatherGroup, GatherPool, ScaleBook, ScaleBookBuilder, ShardSpec,
    ShardedTensor,
};

const STEPS: u64 = 6;
/// Rows that are no multiple of a warp's, of enough elements for several threads.
const SHAPE: Shape = Shape::new(96, 192);

/// The widest masters and moments, and narrow ones, which are those of a device alone here.
const STATES: [StateDtypes; 3] = [
    StateDtypes {
        master: MasterDtype::F32,
        exp_avg: StateDtype::F32,
        exp_avg_sq: StateDtype::F32,
        momentum_buffer: StateDtype::F32,
    },
    StateDtypes {
        master: MasterDtype::Bf16,
        exp_avg: StateDtype::Fp8,
        exp_avg_sq: StateDtype::Fp8,
        momentum_buffer: StateDtype::F32,
    },
    StateDtypes {
        master: MasterDtype::Bf16Plus16,
        exp_avg: StateDtype::Bf16,
        exp_avg_sq: StateDtype::Bf16,
        momentum_buffer: StateDtype::F32,
    },
];

/// One rank of a model with a parameter of every recipe, on a stream for its work and one for gathers.
struct Model<B: Backend> {
    backend: B,
    comm: Arc<dyn Communicator<B>>,
    optimizer: Optimizer<B>,
    ids: Vec<ParamId>,
    weights: GatherGroup<B>,
    /// Tensors that are cast beside the parameters, as activations are: their values and bytes.
    values: Vec<B::Buffer<f32>>,
    operands: Vec<QuantizedTensor<B::Buffer<u8>, AnyRecipe>>,
    book: ScaleBook<B>,
    cast: CastPlan<B>,
    /// What the gathered weights decode to, by phase, and the plans that decode them.
    decoded: [Vec<B::Buffer<f32>>; 2],
    decode: [Vec<B::Plan>; 2],
}

fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let random = lowp_format::Philox::new(seed, 0);
    (0..len as u64).map(|i| random.normal(i)).collect()
}

impl<B: Backend> Model<B> {
    fn new(backend: &B, state: StateDtypes) -> Result<Self, OptimError> {
        let comm: Arc<dyn Communicator<B>> = LocalComm::solo(&backend.fork()?).into();
        let mut builder = OptimizerBuilder::new(comm.clone()).on(backend);
        let group = builder.group(Group {
            lr: 0.01,
            ..Group::default()
        });
        let (mut ids, mut shards, mut values, mut operands) = (vec![], vec![], vec![], vec![]);
        let (mut book, mut items) = (ScaleBookBuilder::default(), vec![]);
        for (seed, recipe) in (0..).zip(AnyRecipe::all()) {
            let master = numbers(seed, SHAPE.elements());
            let shard = ShardedTensor::new(backend, recipe, ShardSpec::new(&recipe, SHAPE, 1, 0)?)?;
            let spec = ParamSpec {
                state,
                ..ParamSpec::new(format!("{seed}"), group, master)
            };
            ids.push(builder.param(shard.local(), spec)?);
            shards.push(shard);
            let operand =
                QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, |_, n| backend.alloc::<u8>(n))?;
            let value = backend.alloc::<f32>(SHAPE.elements())?;
            items.push(CastItem::rows(
                &operand,
                Source::F32(value.clone()),
                &mut book,
            ));
            values.push(value);
            operands.push(operand);
        }
        let optimizer = builder.build()?;
        let book = book.build(backend)?;
        let cast = CastPlan::new(backend, &book, &items)?;
        let pool = GatherPool::new(backend);
        let weights = GatherGroup::new(backend, comm.clone(), &pool, shards, true)?;
        let mut model = Self {
            backend: backend.clone(),
            comm,
            optimizer,
            ids,
            weights,
            values,
            operands,
            book,
            cast,
            decoded: [vec![], vec![]],
            decode: [vec![], vec![]],
        };
        model.plan_decodes()?;
        Ok(model)
    }

    /// Both phases use one set of buffers, which this makes.
    fn plan_decodes(&mut self) -> Result<(), OptimError> {
        for phase in Phase::ALL {
            self.weights.unshard(phase)?;
            let orientation = match phase {
                Phase::Forward => Orientation::Rowwise,
                Phase::Backward => Orientation::Columnwise,
            };
            for param in 0..self.ids.len() {
                let out = self.backend.alloc::<f32>(SHAPE.elements())?;
                let tensor = self.weights.tensor(param)?;
                let job = DecodeJob::new(tensor, orientation, Source::F32(out.clone()))?;
                let plan = self.backend.plan(Work::Decode(vec![job]))?;
                self.decode[phase as usize].push(plan);
                self.decoded[phase as usize].push(out);
            }
            self.weights.reshard();
        }
        Ok(())
    }

    /// What changes from step to step: the host writes it and goes on.
    fn feed(&mut self, step: u64) -> Result<(), OptimError> {
        for (index, &id) in (0..).zip(&self.ids) {
            let mut grad = numbers(1000 * step + index, SHAPE.elements());
            if step == 3 && index == 2 {
                grad[SHAPE.elements() - 1] = f32::NAN;
            }
            self.optimizer.set_grad(id, &grad)?;
            let value = numbers(500 * step + index, SHAPE.elements());
            self.backend
                .write(&self.values[index as usize], 0, &value)?;
        }
        let options = StepOptions {
            lr_factor: 1.0 / step as f32,
            // Clips some of the steps.
            max_norm: Some(if step.is_multiple_of(2) { 10.0 } else { 1e6 }),
            ..StepOptions::default()
        };
        self.optimizer.prepare(&options)
    }

    /// A whole step. The gathers, on their own stream, overlap the casts of the operands.
    fn enqueue(&mut self) -> Result<(), OptimError> {
        self.optimizer.enqueue()?;
        for phase in Phase::ALL {
            self.weights.unshard(phase)?;
            self.cast.run(&self.book, &*self.comm)?;
            for plan in &self.decode[phase as usize] {
                self.backend.run(plan, &StepScalars::default())?;
            }
            self.weights.reshard();
        }
        Ok(())
    }

    /// Everything that a step changes, as bytes.
    fn state(&self) -> Result<Vec<Vec<u8>>, OptimError> {
        let backend = &self.backend;
        let bits = |values: Vec<f32>| values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut state: Vec<Vec<u8>> = Vec::new();
        for &id in &self.ids {
            state.push(bits(self.optimizer.master(id)?));
            state.extend(self.optimizer.states(id)?.into_iter().map(bits));
        }
        for decoded in self.decoded.iter().flatten() {
            state.push(bits(backend.download(decoded)?));
        }
        let shards = self
            .weights
            .params()
            .iter()
            .map(|shard| shard.local().buffers());
        let buffers = shards.chain(self.operands.iter().map(|operand| operand.buffers()));
        for buffer in buffers.flatten() {
            state.push(backend.download(&buffer.storage)?);
        }
        for book in [&**self.optimizer.scales(), &self.book] {
            state.push(bits(book.scales()?));
            for slot in book.slots() {
                state.push(bits(book.history(slot)?.unwrap_or_default()));
            }
        }
        Ok(state)
    }
}

/// The buffers of a model after a step, and its report.
type Seen = (Vec<Vec<u8>>, StepReport);

/// States and reports of all steps, call by call.
fn call_by_call<B: Backend>(backend: &B, state: StateDtypes) -> Result<Vec<Seen>, OptimError> {
    let mut model = Model::new(backend, state)?;
    let mut seen = Vec::new();
    for step in 1..=STEPS {
        model.feed(step)?;
        model.enqueue()?;
        let report = model.optimizer.outcome()?.wait()?;
        seen.push((model.state()?, report));
    }
    Ok(seen)
}

/// Reports as text: the norm of a skipped step may be NaN, which equals nothing.
fn text(report: &StepReport) -> String {
    let norm = report.grad.norm;
    // Sign and payload of a NaN are nobody's promise.
    let bits = if norm.is_nan() { 0 } else { norm.to_bits() };
    format!("{report:?}, norm {bits:x}")
}

/// The same with one graph; `waits` counts how often the host waited for the device.
fn as_one_graph<B: Backend>(
    backend: &B,
    state: StateDtypes,
    waits: impl Fn() -> u64,
) -> Result<(), OptimError> {
    let expected = call_by_call(&Cpu, state)?;
    let mut model = Model::new(backend, state)?;
    let graph = backend.clone().capture(|| model.enqueue())?;
    for (step, (state, report)) in (1..).zip(&expected) {
        model.feed(step)?;
        backend.launch(&graph)?;
        let found = model.optimizer.outcome()?.wait()?;
        assert_eq!(text(&found), text(report), "step {step}");
        let found = model.state()?;
        let differs = found.iter().zip(state).position(|(a, b)| a != b);
        assert_eq!(differs, None, "step {step}: {} buffers", state.len());
    }
    // Gathers beside the graph do not touch its memory.
    for phase in Phase::ALL {
        model.weights.unshard(phase)?;
        let gathered = model.weights.tensor(0)?.buffers();
        let shard = model.weights.params()[0].local();
        for buffer in gathered {
            let own = &shard.buffer(buffer.spec.key)?.storage;
            assert_eq!(backend.download(&buffer.storage)?, backend.download(own)?);
        }
        model.feed(STEPS + 1)?;
        backend.launch(&graph)?;
        model.weights.reshard();
        assert!(model.optimizer.outcome()?.wait()?.applied);
    }
    // A second time from the first step, without looking: the host never waits, and nothing is lost.
    let mut blind = Model::new(backend, state)?;
    let graph = backend.clone().capture(|| blind.enqueue())?;
    backend.synchronize()?;
    let before = waits();
    let mut outcomes = Vec::new();
    for step in 1..=STEPS {
        blind.feed(step)?;
        backend.launch(&graph)?;
        outcomes.push(blind.optimizer.outcome()?);
    }
    assert_eq!(waits(), before, "the host waited for the device");
    for (outcome, (_, report)) in outcomes.into_iter().zip(&expected) {
        assert_eq!(text(&outcome.wait()?), text(report));
    }
    assert!(blind.state()? == expected[expected.len() - 1].0);
    Ok(())
}

#[test]
fn steps_are_applied_clipped_and_skipped() {
    let seen = call_by_call(&Cpu, STATES[0]).unwrap();
    let applied: Vec<bool> = seen.iter().map(|(_, report)| report.applied).collect();
    assert_eq!(applied, [true, true, false, true, true, true]);
    assert!(seen[1].1.clip < 1.0 && seen[4].1.clip == 1.0);
    assert_eq!(seen[5].1.steps, 5);
    assert_ne!(seen[0].0, seen[5].0);
}

#[test]
fn the_cpu_runs_a_step_as_one_graph() {
    as_one_graph(&Cpu, STATES[0], || 0).unwrap();
}

#[cfg(feature = "cuda")]
#[test]
fn cuda_runs_a_step_as_one_graph() {
    use lowp_kernels::Cuda;
    match Cuda::new(0) {
        Ok(cuda) => {
            for state in STATES {
                as_one_graph(&cuda, state, || cuda.waits()).unwrap();
            }
        }
        Err(error) if std::env::var_os("LOWP_REQUIRE_GPU").is_some() => {
            panic!("LOWP_REQUIRE_GPU is set, but {error}")
        }
        Err(error) => eprintln!("skipped: {error}"),
    }
}

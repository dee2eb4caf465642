//! Parameters whose masters are flat slices (ZeRO-1): after every step each rank has the full weights, masters and
//! scales of one rank that updates whole matrices, for every recipe, cut and mesh.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lowp_comm::{Communicator, LocalComm, Mesh, run_ranks};
use lowp_format::{AnyRecipe, Philox, QuantizedTensor, Shape, Usage};
use lowp_kernels::{Backend, Cpu, CpuBuffer};
use lowp_optim::{
    FloatDtype, Group, OptimError, Optimizer, OptimizerBuilder, ParamId, ParamSpec, StateDtypes,
    StepOptions, StepReport,
};
use lowp_shard::ShardError;

const TIMEOUT: Duration = Duration::from_secs(60);
const SHAPE: Shape = Shape::new(33, 64);
const ALL: usize = SHAPE.elements();
const STEPS: u64 = 20;
/// A step whose gradient is not finite on one rank.
const SKIPPED: u64 = 7;
/// In every fifth step, from this one on, half of the parameters have no gradient.
const LEAVES_OUT: u64 = 4;

type Tensor = QuantizedTensor<CpuBuffer<u8>>;

/// What a rank has after a step.
#[derive(Debug, PartialEq)]
struct State {
    weights: Vec<Vec<u8>>,
    scales: Vec<u32>,
    report: StepReport,
}

/// An element that is the largest and grows, so that delayed scales change in every step.
const LARGEST: usize = 5;

fn master(param: usize) -> Vec<f32> {
    let random = Philox::new(param as u64, 0);
    let mut master: Vec<f32> = (0..ALL as u64).map(|i| random.normal(i)).collect();
    master[LARGEST] = 8.0;
    master
}

/// Multiples of 1/8, whose squares add up without rounding in any order.
fn grad(param: usize, step: u64) -> Vec<f32> {
    let random = Philox::new(param as u64, step);
    let snap = |x: f32| (x.clamp(-4.0, 4.0) * 8.0).round() / 8.0;
    let mut grad: Vec<f32> = (0..ALL as u64).map(|i| snap(random.normal(i))).collect();
    grad[LARGEST] = -4.0;
    if step == SKIPPED && param == 3 {
        grad[70] = f32::NAN;
    }
    grad
}

/// One rank: a parameter of every recipe, of each of which it has the elements `own`, or whole rows.
struct Rank {
    optimizer: Optimizer<Cpu>,
    ids: Vec<ParamId>,
    tensors: Vec<Tensor>,
    own: Option<Range<usize>>,
}

impl Rank {
    fn new(
        comm: impl Into<Arc<dyn Communicator<Cpu>>>,
        mesh: Mesh,
        own: Option<Range<usize>>,
        dtype: FloatDtype,
    ) -> Result<Self, OptimError> {
        let mut builder = OptimizerBuilder::new(comm).mesh(mesh);
        let group = builder.group(Group {
            lr: 0.05,
            ..Group::default()
        });
        let (mut ids, mut tensors) = (Vec::new(), Vec::new());
        for (param, recipe) in AnyRecipe::all().into_iter().enumerate() {
            let tensor = QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, |_, n| {
                Ok::<_, ShardError>(Cpu.alloc::<u8>(n)?)
            })?;
            let spec = |master| ParamSpec {
                grad: dtype,
                state: StateDtypes {
                    exp_avg: dtype.into(),
                    exp_avg_sq: [dtype, FloatDtype::F32][param % 2].into(),
                    ..StateDtypes::default()
                },
                ..ParamSpec::new(format!("{param}"), group, master)
            };
            ids.push(match &own {
                Some(own) => {
                    let spec = spec(master(param)[own.clone()].to_vec());
                    builder.flat_param(&tensor, own.start, spec)?
                }
                None => builder.param(&tensor, spec(master(param)))?,
            });
            tensors.push(tensor);
        }
        let optimizer = builder.build()?;
        Ok(Self {
            optimizer,
            ids,
            tensors,
            own,
        })
    }

    fn step(&mut self, step: u64) -> Result<State, OptimError> {
        for (param, &id) in self.ids.iter().enumerate() {
            if step % 5 == LEAVES_OUT && param % 2 == 0 {
                self.optimizer.leave_out(id);
                continue;
            }
            let own = self.own.clone().unwrap_or(0..ALL);
            let grad = &grad(param, step)[own];
            match self.optimizer.grad(id) {
                lowp_kernels::Source::F32(_) => self.optimizer.set_grad(id, grad)?,
                lowp_kernels::Source::Bf16(buffer) => {
                    let grad: Vec<_> = grad.iter().map(|&x| half::bf16::from_f32(x)).collect();
                    Cpu.write(buffer, 0, &grad)?;
                    self.optimizer.mark_ready(id);
                }
            }
        }
        let max_norm = Some(20.0);
        let report = self
            .optimizer
            .step(&StepOptions {
                max_norm,
                ..StepOptions::default()
            })?
            .wait()?;
        self.state(report)
    }

    fn state(&self, report: StepReport) -> Result<State, OptimError> {
        let buffers = self.tensors.iter().flat_map(|t| t.buffers());
        let weights = buffers
            .map(|b| Cpu.download(&b.storage))
            .collect::<Result<_, _>>()?;
        let scales = self
            .optimizer
            .scales()
            .scales()?
            .into_iter()
            .map(f32::to_bits)
            .collect();
        Ok(State {
            weights,
            scales,
            report,
        })
    }
}

fn check(mesh: Mesh, ends: &[usize], dtype: FloatDtype) {
    assert_eq!(mesh.shard, ends.len());
    let solo = LocalComm::solo(&Cpu);
    let mut alone = Rank::new(solo, Mesh::sharded(1), None, dtype).expect("one rank");
    let expected: Vec<State> = (0..STEPS)
        .map(|step| alone.step(step).expect("a step"))
        .collect();
    let masters: Vec<Vec<f32>> = alone
        .ids
        .iter()
        .map(|&id| alone.optimizer.master(id).expect("values"))
        .collect();
    assert_eq!(expected[STEPS as usize - 1].report.skipped, 1);
    assert!(expected[0].report.clip < 1.0, "{:?}", expected[0].report);
    let done = run_ranks(&Cpu, mesh.world(), TIMEOUT, |rank, comm| {
        let (_, part) = mesh.coordinates(rank)?;
        let own = part.checked_sub(1).map_or(0, |before| ends[before])..ends[part];
        let mut model = Rank::new(comm, mesh, Some(own.clone()), dtype)?;
        for (step, expected) in (0..).zip(&expected) {
            let state = model.step(step)?;
            if step == SKIPPED {
                // Every replica counts what it has.
                assert_eq!(state.report.grad.non_finite, mesh.replicate as u64);
            }
            assert_eq!(state.report.applied, expected.report.applied);
            assert_eq!(state.scales, expected.scales, "step {step}");
            assert!(
                state.weights == expected.weights,
                "rank {rank}: the weights of step {step}"
            );
            if expected.report.applied {
                assert_eq!(state.report, expected.report);
            }
        }
        for (&id, expected) in model.ids.iter().zip(&masters) {
            assert_eq!(model.optimizer.master(id)?, expected[own.clone()]);
        }
        let gather = model
            .optimizer
            .flat_gather()
            .expect("flat slices")
            .sent_bytes() as u64;
        // One gather for the first cast, and one per step.
        assert_eq!(model.optimizer.flat_sent_bytes(), (STEPS + 1) * gather);
        Ok::<_, OptimError>(())
    });
    done.unwrap_or_else(|e| panic!("{mesh}, cut at {ends:?}: {e}"));
}

#[test]
fn flat_slices_step_as_one_rank_does() {
    check(Mesh::sharded(1), &[ALL], FloatDtype::F32);
    check(Mesh::sharded(2), &[ALL / 2, ALL], FloatDtype::F32);
    check(Mesh::sharded(3), &[705, 1410, ALL], FloatDtype::Bf16);
}

#[test]
fn slices_of_one_element_and_of_none_step_too() {
    check(Mesh::sharded(6), &[0, 1, 1, 130, ALL, ALL], FloatDtype::F32);
}

#[test]
fn replicas_of_flat_slices_stay_equal() {
    check(
        Mesh {
            replicate: 2,
            shard: 2,
        },
        &[333, ALL],
        FloatDtype::F32,
    );
    check(
        Mesh {
            replicate: 2,
            shard: 1,
        },
        &[ALL],
        FloatDtype::F32,
    );
}

/// A weight that two parameters write is named, whatever they have of its masters.
#[test]
fn one_weight_for_two_parameters_is_an_error() {
    let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
    let group = builder.group(Group::default());
    let recipe = AnyRecipe::low_precision()[0];
    let tensor: Tensor =
        QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, |_, n| Cpu.alloc::<u8>(n)).expect("room");
    for name in ["a", "b"] {
        let spec = ParamSpec::new(name, group, master(0));
        builder.flat_param(&tensor, 0, spec).expect("a parameter");
    }
    let error = builder.build().expect_err("one weight").to_string();
    assert!(error.contains("'a' and 'b'"), "{error}");
}

/// Slices with a gap between them are an error on every rank.
#[test]
fn slices_with_a_gap_are_an_error() {
    let failed = run_ranks(&Cpu, 2, TIMEOUT, |rank, comm| {
        let own = [0..100, 101..ALL][rank].clone();
        Rank::new(comm, Mesh::sharded(2), Some(own), FloatDtype::F32).map(drop)
    });
    let failed = failed.expect_err("a gap");
    let text = failed.cause.to_string();
    assert!(
        text.contains("begins at element 101, but the next element is 100"),
        "{text}"
    );
    assert!(failed.others.iter().all(|(_, result)| result.is_err()));
}

//! Parameters whose rows are cut within blocks, as FSDP2 does: after every step the gathered weights, the masters and the scales are those
//! of one rank that updates whole matrices, for every recipe and 1 to 9 ranks.

use std::sync::Arc;
use std::time::Duration;

use lowp_comm::{Communicator, LocalComm, Mesh, run_ranks};
use lowp_format::{AnyRecipe, BufferKey, Phase, Philox, QuantizedTensor, Recipe, Shape, Usage};
use lowp_kernels::{Backend, Cpu, CpuBuffer};
use lowp_optim::{Group, OptimError, Optimizer, OptimizerBuilder, ParamId, ParamSpec, StepOptions};
use lowp_shard::{CastTensor, GatherGroup, GatherPool, ShardError, ShardSpec, ShardedTensor};

const TIMEOUT: Duration = Duration::from_secs(60);
const COLS: usize = 64;
const STEPS: u64 = 4;
/// A step whose gradient is not finite on one rank.
const SKIPPED: u64 = 2;

type Bytes = Vec<(usize, BufferKey, Vec<u8>)>;

fn normal(param: usize, step: u64, rows: usize) -> impl Iterator<Item = f32> {
    let random = Philox::new(param as u64, step);
    (0..(rows * COLS) as u64).map(move |i| random.normal(i))
}

/// Multiples of 1/8, whose squares add up without rounding in any order.
fn grad(param: usize, step: u64, rows: usize) -> Vec<f32> {
    let snap = |x: f32| (x.clamp(-4.0, 4.0) * 8.0).round() / 8.0;
    let mut grad: Vec<f32> = normal(param, step, rows).map(snap).collect();
    if step == SKIPPED && param == 3 {
        grad[70] = f32::NAN;
    }
    grad
}

fn recipes() -> Vec<AnyRecipe> {
    AnyRecipe::all()
}

/// An optimizer over the rows of `into`, one parameter of each recipe.
struct Rank {
    optimizer: Optimizer<Cpu>,
    ids: Vec<ParamId>,
    own: Vec<std::ops::Range<usize>>,
    rows: usize,
}

impl Rank {
    fn new<T: CastTensor<Cpu>>(
        comm: Arc<dyn Communicator<Cpu>>,
        mesh: Mesh,
        rows: usize,
        into: &[(&T, std::ops::Range<usize>)],
    ) -> Result<Self, OptimError> {
        let mut builder = OptimizerBuilder::new(comm).mesh(mesh);
        let group = builder.group(Group {
            lr: 0.05,
            ..Group::default()
        });
        let mut ids = Vec::new();
        for (param, (tensor, own)) in into.iter().enumerate() {
            let master: Vec<f32> = normal(param, 0, rows).collect();
            let spec = ParamSpec::new(format!("{param}"), group, master[own.clone()].to_vec());
            ids.push(builder.param(*tensor, spec)?);
        }
        let own = into.iter().map(|(_, own)| own.clone()).collect();
        let optimizer = builder.build()?;
        Ok(Self {
            optimizer,
            ids,
            own,
            rows,
        })
    }

    fn step(&mut self, step: u64) -> Result<bool, OptimError> {
        for (param, (&id, own)) in self.ids.iter().zip(&self.own).enumerate() {
            let grad = grad(param, step, self.rows);
            self.optimizer.set_grad(id, &grad[own.clone()])?;
        }
        let options = StepOptions {
            max_norm: Some(20.0),
            ..StepOptions::default()
        };
        Ok(self.optimizer.step(&options)?.wait()?.applied)
    }

    fn masters(&self) -> Result<Vec<Vec<f32>>, OptimError> {
        self.ids
            .iter()
            .map(|&id| self.optimizer.master(id))
            .collect()
    }
}

fn bytes<R: Recipe>(
    param: usize,
    tensor: &QuantizedTensor<CpuBuffer<u8>, R>,
) -> Result<Bytes, ShardError> {
    let buffers = tensor.buffers().iter();
    let of =
        |b: &lowp_format::Buffer<CpuBuffer<u8>>| Ok((param, b.spec.key, Cpu.download(&b.storage)?));
    buffers.map(of).collect()
}

/// What one rank has after casting and after each step: the bytes of all weights, the masters, and whether the step was applied.
fn alone(rows: usize) -> Vec<(Bytes, Vec<Vec<f32>>, bool)> {
    let shape = Shape::new(rows, COLS);
    let tensor = |recipe| {
        QuantizedTensor::new(recipe, shape, Usage::BOTH, |_, n| {
            Ok::<_, ShardError>(Cpu.alloc::<u8>(n)?)
        })
    };
    let tensors: Vec<_> = recipes()
        .into_iter()
        .map(tensor)
        .collect::<Result<_, _>>()
        .expect("tensors");
    let into: Vec<_> = tensors.iter().map(|t| (t, 0..shape.elements())).collect();
    let comm: Arc<dyn Communicator<Cpu>> = LocalComm::solo(&Cpu).into();
    let mut rank = Rank::new(comm, Mesh::sharded(1), rows, &into).expect("an optimizer");
    let mut applied = true;
    let mut found = Vec::new();
    for step in 0..=STEPS {
        if step > 0 {
            applied = rank.step(step).expect("a step");
        }
        let all = tensors
            .iter()
            .enumerate()
            .map(|(i, t)| bytes(i, t).expect("bytes"));
        found.push((
            all.flatten().collect(),
            rank.masters().expect("masters"),
            applied,
        ));
    }
    found
}

fn check(rows: usize, mesh: Mesh) {
    let (shape, expected) = (Shape::new(rows, COLS), alone(rows));
    run_ranks(&Cpu, mesh.world(), TIMEOUT, |index, world| {
        let place = mesh.coordinates(index)?;
        let shards = world.split(place.0, place.1)?;
        let shard = |recipe| {
            let spec = ShardSpec::chunked(&recipe, shape, mesh.shard, place.1, Usage::BOTH)?;
            let shard = ShardedTensor::<Cpu>::new(&Cpu, recipe, spec)?;
            Ok(shard)
        };
        let tensors = recipes().into_iter().map(shard);
        let tensors: Vec<_> = tensors.collect::<Result<_, ShardError>>()?;
        let into: Vec<_> = tensors
            .iter()
            .map(|t| (t.local(), t.spec().elements()))
            .collect();
        let mut rank = Rank::new(world, mesh, rows, &into)?;
        let pool = GatherPool::new(&Cpu);
        let mut groups = [true, false].map(|reshard| {
            GatherGroup::new(&Cpu, Arc::clone(&shards), &pool, tensors.clone(), reshard)
        });
        for (step, (all, masters, applied)) in (0..).zip(&expected) {
            if step > 0 {
                assert_eq!(rank.step(step)?, *applied);
            }
            for (whole, (own, range)) in masters.iter().zip(rank.masters()?.iter().zip(&rank.own)) {
                assert_eq!(own[..], whole[range.clone()]);
            }
            for group in &mut groups {
                let group = group.as_mut().expect("a group");
                for phase in Phase::ALL {
                    group.unshard(phase)?;
                    for param in 0..tensors.len() {
                        let tensor = group.tensor(param)?;
                        assert!(tensor.usage().contains(phase.usage()));
                        for found in bytes(param, tensor)? {
                            assert!(all.contains(&found), "{mesh:?} {rows} {step} {found:?}");
                        }
                    }
                }
                group.reshard();
            }
        }
        Ok::<_, OptimError>(())
    })
    .expect("ranks");
}

#[test]
fn steps_are_those_of_one_rank() {
    for (world, rows) in (1..=9).zip([40, 40, 100, 33, 130, 5, 160, 41, 17]) {
        check(rows, Mesh::sharded(world));
    }
}

#[test]
fn replicas_step_as_one_rank() {
    check(
        40,
        Mesh {
            replicate: 2,
            shard: 3,
        },
    );
}

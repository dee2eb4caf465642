//! Steps of the optimizer and gathers on GPUs give the bytes of one CPU rank: every recipe, uneven and empty shards, every mesh, both
//! policies. Each test needs two GPUs and NCCL (see ranks.rs).
#![cfg(feature = "cuda")]

mod common;

use std::time::Duration;

use common::{Rank, values, world};
use lowp_format::{AnyRecipe, BufferKey, Phase, Shape};
use lowp_kernels::{Backend, Cpu};
use lowp_nccl::Sums;
use lowp_optim::{AdamW, AdamWBuilder, Group, OptimError, ParamSpec, StepOptions, StepReport};
use lowp_shard::{
    Communicator, GatherGroup, GatherPool, LocalComm, Mesh, MeshComm, ShardError, ShardSpec,
    ShardedTensor,
};
use std::sync::Arc;

const LIMIT: Duration = Duration::from_secs(60);
const STEPS: u64 = 4;

/// Even and uneven rows of any world, and fewer than every rank gets some of.
const SHAPES: [Shape; 4] = [
    Shape::new(256, 192),
    Shape::new(192, 64),
    Shape::new(32, 320),
    Shape::new(224, 32),
];

/// The gathered buffers of every parameter, by phase.
type Gathered = Vec<Vec<(BufferKey, Vec<u8>)>>;

/// What a rank has at the end: gathered weights of both phases, reports of the steps, and the count of steps.
#[derive(Debug, PartialEq)]
struct Seen {
    forward: Gathered,
    backward: Gathered,
    reports: Vec<String>,
}

fn run<B: Backend>(
    backend: &B,
    world: &Arc<dyn Communicator<B>>,
    mesh: Mesh,
    reshard: bool,
) -> Result<Seen, OptimError> {
    let mesh_comm = MeshComm::new(mesh, Arc::clone(world))?;
    let (_, part) = mesh.coordinates(world.rank())?;
    let mut builder = AdamWBuilder::new(Arc::clone(world)).on(backend).mesh(mesh);
    let group = builder.group(Group {
        lr: 0.05,
        ..Group::default()
    });
    let (mut shards, mut rows, mut ids) = (vec![], vec![], vec![]);
    for recipe in AnyRecipe::all() {
        for shape in SHAPES {
            let spec = ShardSpec::new(&recipe, shape, mesh.shard, part)?;
            let number = shards.len() as u64;
            let master = values(number, shape.elements())[spec.elements()].to_vec();
            rows.push((spec.elements(), shape));
            let shard = ShardedTensor::new(backend, recipe, spec)?;
            ids.push(builder.param(
                shard.local(),
                ParamSpec::new(format!("{number}"), group, master),
            )?);
            shards.push(shard);
        }
    }
    let mut adamw = builder.build()?;
    let pool = GatherPool::new(backend);
    let mut weights = GatherGroup::new(backend, mesh_comm.shard, &pool, shards, reshard)?;
    let mut reports = Vec::new();
    for step in 1..=STEPS {
        for (number, (id, (rows, shape))) in (0..).zip(ids.iter().zip(&rows)) {
            let mut grad = values(1000 * step + number, shape.elements());
            if step == 2 && number == 3 {
                // In the rows of one rank.
                grad[0] = f32::NAN;
            }
            adamw.set_grad(*id, &grad[rows.clone()])?;
        }
        let options = StepOptions {
            max_norm: Some(if step == 3 { 5.0 } else { 1e6 }),
            ..StepOptions::default()
        };
        reports.push(text(&step_of(&mut adamw, &options)?));
        // Between the steps, as training does.
        weights.unshard(Phase::Forward)?;
        weights.reshard();
        weights.unshard(Phase::Backward)?;
        weights.reshard();
    }
    let mut gathered = |phase| -> Result<Gathered, ShardError> {
        weights.unshard(phase)?;
        let params = 0..weights.params().len();
        let found = params.map(|param| {
            let buffers = weights.tensor(param)?.buffers().iter();
            let content = buffers.map(|b| Ok((b.spec.key, backend.download(&b.storage)?)));
            content.collect::<Result<Vec<_>, ShardError>>()
        });
        found.collect()
    };
    let (forward, backward) = (gathered(Phase::Forward)?, gathered(Phase::Backward)?);
    weights.release();
    Ok(Seen {
        forward,
        backward,
        reports,
    })
}

fn step_of<B: Backend>(
    adamw: &mut AdamW<B>,
    options: &StepOptions,
) -> Result<StepReport, OptimError> {
    adamw.step(options)?.wait()
}

/// The norm is added in another order of ranks, so its last bits may differ from those of one rank.
fn text(report: &StepReport) -> String {
    format!(
        "applied {}, steps {}, skipped {}",
        report.applied, report.steps, report.skipped
    )
}

fn alone(reshard: bool) -> Seen {
    let comm = LocalComm::solo(&Cpu).into();
    run(&Cpu, &comm, Mesh::sharded(1), reshard).expect("one CPU rank")
}

#[test]
fn cuda_nccl_steps_and_gathers_give_the_bytes_of_one_cpu_rank() {
    for reshard in [true, false] {
        let expected = alone(reshard);
        let mut replicate = 1;
        loop {
            let ranks = world(2, LIMIT, Sums::Nccl, |rank: &Rank| {
                let n = rank.comm.world_size();
                if !n.is_multiple_of(replicate) {
                    return Ok((n, None));
                }
                let mesh = Mesh {
                    replicate,
                    shard: n / replicate,
                };
                let seen = run(&rank.cuda, &rank.comm, mesh, reshard);
                let seen = seen.map_err(|error| ShardError::Failed {
                    rank: rank.comm.rank(),
                    message: error.to_string(),
                })?;
                Ok((n, Some(seen)))
            });
            let Some(&(n, _)) = ranks.first() else { return };
            for (rank, seen) in ranks.iter().enumerate() {
                let Some(seen) = &seen.1 else { continue };
                let place = format!("rank {rank}, {replicate} replicas, reshard {reshard}");
                assert_eq!(seen.reports, expected.reports, "{place}");
                for (phase, found, whole) in [
                    ("forward", &seen.forward, &expected.forward),
                    ("backward", &seen.backward, &expected.backward),
                ] {
                    for (param, (found, whole)) in found.iter().zip(whole).enumerate() {
                        assert!(found == whole, "{place}, {phase}, parameter {param}");
                    }
                }
            }
            replicate += 1;
            if replicate > n {
                break;
            }
        }
    }
}

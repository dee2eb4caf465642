//! The grid: recipes x meshes x what becomes of weights after forward x updates. Steps of the optimizer, with gradients that are reduced
//! in buckets, and gathers of both phases give every rank of every world the bytes of one CPU rank: uneven and empty shards
//! included. Products of GPUs and CPUs add in other orders, so GPUs with Muon have the bytes of one GPU.
//!
//! ```text
//! cargo test -p lowp-nccl --test all grid:: -- --nocapture
//! cargo test -p lowp-nccl --features cuda --test all grid:: -- --nocapture
//! ```
//!
//! Ranks are threads; with the feature `cuda` they are GPUs with NCCL, too, where there are two (see ranks.rs).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lowp_comm::{
    CommError, Communicator, HostComm, LocalComm, Mesh, MeshComm, run_comms, run_ranks, threads,
};
use lowp_format::{AnyRecipe, BufferKey, Phase, Philox, Recipe, ReshardAfterForward, Shape};
use lowp_gemm::Multiplies;
use lowp_kernels::{Cpu, FloatDtype, MasterDtype, Rule, Source, StateDtype};
use lowp_optim::{
    Group, MatrixCut, OptimError, OptimizerBuilder, ParamPlace, ParamSpec, StateDtypes, StepOptions,
};
use lowp_shard::{
    GatherGroup, GatherPool, GradBucketOptions, GradBuckets, GradParam, Reduction, Reshard,
    ShardError, ShardSpec, ShardedTensor,
};

#[cfg(feature = "cuda")]
use crate::common;

const LIMIT: Duration = Duration::from_secs(60);
const STEPS: u64 = 4;

/// Even and uneven rows of any world, and fewer than every rank gets some of.
const SHAPES: [Shape; 4] = [
    Shape::new(256, 192),
    Shape::new(192, 64),
    Shape::new(32, 320),
    Shape::new(224, 32),
];

/// How masters are updated, and what is stored of them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Update {
    AdamW,
    /// AdamW with moments in fp8 and masters in bf16.
    Narrow,
    /// AdamW with 16 bits beside parameters in bf16; the other masters are f32.
    Remainders,
    #[cfg_attr(
        not(feature = "cuda"),
        expect(
            dead_code,
            reason = "its products take long on a CPU, where lowp-optim tests it"
        )
    )]
    Muon,
}

impl Update {
    fn rule(self) -> Rule {
        match self {
            Self::AdamW | Self::Narrow | Self::Remainders => Rule::AdamW,
            Self::Muon => Rule::Muon,
        }
    }

    fn state(self) -> StateDtypes {
        match self {
            Self::AdamW | Self::Muon => StateDtypes::default(),
            Self::Narrow => StateDtypes {
                master: MasterDtype::Bf16,
                exp_avg: StateDtype::Fp8,
                exp_avg_sq: StateDtype::Fp8,
                ..StateDtypes::default()
            },
            Self::Remainders => StateDtypes {
                master: MasterDtype::Bf16Plus16,
                ..StateDtypes::default()
            },
        }
    }
}

/// One place in the grid; the recipes are in all of them.
#[derive(Clone, Copy, Debug)]
struct Place {
    mesh: Mesh,
    reshard: ReshardAfterForward,
    grads: FloatDtype,
    update: Update,
}

impl Place {
    const ALONE: Place = Place {
        mesh: Mesh::sharded(1),
        reshard: ReshardAfterForward::Yes,
        grads: FloatDtype::F32,
        update: Update::AdamW,
    };

    /// All places of `world` ranks.
    fn all(world: usize) -> Vec<Place> {
        let mut places = Vec::new();
        for replicate in (1..=world).filter(|n| world.is_multiple_of(*n)) {
            let shard = world / replicate;
            let groups = (2..shard).filter(|n| shard.is_multiple_of(*n));
            let groups = groups.map(ReshardAfterForward::Group);
            let policies = [ReshardAfterForward::Yes, ReshardAfterForward::No];
            for reshard in policies.into_iter().chain(groups) {
                for grads in [FloatDtype::F32, FloatDtype::Bf16] {
                    let mesh = Mesh { replicate, shard };
                    places.push(Place {
                        mesh,
                        reshard,
                        grads,
                        update: Update::AdamW,
                    });
                }
            }
        }
        places
    }

    /// All meshes of `world` ranks, with another update.
    fn updated(world: usize, update: Update) -> Vec<Place> {
        let all = Self::all(world).into_iter();
        let all =
            all.filter(|p| (p.reshard, p.grads) == (ReshardAfterForward::Yes, FloatDtype::F32));
        all.map(|place| Place { update, ..place }).collect()
    }

    /// Those that CPU ranks take: each mesh and policy with one dtype of gradients, which alternates, and with both if `LOWP_EXHAUSTIVE=1`.
    fn some(world: usize) -> Vec<Place> {
        let all = Self::all(world).into_iter().enumerate();
        let taken = all.filter(|(n, _)| exhaustive() || n % 4 == 0 || n % 4 == 3);
        taken.map(|(_, place)| place).collect()
    }
}

/// Whether long tests run whole.
fn exhaustive() -> bool {
    std::env::var_os("LOWP_EXHAUSTIVE").is_some_and(|value| value == "1")
}

/// The gathered buffers of every parameter.
type Gathered = Vec<Vec<(BufferKey, Vec<u8>)>>;

/// What a rank has at the end.
#[derive(Debug, PartialEq)]
struct Seen {
    forward: Gathered,
    backward: Gathered,
    steps: Vec<String>,
}

/// `n` values of a seed. Kept: each rank of each place asks for the same, and to draw them takes longer than all else.
fn normal(seed: u64, n: usize) -> Arc<[f32]> {
    type Values = BTreeMap<(u64, usize), Arc<[f32]>>;
    static KEPT: Mutex<Values> = Mutex::new(BTreeMap::new());
    let mut kept = KEPT.lock().expect("no panic");
    let draw = || {
        let random = Philox::new(seed, 0);
        (0..n as u64).map(|i| random.normal(i)).collect()
    };
    Arc::clone(kept.entry((seed, n)).or_insert_with(draw))
}

/// A rank's part of a gradient. The parts have few bits, so that their sum is exact in every order and the same for every
/// world; in step 2 one element of one parameter is NaN on the last rank.
fn part(step: u64, number: usize, shape: Shape, [rank, world]: [usize; 2]) -> Vec<f32> {
    const UNIT: f32 = 1.0 / 16.0;
    let own = |rank: usize, i: usize| ((i + 3 * rank) % 5) as f32 * UNIT;
    let mut part: Vec<f32> = (0..shape.elements()).map(|i| own(rank, i)).collect();
    if rank == 0 {
        let total = normal(1000 * step + number as u64, shape.elements());
        for (i, (x, total)) in part.iter_mut().zip(&*total).enumerate() {
            let others: f32 = (1..world).map(|rank| own(rank, i)).sum();
            *x = (total.clamp(-4.0, 4.0) / UNIT).round() * UNIT - others;
        }
    }
    if (step, number, rank) == (2, 3, world - 1) {
        part[0] = f32::NAN;
    }
    part
}

/// What micro-batch `micro` of two has of a gradient: both add up to it, exactly.
fn micro_batch(mut gradient: Vec<f32>, micro: usize) -> Vec<f32> {
    for (i, x) in gradient.iter_mut().enumerate() {
        let second = (i % 3) as f32 / 16.0;
        *x = if micro == 0 { *x - second } else { second };
    }
    gradient
}

fn run<B: Multiplies>(
    backend: &B,
    world: &Arc<dyn Communicator<B>>,
    place: Place,
) -> Result<Seen, OptimError> {
    let comms = MeshComm::new(place.mesh, Arc::clone(world))?;
    let mut builder = OptimizerBuilder::new(Arc::clone(world))
        .on(backend)
        .mesh(place.mesh);
    if place.update.rule().is_of_matrices() {
        builder = builder.products(backend.products()?);
    }
    let group = builder.group(Group {
        lr: 0.05,
        ..Group::of(place.update.rule())
    });
    let (mut shards, mut ids, mut shapes) = (vec![], vec![], vec![]);
    for recipe in AnyRecipe::all() {
        for shape in SHAPES {
            let (ranks, rank) = (comms.shard.world_size(), comms.shard.rank());
            let spec = ShardSpec::new(&recipe, shape, ranks, rank)?;
            let master = normal(ids.len() as u64, shape.elements())[spec.elements()].to_vec();
            let cut = MatrixCut {
                full: shape,
                ranges: spec.all_elements(),
                tiles: None,
            };
            let start = spec.elements().start;
            let shard = ShardedTensor::new(backend, recipe, spec)?;
            let name = format!("{} {shape}", recipe.name());
            let param = ParamSpec {
                state: place.update.state(),
                place: ParamPlace { start, tiles: None },
                ..ParamSpec::new(name, group, master)
            };
            let id = builder.param(shard.local(), param)?;
            builder.matrix(id, cut)?;
            ids.push(id);
            shards.push(shard);
            shapes.push(shape);
        }
    }
    let mut optimizer = builder.build()?;
    let params = ids.iter().zip(&shards).map(|(&id, shard)| GradParam {
        block: None,
        name: format!("{} {}", shard.recipe().name(), shard.spec().full()),
        ranges: shard.spec().all_elements(),
        out: match optimizer.grad(id) {
            Source::F32(out) => out.clone(),
            Source::Bf16(_) => unreachable!("gradients are f32 unless another dtype is asked for"),
        },
    });
    let options = GradBucketOptions {
        bytes: 300_000,
        dtype: place.grads,
        ..GradBucketOptions::default()
    };
    let mut buckets = GradBuckets::new(backend, &comms, params.collect(), options)?;
    let pool = GatherPool::new(backend);
    let reshard = Reshard::new(place.reshard, &comms.shard)?;
    let mut weights = GatherGroup::new(backend, comms.shard, &pool, shards, reshard)?;
    let mut steps = Vec::new();
    for step in 1..=STEPS {
        for phase in Phase::ALL {
            weights.prefetch(phase)?;
            weights.unshard(phase)?;
            weights.reshard();
        }
        let first = match step % 2 {
            0 => Reduction::Scatter,
            _ => Reduction::Keep,
        };
        for (micro, reduction) in [first, Reduction::Finish].into_iter().enumerate() {
            buckets.begin(reduction)?;
            for (number, &shape) in shapes.iter().enumerate().rev() {
                let grad = part(step, number, shape, [world.rank(), world.world_size()]);
                buckets
                    .grad(number)?
                    .write(backend, 0, &micro_batch(grad, micro))?;
                buckets.push(number)?;
            }
            buckets.flush()?;
        }
        buckets.finish()?;
        ids.iter().for_each(|&id| optimizer.mark_ready(id));
        let options = StepOptions {
            max_norm: Some(if step == 3 { 5.0 } else { 1e6 }),
            ..StepOptions::default()
        };
        let report = optimizer.step(&options)?.wait()?;
        // The norm is added in another order of ranks, so its last bits may differ from those of one rank.
        let (applied, count, skipped) = (report.applied, report.steps, report.skipped);
        steps.push(format!(
            "applied {applied}, steps {count}, skipped {skipped}"
        ));
    }
    let mut gathered = |phase| -> Result<Gathered, ShardError> {
        weights.unshard(phase)?;
        let params = 0..weights.params().len();
        let found = params.map(|param| {
            let buffers = weights.tensor(param)?.buffers().iter();
            // What backward needs is a part of what forward leaves where weights are kept.
            let needed = weights.params()[param].recipe().buffers(phase.usage());
            let buffers = buffers.filter(|b| needed.iter().any(|spec| spec.key == b.spec.key));
            let content = buffers.map(|b| Ok((b.spec.key, backend.download(&b.storage)?)));
            let mut content = content.collect::<Result<Vec<_>, ShardError>>()?;
            content.sort_by_key(|(key, _)| key.to_string());
            Ok(content)
        });
        let found = found.collect();
        weights.reshard();
        found
    };
    let (forward, backward) = (gathered(Phase::Forward)?, gathered(Phase::Backward)?);
    weights.release();
    Ok(Seen {
        forward,
        backward,
        steps,
    })
}

/// What one rank has.
fn alone<B: Multiplies>(backend: &B, update: Update) -> Seen {
    let comm = LocalComm::solo(backend).into();
    let place = Place {
        update,
        ..Place::ALONE
    };
    let seen = run(backend, &comm, place).expect("one rank");
    assert!(
        seen.steps[1].starts_with("applied false"),
        "{:?}",
        seen.steps
    );
    seen
}

/// A failure as ranks hear of it.
fn of_rank(rank: usize, error: &OptimError) -> ShardError {
    let message = error.to_string();
    CommError::Failed { rank, message }.into()
}

/// Compares what the ranks of a world have with what one has.
fn check(engine: &str, place: Place, ranks: &[Seen], alone: &Seen) {
    let Place {
        mesh,
        reshard,
        grads,
        update,
    } = place;
    let what = format!(
        "{engine}, mesh {mesh}, reshard {reshard}, gradients {}, {update:?}",
        grads.name()
    );
    for (rank, seen) in ranks.iter().enumerate() {
        assert_eq!(seen.steps, alone.steps, "{what}, rank {rank}");
        for (phase, found, whole) in [
            ("forward", &seen.forward, &alone.forward),
            ("backward", &seen.backward, &alone.backward),
        ] {
            assert_eq!(found.len(), whole.len(), "{what}, rank {rank}, {phase}");
            for (param, (found, whole)) in found.iter().zip(whole).enumerate() {
                assert!(
                    found == whole,
                    "{what}, rank {rank}, {phase}, parameter {param}"
                );
            }
        }
    }
    let recipes = AnyRecipe::all().len();
    println!("{what}: {recipes} recipes x {} shapes equal", SHAPES.len());
}

#[test]
fn threads_have_the_bytes_of_one_rank() {
    let worlds = [4, 2];
    for update in [Update::AdamW, Update::Narrow, Update::Remainders] {
        let alone = alone(&Cpu, update);
        for &world in &worlds[..if exhaustive() { 2 } else { 1 }] {
            let places = match update {
                Update::AdamW => Place::some(world),
                _ => Place::updated(world, update),
            };
            for place in places {
                let ranks = run_ranks(&Cpu, world, LIMIT, |_, comm| run(&Cpu, &comm, place));
                check("threads", place, &ranks.expect("a world"), &alone);
            }
        }
    }
}

#[test]
fn ranks_by_way_of_the_host_have_the_bytes_of_one_rank() {
    // A world of one size is enough: which ranks there are is tested above.
    let world = if exhaustive() { 4 } else { 2 };
    for update in [Update::AdamW, Update::Narrow, Update::Remainders] {
        let alone = alone(&Cpu, update);
        let places = match update {
            Update::AdamW => Place::some(world),
            _ => Place::updated(world, update),
        };
        for place in places {
            let comms = threads(world, LIMIT).into_iter();
            let comms = comms.map(|control| HostComm::new(control, &Cpu)).collect();
            let ranks = run_comms(comms, |rank, comm| {
                run(&Cpu, &comm, place).map_err(|error| of_rank(rank, &error))
            });
            let ranks = ranks.expect("a world");
            check("by way of the host", place, &ranks, &alone);
        }
    }
}

#[cfg(feature = "cuda")]
#[test]
fn cuda_nccl_ranks_have_the_bytes_of_one_cpu_rank() {
    use lowp_kernels::Cuda;
    use lowp_nccl::Sums;

    let count = Cuda::count().expect("a driver that works");
    // A place of one rank is in a world of its own.
    let mut worlds = vec![1, count];
    worlds.dedup();
    let updates = [
        Update::AdamW,
        Update::Narrow,
        Update::Remainders,
        Update::Muon,
    ];
    for update in updates {
        let alone = match update {
            Update::Muon if count == 0 => return,
            Update::Muon => alone(&Cuda::new(0).expect("a GPU"), update),
            _ => alone(&Cpu, update),
        };
        let places = worlds.iter().flat_map(|&world| match update {
            Update::AdamW => Place::all(world),
            _ => Place::updated(world, update),
        });
        for (number, place) in places.enumerate() {
            let sums = [Sums::Peers, Sums::Nccl][number % 2];
            let ranks = common::first(place.mesh.world(), LIMIT, sums, |rank| {
                let seen = run(&rank.cuda, &rank.comm, place);
                seen.map_err(|error| of_rank(rank.comm.rank(), &error))
            });
            if ranks.is_empty() {
                // Said why there.
                return;
            }
            check("NCCL", place, &ranks, &alone);
        }
    }
}

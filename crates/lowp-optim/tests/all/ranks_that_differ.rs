//! Where collectives are only enqueued no rank sees at the call that the others send or gather something else of the same length: the
//! next step is applied where all did the same, and nowhere else.

use std::sync::Arc;
use std::time::Duration;

use lowp_comm::{
    Collective, CommError, Communicator, Control, LocalComm, Mesh, MeshComm, Traffic, run_comms,
};
use lowp_format::{AnyRecipe, Phase, Shape};
use lowp_kernels::{Cpu, Source};
use lowp_optim::{Group, OptimError, Optimizer, OptimizerBuilder, ParamId, ParamSpec, StepOptions};
use lowp_shard::{
    GatherGroup, GatherPool, GradBucketOptions, GradBuckets, GradParam, ShardSpec, ShardedTensor,
};
use proptest::prelude::*;

type Comm = Arc<dyn Communicator<Cpu>>;

/// A communicator that says that its calls are only enqueued, as those of GPUs are, and compares no labels.
#[derive(Debug)]
pub(crate) struct Enqueued(pub(crate) Comm);

impl Communicator<Cpu> for Enqueued {
    fn control(&self) -> &dyn Control {
        self.0.control()
    }

    fn backend(&self) -> &Cpu {
        self.0.backend()
    }

    fn is_enqueued(&self) -> bool {
        true
    }

    fn enqueue(&self, _label: &str, batch: Collective<'_, Cpu>) -> Result<(), CommError> {
        self.0.enqueue("", batch)
    }

    fn split(&self, color: usize, key: usize) -> Result<Comm, CommError> {
        Ok(Arc::new(Self(self.0.split(color, key)?)))
    }

    fn count(&self, sent: Traffic) {
        self.0.count(sent);
    }

    fn traffic(&self) -> Traffic {
        self.0.traffic()
    }
}

/// Weights, all of one shape: lengths tell none from another. Both phases of it have equal lengths, too.
const WEIGHTS: usize = 3;
const SHAPE: Shape = Shape::new(128, 128);

/// What a rank does before a step: gathers, and gradients that it sends.
#[derive(Clone, Debug, PartialEq)]
struct Before {
    gathers: Vec<(usize, Phase)>,
    grads: Vec<usize>,
}

impl Before {
    /// Everything in its order.
    fn usual() -> Self {
        let of = |phase| (0..WEIGHTS).map(move |weight| (weight, phase));
        Self {
            gathers: Phase::ALL.into_iter().flat_map(of).collect(),
            grads: (0..WEIGHTS).rev().collect(),
        }
    }
}

/// One rank of a model.
struct Rank {
    mesh: MeshComm<Cpu>,
    optimizer: Optimizer<Cpu>,
    ids: Vec<ParamId>,
    pool: Arc<GatherPool<Cpu>>,
    weights: Vec<GatherGroup<Cpu>>,
    buckets: GradBuckets<Cpu>,
}

impl Rank {
    fn new(mesh: Mesh, comm: Comm) -> Result<Self, OptimError> {
        let mesh = MeshComm::new(mesh, Arc::new(Enqueued(comm)))?;
        let shard = &mesh.shard;
        let recipe = AnyRecipe::low_precision()[2];
        let spec = ShardSpec::new(&recipe, SHAPE, shard.world_size(), shard.rank())?;
        let mut builder = OptimizerBuilder::new(mesh.world.clone()).mesh(mesh.mesh);
        let group = builder.group(Group::default());
        let (mut ids, mut shards) = (Vec::new(), Vec::new());
        for number in 0..WEIGHTS {
            let tensor = ShardedTensor::new(&Cpu, recipe, spec.clone())?;
            let master = spec.elements().map(|i| (i % 7 + number) as f32).collect();
            let param = ParamSpec::new(format!("w{number}"), group, master);
            ids.push(builder.param(tensor.local(), param)?);
            shards.push(tensor);
        }
        let optimizer = builder.build()?;
        let pool = GatherPool::new(&Cpu);
        // In two memories: their gathers have one order.
        let pools = [Arc::clone(&pool), pool.beside()];
        let weight =
            |(tensor, pool)| GatherGroup::new(&Cpu, shard.clone(), pool, vec![tensor], true);
        let weights = shards.into_iter().zip(pools.iter().cycle());
        let weights = weights.map(weight).collect::<Result<_, _>>()?;
        let param = |(number, &id): (usize, &ParamId)| GradParam {
            block: None,
            name: format!("w{number}"),
            ranges: spec.all_elements(),
            out: match optimizer.grad(id) {
                Source::F32(out) => out.clone(),
                Source::Bf16(_) => {
                    unreachable!("gradients are f32 unless they are said to be bf16")
                }
            },
        };
        let params = ids.iter().enumerate().map(param).collect();
        // Each by itself.
        let options = GradBucketOptions {
            bytes: 0,
            ..GradBucketOptions::default()
        };
        let buckets = GradBuckets::new(&Cpu, &mesh, params, options)?;
        Ok(Self {
            mesh,
            optimizer,
            ids,
            pool,
            weights,
            buckets,
        })
    }

    /// A step; whether it was applied.
    fn step(&mut self, before: &Before) -> Result<bool, OptimError> {
        for &(weight, phase) in &before.gathers {
            self.weights[weight].unshard(phase)?;
            self.weights[weight].release();
        }
        for &weight in &before.grads {
            let grad = self.buckets.grad(weight)?;
            grad.write(&Cpu, 0, &vec![1.0; SHAPE.elements()])?;
            self.buckets.push(weight)?;
        }
        let reduced = self.buckets.finish()?;
        self.optimizer.compare(reduced.done);
        self.optimizer
            .compare(self.pool.gathered(&*self.mesh.shard));
        self.ids
            .iter()
            .for_each(|&id| self.optimizer.mark_ready(id));
        // The calls of a step by themselves: ranks of this test cannot capture.
        self.optimizer.prepare(&StepOptions::default())?;
        self.optimizer.enqueue()?;
        Ok(self.optimizer.outcome()?.wait()?.applied)
    }

    fn masters(&self) -> Result<Vec<Vec<f32>>, OptimError> {
        self.ids
            .iter()
            .map(|&id| self.optimizer.master(id))
            .collect()
    }
}

/// What the third step of each rank comes to, which does what `before` says: whether it was applied or its error, and whether masters
/// changed. The first two are as usual.
fn third(mesh: Mesh, before: &[Before]) -> Vec<(Result<bool, String>, bool)> {
    let world = LocalComm::world(&Cpu, mesh.world(), Duration::from_secs(60));
    let done = run_comms(world, |rank, comm| -> Result<_, OptimError> {
        let mut rank_of = Rank::new(mesh, comm)?;
        for _ in 0..2 {
            assert!(rank_of.step(&Before::usual())?);
        }
        let masters = rank_of.masters()?;
        let third = rank_of
            .step(&before[rank])
            .map_err(|error| error.to_string());
        Ok((third, rank_of.masters()? != masters))
    });
    match done {
        Ok(ranks) => ranks,
        Err(failed) => panic!("{failed}"),
    }
}

/// Everything in some order.
fn some_order() -> impl Strategy<Value = Before> {
    let Before { gathers, grads } = Before::usual();
    (Just(gathers).prop_shuffle(), Just(grads).prop_shuffle())
        .prop_map(|(gathers, grads)| Before { gathers, grads })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_step_is_applied_where_all_did_the_same(
        orders in prop::collection::vec(some_order(), 4),
        picks in prop::collection::vec(0usize..4, 4),
        alike in prop::sample::select(vec!["nothing", "gathers", "gradients", "all"]),
        replicate in prop::sample::select(vec![1usize, 2]),
    ) {
        let mesh = Mesh { replicate, shard: 2 };
        let mut before: Vec<Before> = picks.iter().map(|&pick| orders[pick].clone()).collect();
        before.truncate(mesh.world());
        let first = before[0].clone();
        for other in &mut before {
            if ["gathers", "all"].contains(&alike) {
                other.gathers = first.gathers.clone();
            }
            if ["gradients", "all"].contains(&alike) {
                other.grads = first.grads.clone();
            }
        }
        let sent = before.iter().all(|other| other.grads == first.grads);
        // Replicas may gather in their own order.
        let gathered = before.chunks(2).all(|replica| replica[0].gathers == replica[1].gathers);
        for (result, changed) in third(mesh, &before) {
            prop_assert_eq!(changed, sent && gathered);
            match result {
                Ok(applied) => prop_assert!(applied && sent && gathered),
                Err(text) => {
                    let what = if sent { "the gathers of a step" } else { "the gradients of a step" };
                    prop_assert!(text.contains(what) && text.contains("ranks ["), "{}", text);
                    prop_assert!(!(sent && gathered), "{}", text);
                }
            }
        }
    }
}

/// The error names the ranks and what each of them did.
#[test]
fn the_error_names_parameters_and_groups() {
    let usual = Before::usual();
    let mut other = usual.clone();
    other.grads.swap(1, 2);
    for (result, _) in third(Mesh::sharded(2), &[usual.clone(), other]) {
        let text = result.expect_err("ranks sent different gradients");
        assert!(text.contains("ranks [0]: w2; w1; w0"), "{text}");
        assert!(text.contains("ranks [1]: w2; w0; w1"), "{text}");
    }
    let mut other = usual.clone();
    other.gathers.swap(0, 1);
    for (result, _) in third(Mesh::sharded(2), &[usual, other]) {
        let text = result.expect_err("ranks gathered different weights");
        assert!(
            text.contains("ranks [0]: group 0 for forward, group 1 for forward"),
            "{text}"
        );
        assert!(
            text.contains("ranks [1]: group 1 for forward, group 0 for forward"),
            "{text}"
        );
    }
}

/// So does that of ranks that leave out different parameters, and masters stay.
#[test]
fn the_error_names_a_parameter_that_one_rank_leaves_out() {
    let mesh = Mesh::sharded(2);
    let world = LocalComm::world(&Cpu, mesh.world(), Duration::from_secs(60));
    let done = run_comms(world, |rank, comm| -> Result<_, OptimError> {
        let mut rank_of = Rank::new(mesh, comm)?;
        let masters = rank_of.masters()?;
        rank_of
            .ids
            .iter()
            .for_each(|&id| rank_of.optimizer.mark_ready(id));
        if rank == 1 {
            rank_of.optimizer.leave_out(rank_of.ids[2]);
        }
        rank_of.optimizer.prepare(&StepOptions::default())?;
        rank_of.optimizer.enqueue()?;
        let outcome = rank_of.optimizer.outcome()?.wait();
        Ok((
            outcome.map(drop).map_err(|error| error.to_string()),
            rank_of.masters()? == masters,
        ))
    });
    let ranks = done.unwrap_or_else(|failed| panic!("{failed}"));
    for (result, same) in ranks {
        let text = result.expect_err("ranks left out different parameters");
        let expected = "parameter 'w2' has a gradient on ranks [0] and none on ranks [1];";
        assert!(text.contains(expected) && same, "{text}");
    }
}

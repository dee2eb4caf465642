//! Steps over replicate x shard meshes: replicas stay equal to each other and to a run without
//! replication, bit for bit.

use lowp_comm::{GradWire, Mesh, MeshComm, ReduceItem, run_ranks};
use lowp_format::{AnyRecipe, Shape};
use lowp_kernels::{Backend, Cpu, Source};
use lowp_optim::{Group, OptimError, StepOptions};
use lowp_tests::model::{Case, Rank, State};
use lowp_tests::values::Family;
use lowp_tests::world::{Bytes, TIMEOUT};

const OPTIONS: StepOptions = StepOptions {
    lr_factor: 1.0,
    grad_scale: 0.5,
    max_norm: Some(2.0),
    skip_nonfinite: true,
};

/// 17 rows over 3 shards: uneven, and empty where the quantum is 32.
fn cases() -> Vec<Case> {
    let shape = Shape::new(17, 64);
    let values = |seed| Family::Normal.values(seed, shape.elements());
    let recipes = (0..).zip(AnyRecipe::all());
    recipes
        .map(|(seed, recipe)| Case::new(recipe, shape, values(seed)))
        .collect()
}

/// The gradient of one of six slices of the batch: integers, whose sums are exact.
fn slice(step: u64, slice: usize, case: usize) -> Vec<f32> {
    let seed = step * 1000 + slice as u64 * 50 + case as u64;
    let mut values = Family::Normal.values(seed, 17 * 64);
    values.iter_mut().for_each(|x| *x = (*x * 4.0).round());
    values
}

/// Reduces this rank's slices of the batch over the shards, then over the replicas.
fn reduce(rank: &mut Rank, mesh: &MeshComm<Cpu>, step: u64) -> Result<(), OptimError> {
    let (own, ranks) = (mesh.world.rank(), mesh.world.world_size());
    for index in 0..rank.ids.len() {
        let mut grad = vec![0.0; 17 * 64];
        for part in (own..6).step_by(ranks) {
            let values = slice(step, part, index);
            grad.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
        }
        let Source::F32(out) = rank.optimizer.grad(rank.ids[index]) else {
            panic!("an f32 gradient");
        };
        let item = ReduceItem {
            grad: &Source::F32(Cpu.upload(&grad)?),
            memory: 0,
            ranges: &rank.tensors[index].spec().all_elements(),
            out,
            accumulate: false,
        };
        mesh.shard.reduce_scatter(&[item], GradWire::F32)?;
        mesh.replicate.all_reduce_sum(out)?;
        rank.optimizer.mark_ready(rank.ids[index]);
    }
    Ok(())
}

type Seen = (State, Vec<[Bytes; 2]>);

fn train(mesh: Mesh) -> Vec<Seen> {
    let run = run_ranks(&Cpu, mesh.world(), TIMEOUT, |_, comm| {
        let mesh = MeshComm::new(mesh, comm)?;
        let mut rank = Rank::new(&cases(), &[Group::default()], &mesh.shard, &mesh.world)?;
        for step in 0..3 {
            reduce(&mut rank, &mesh, step)?;
            assert!(rank.finish(&OPTIONS)?.applied);
        }
        Ok::<_, OptimError>((rank.state()?, rank.gather(true)?))
    });
    run.unwrap_or_else(|e| panic!("{mesh}: {e}"))
}

#[test]
fn replicas_are_identical_and_equal_to_any_other_mesh() {
    let uneven = train(Mesh {
        replicate: 2,
        shard: 3,
    });
    for shard in 0..3 {
        assert!(uneven[shard] == uneven[3 + shard], "shard {shard} differs");
    }
    let sharded = train(Mesh::sharded(3));
    assert!(sharded[..] == uneven[..3], "replication changed the bits");
    for mesh in [Mesh::sharded(1), Mesh::sharded(6)] {
        let other = train(mesh);
        assert!(other[0].1 == uneven[0].1, "{mesh} gathers other bytes");
    }
    let replicated = train(Mesh {
        replicate: 6,
        shard: 1,
    });
    assert!(replicated[5].1 == uneven[0].1, "6x1 gathers other bytes");
}

/// A value that is not finite in one replica only still skips the step on all ranks.
#[test]
fn a_bad_value_in_one_replica_skips_the_step_on_all_ranks() {
    let mesh = Mesh {
        replicate: 2,
        shard: 2,
    };
    let run = run_ranks(&Cpu, mesh.world(), TIMEOUT, |number, comm| {
        let mesh = MeshComm::new(mesh, comm)?;
        let mut rank = Rank::new(&cases(), &[Group::default()], &mesh.shard, &mesh.world)?;
        let before = rank.state()?;
        let mut grads = vec![vec![1.0; 17 * 64]; rank.ids.len()];
        if number == 2 {
            // The first row is on the first shard of the second replica.
            grads[0][0] = f32::NAN;
        }
        let report = rank.step(&grads, &OPTIONS)?;
        assert!(!report.applied && report.skipped == 1);
        assert!(rank.state()? == before);
        Ok::<_, OptimError>(())
    });
    run.unwrap_or_else(|e| panic!("{e}"));
}

/// The book is shared by all ranks: what one of them observed counts in every replica.
#[test]
fn an_observation_in_one_replica_reaches_all_ranks() {
    let mesh = Mesh {
        replicate: 2,
        shard: 2,
    };
    let run = run_ranks(&Cpu, mesh.world(), TIMEOUT, |number, comm| {
        let mesh = MeshComm::new(mesh, comm)?;
        let mut rank = Rank::new(&cases(), &[Group::default()], &mesh.shard, &mesh.world)?;
        let before = rank.optimizer.scales().scales()?;
        if number == 3 {
            Cpu.write(
                rank.optimizer.scales().observed(),
                0,
                &vec![1000.0; before.len()],
            )?;
        }
        rank.step(&vec![vec![1.0; 17 * 64]; rank.ids.len()], &OPTIONS)?;
        Ok::<_, OptimError>((before, rank.optimizer.scales().scales()?))
    });
    let seen = run.unwrap_or_else(|e| panic!("{e}"));
    for (before, after) in &seen {
        assert_eq!(after, &seen[0].1);
        assert!(before.iter().zip(after).all(|(b, a)| b != a));
    }
}

#[test]
fn replicas_with_other_gradients_are_rejected() {
    let mesh = Mesh {
        replicate: 2,
        shard: 2,
    };
    let run = run_ranks(&Cpu, mesh.world(), TIMEOUT, |number, comm| {
        let mesh = MeshComm::new(mesh, comm)?;
        let mut rank = Rank::new(&cases(), &[Group::default()], &mesh.shard, &mesh.world)?;
        let grads = vec![vec![1.0 + (number / 2) as f32; 17 * 64]; rank.ids.len()];
        rank.step(&grads, &OPTIONS)
    });
    let failed = run.expect_err("replicas that would drift apart");
    assert_eq!(failed.others.iter().filter(|(_, r)| r.is_err()).count(), 3);
    assert!(failed.to_string().contains("replica"), "{failed}");
}

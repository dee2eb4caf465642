//! Ranks that would gather different things: an error on all of them, and nobody waits.

mod common;

use common::{Comm, failing};
use lowp_format::{AnyRecipe, Phase, Shape};
use lowp_kernels::Cpu;
use lowp_shard::{GatherGroup, GatherPool, ShardError, ShardSpec, ShardedTensor};

fn recipe_at(index: usize) -> AnyRecipe {
    AnyRecipe::low_precision()[index]
}

fn shard(recipe: AnyRecipe, shape: Shape, comm: &Comm) -> Result<ShardedTensor<Cpu>, ShardError> {
    let spec = ShardSpec::new(&recipe, shape, comm.world_size(), comm.rank())?;
    ShardedTensor::new(&Cpu, recipe, spec)
}

/// A rank whose rows alone were written: no rank gathers into a call of the others, none waits.
#[test]
fn ranks_that_disagree_on_what_is_stale_fail() {
    // What each rank wrote, and what it does after the first group.
    for (writes, then) in [
        ([0, 1, 0], "another gather"),
        ([1, 0, 1], "another gather"),
        ([0, 1, 0], "a stale gather"),
        ([1, 2, 1], "another gather"),
        ([0, 0, 1], "a barrier"),
    ] {
        for reshard in [true, false] {
            let failed = failing(3, |rank, comm| {
                let pool = GatherPool::new(&Cpu);
                let mut groups = Vec::new();
                for _ in 0..2 {
                    let shards = vec![shard(recipe_at(0), Shape::new(96, 32), &comm)?];
                    let comm = comm.clone();
                    groups.push(GatherGroup::new(&Cpu, comm, &pool, shards, reshard)?);
                }
                groups[0].unshard(Phase::Forward)?;
                if then == "a stale gather" {
                    groups[1].unshard(Phase::Forward)?;
                    groups[1].params()[0].begin_write();
                }
                for _ in 0..writes[rank] {
                    groups[0].params()[0].begin_write();
                }
                groups[0].unshard(Phase::Forward)?;
                if then != "a barrier" {
                    groups[1].unshard(Phase::Forward)?;
                }
                comm.control().barrier()
            });
            let what = (writes, then, reshard);
            let mismatch = matches!(failed.cause, ShardError::Mismatch { .. });
            assert!(mismatch, "{what:?}: {}", failed.cause);
            let text = failed.cause.to_string();
            assert!(text.contains("gathered tensors are stale"), "{text}");
            assert!(failed.others.iter().all(|(_, r)| r.is_err()), "{what:?}");
        }
    }
}

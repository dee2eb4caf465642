//! What is dropped is given back: however many groups come and go, a pool has the memory of those that are there.

use std::sync::Arc;

use crate::common::{Comm, ranks};
use lowp_format::{AnyRecipe, Phase, ReshardAfterForward, Shape};
use lowp_kernels::{Cpu, FloatDtype};
use lowp_shard::{GatherGroup, GatherPool, Reshard, ShardError, ShardSpec, ShardedTensor};
use proptest::prelude::*;

/// A group of one matrix of `rows`, which was gathered for both phases.
fn used(
    comm: &Comm,
    pool: &Arc<GatherPool<Cpu>>,
    rows: usize,
    reshard: &Reshard<Cpu>,
) -> Result<GatherGroup<Cpu>, ShardError> {
    let (recipe, shape) = (AnyRecipe::low_precision()[0], Shape::new(rows, 32));
    let spec = ShardSpec::new(&recipe, shape, comm.world_size(), comm.rank())?;
    let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
    let mut group = GatherGroup::new(&Cpu, comm.clone(), pool, vec![shard], reshard.clone())?;
    for phase in Phase::ALL {
        group.unshard(phase)?;
        group.reshard();
    }
    Ok(group)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Groups of many shapes, of which each goes when `keep` others were made after it.
    #[test]
    fn a_pool_has_the_memory_of_the_groups_that_are_there(
        shapes in prop::collection::vec(1usize..5, 1..12),
        keep in 0usize..3,
        policy in prop::sample::select(vec![
            ReshardAfterForward::Yes,
            ReshardAfterForward::No,
            ReshardAfterForward::Group(2),
        ]),
    ) {
        ranks(4, |_, comm| {
            let reshard = Reshard::new(policy, &comm)?;
            // What a pool of its own has for the groups of these shapes.
            let fresh = |shapes: &[usize]| {
                let pool = GatherPool::new(&Cpu);
                let make = |&n: &usize| used(&comm, &pool, 128 * n, &reshard);
                let groups = shapes.iter().map(make).collect::<Result<Vec<_>, _>>()?;
                Ok::<_, ShardError>((pool.resident_bytes(), groups))
            };
            let pool = GatherPool::new(&Cpu);
            let (mut groups, mut most) = (Vec::new(), 0);
            for at in 0..shapes.len() {
                groups.push(used(&comm, &pool, 128 * shapes[at], &reshard)?);
                most = most.max(pool.resident_bytes());
                if groups.len() > keep {
                    groups.remove(0);
                }
                let first = at + 1 - groups.len();
                assert_eq!(pool.resident_bytes(), fresh(&shapes[first..=at])?.0);
            }
            groups.clear();
            assert_eq!(pool.resident_bytes(), 0);
            assert_eq!(pool.peak_bytes(), most);
            Ok(())
        });
    }
}

/// Scratch of many lengths.
#[test]
fn scratch_goes_with_the_last_who_has_its_length() {
    let pool = GatherPool::new(&Cpu);
    for len in 1..100 {
        let scratches = pool.scratches(FloatDtype::F32, len);
        let [first, second] = [scratches.lend(), scratches.lend()].map(|lent| lent.expect("room"));
        assert_eq!(pool.resident_bytes(), 8 * len);
        drop(first);
        assert_eq!(pool.resident_bytes(), 8 * len, "it is lent again");
        drop(scratches);
        // The last borrower outlives the handle.
        assert_eq!(second.values().len(&Cpu), len);
        drop(second);
        assert_eq!(pool.resident_bytes(), 0);
    }
}

//! The gather engine: shard-then-quantize-then-gather equals quantize, bit for bit, for every
//! recipe, world size, row count, phase and policy; what it sends, allocates and rejects.

use std::ops::Range;
use std::sync::Arc;

use crate::common::{self, Comm, failing, ranks, values, variants};
use lowp_comm::{CommError, LARGE_PIECE, LocalComm};
use lowp_format::{
    AnyRecipe, Origin, Phase, QuantizedTensor, Recipe, ReshardAfterForward, RowCuts, Shape, Usage,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer, FloatDtype, Source};
use lowp_shard::{
    CastItem, CastPlan, GatherGroup, GatherPool, Reshard, ScaleBookBuilder, Scratches, ShardError,
    ShardSpec, ShardedTensor, quantize,
};
use proptest::prelude::*;

type Full = QuantizedTensor<CpuBuffer<u8>>;

fn whole(recipe: AnyRecipe, shape: Shape, seed: u64) -> Result<Full, ShardError> {
    let source = Source::F32(Cpu.upload(&values(seed, shape.elements()))?);
    quantize(&Cpu, recipe, shape, Usage::BOTH, source, None)
}

/// Quantizes the rows of `tensors`, each with its own seed.
fn fill(tensors: &[ShardedTensor<Cpu>], seeds: &[u64], comm: &Comm) -> Result<(), ShardError> {
    let mut book = ScaleBookBuilder::default();
    let mut items = Vec::new();
    for (tensor, &seed) in tensors.iter().zip(seeds) {
        let all = values(seed, tensor.spec().full().elements());
        let own = Source::F32(Cpu.upload(&all[tensor.spec().elements()])?);
        items.push(CastItem::rows(tensor.local(), own, &mut book));
    }
    let book = book.build(&Cpu)?;
    CastPlan::new(&Cpu, &book, &items)?.calibrate(&book, &**comm)
}

fn shard(recipe: AnyRecipe, shape: Shape, comm: &Comm) -> Result<ShardedTensor<Cpu>, ShardError> {
    let spec = ShardSpec::new(&recipe, shape, comm.world_size(), comm.rank())?;
    ShardedTensor::new(&Cpu, recipe, spec)
}

/// Every buffer of `got` is that of `whole`, and the phase has all it needs.
fn check(got: &Full, whole: &Full, phase: Phase) -> Result<(), ShardError> {
    assert!(got.usage().contains(phase.usage()));
    for spec in got.recipe().buffers(phase.usage()) {
        got.buffer(spec.key)?;
    }
    for buffer in got.buffers() {
        let expected = Cpu.download(&whole.buffer(buffer.spec.key)?.storage)?;
        let what = (got.recipe().name(), got.shape(), buffer.spec.key, phase);
        assert_eq!(Cpu.download(&buffer.storage)?, expected, "{what:?}");
    }
    Ok(())
}

/// Two steps of forward and backward over `params`, with new values in the second one. With prefetches also where forward runs again before backward.
fn round_trip(params: &[(AnyRecipe, Shape)], world: usize, policy: ReshardAfterForward) {
    for ahead in [[false, false], [true, false], [true, true]] {
        round_trips(params, world, policy, (ahead, LARGE_PIECE));
    }
}

/// Every policy of `world` ranks.
fn policies(world: usize) -> impl Iterator<Item = ReshardAfterForward> {
    let sizes = (2..world).filter(move |n| world.is_multiple_of(*n));
    let groups = sizes.map(ReshardAfterForward::Group);
    [ReshardAfterForward::Yes, ReshardAfterForward::No]
        .into_iter()
        .chain(groups)
}

fn round_trips(
    params: &[(AnyRecipe, Shape)],
    world: usize,
    policy: ReshardAfterForward,
    ([prefetch, again], large): ([bool; 2], usize),
) {
    let seeds =
        |step: u64| -> Vec<u64> { (0..params.len() as u64).map(|i| 50 * step + i).collect() };
    let wholes: Vec<Vec<Full>> = (0..2)
        .map(|step| {
            let pairs = params.iter().zip(seeds(step));
            let tensors = pairs.map(|(&(recipe, shape), seed)| whole(recipe, shape, seed));
            tensors
                .collect::<Result<_, _>>()
                .expect("a quantized tensor")
        })
        .collect();
    let accounts = ranks(world, |_, comm| {
        let shards = params
            .iter()
            .map(|&(recipe, shape)| shard(recipe, shape, &comm));
        let shards = shards.collect::<Result<Vec<_>, _>>()?;
        let pool = GatherPool::with_large(&Cpu, large);
        let reshard = Reshard::new(policy, &comm)?;
        let mut group = GatherGroup::new(&Cpu, comm.clone(), &pool, shards.clone(), reshard)?;
        let mut allocations = 0;
        for step in 0..2 {
            fill(&shards, &seeds(step), &comm)?;
            let first = if again { 0 } else { 1 };
            for pass in [&Phase::ALL[..1], &Phase::ALL[first..]] {
                for &phase in pass.iter().filter(|_| prefetch) {
                    group.prefetch(phase)?;
                }
                for &phase in pass {
                    for _ in 0..2 {
                        group.unshard(phase)?;
                        // What is ready or in use is left alone.
                        group.prefetch(phase)?;
                        for (param, whole) in wholes[step as usize].iter().enumerate() {
                            check(group.tensor(param)?, whole, phase)?;
                        }
                    }
                    group.reshard();
                    let keeps = match policy {
                        ReshardAfterForward::Yes => pass.len() > 1,
                        ReshardAfterForward::No => true,
                        ReshardAfterForward::Group(_) => false,
                    };
                    assert_eq!(group.held().is_some(), keeps && phase == Phase::Forward);
                }
            }
            if step == 0 {
                allocations = pool.allocations();
            }
        }
        assert_eq!((pool.allocations(), pool.sets()), (allocations, 1));
        Ok(group.account())
    });
    if !again {
        let counted: u64 = accounts.iter().map(|a| a.counted_sent_bytes).sum();
        assert_eq!(counted, 2 * accounts[0].wire_bytes() as u64);
    }
    for account in &accounts {
        let sent = match again {
            true => account.recompute_sent_bytes(),
            false => account.sent_bytes(),
        };
        assert_eq!(account.counted_sent_bytes, 2 * sent as u64);
    }
    let replicated = |s: &lowp_format::BufferSpec| s.origin == Origin::Replicated;
    let resident: usize = accounts.iter().map(|a| a.shard_bytes()).sum();
    let stored = |&(recipe, shape): &(AnyRecipe, Shape)| -> usize {
        let specs = recipe.stored(Usage::BOTH);
        let copies = |s| if replicated(s) { world } else { 1 };
        specs.iter().map(|s| copies(s) * s.bytes(shape)).sum()
    };
    assert_eq!(resident, params.iter().map(stored).sum::<usize>());
}

#[test]
fn every_recipe_row_count_and_world() {
    let all = std::env::var_os("LOWP_EXHAUSTIVE").is_some_and(|value| value == "1");
    let worlds: Vec<usize> = match all {
        true => (1..=9).collect(),
        false => vec![1, 2, 3, 4, 9],
    };
    for recipe in AnyRecipe::all() {
        for rows in [0, 1, 17, 136] {
            for &world in &worlds {
                let shape = Shape::new(rows, 32);
                for policy in policies(world) {
                    round_trip(&[(recipe, shape)], world, policy);
                }
            }
        }
    }
}

/// Every option of every recipe, with fewer blocks than ranks: the last have no rows, and still agree on the amaxes of
/// columns.
#[test]
fn every_option_on_ranks_with_and_without_rows() {
    for recipe in variants() {
        for (rows, world) in [(17, 3), (136, 4), (300, 2)] {
            let shape = Shape::new(rows, 64);
            for policy in policies(world) {
                round_trips(&[(recipe, shape)], world, policy, ([false; 2], LARGE_PIECE));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn mixed_groups_of_any_shape(
        params in prop::collection::vec((0usize..variants().len(), 0usize..300, 1usize..4), 0..5),
        world in 1usize..=9,
        policy in any::<prop::sample::Index>(),
        ahead in prop::sample::select(vec![[false, false], [true, false], [true, true]]),
        // All pieces straight to where they belong, some, or none.
        large in prop::sample::select(vec![1, 64, 1000, LARGE_PIECE]),
    ) {
        let policies: Vec<_> = policies(world).collect();
        let policy = policies[policy.index(policies.len())];
        let recipes = variants();
        let recipe = |i: usize| recipes[i];
        let params: Vec<_> =
            params.iter().map(|&(r, m, k)| (recipe(r), Shape::new(m, 32 * k))).collect();
        round_trips(&params, world, policy, (ahead, large));
    }

    #[test]
    fn cuts_at_the_quantum_need_not_be_even(
        index in 0usize..variants().len(),
        blocks in prop::collection::vec(0usize..5, 1..6),
        tail in 0usize..20,
    ) {
        let recipe = variants()[index];
        let quantum = recipe.row_quantum(Usage::BOTH);
        let mut lens: Vec<usize> = blocks.iter().map(|b| b * quantum).collect();
        *lens.last_mut().expect("at least one rank") += tail;
        let ranges: Vec<Range<usize>> = common::tiling(&lens);
        let shape = Shape::new(lens.iter().sum(), 64);
        let expected = whole(recipe, shape, 3).expect("a quantized tensor");
        ranks(lens.len(), |rank, comm| {
            let cuts = RowCuts::from_ranges(&ranges)?;
            let spec = ShardSpec::from_cuts(&recipe, shape, cuts, rank, Usage::BOTH)?;
            assert_eq!((spec.rows(), spec.all_elements().len()), (ranges[rank].clone(), lens.len()));
            let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
            fill(std::slice::from_ref(&shard), &[3], &comm)?;
            let pool = GatherPool::new(&Cpu);
            let mut group = GatherGroup::new(&Cpu, comm, &pool, vec![shard], true)?;
            for phase in Phase::ALL {
                group.unshard(phase)?;
                check(group.tensor(0)?, &expected, phase)?;
                group.reshard();
            }
            Ok(())
        });
    }
}

fn recipe_at(index: usize) -> AnyRecipe {
    AnyRecipe::low_precision()[index]
}

#[test]
fn layers_of_equal_shape_take_turns_in_the_same_memory() {
    for reshard in [true, false] {
        ranks(2, |_, comm| {
            let pool = GatherPool::new(&Cpu);
            let mut layers = Vec::new();
            for _ in 0..3 {
                let params = vec![
                    shard(recipe_at(0), Shape::new(64, 32), &comm)?,
                    shard(recipe_at(2), Shape::new(96, 64), &comm)?,
                ];
                layers.push(GatherGroup::new(
                    &Cpu,
                    comm.clone(),
                    &pool,
                    params,
                    reshard,
                )?);
            }
            let mut first = None;
            for _ in 0..4 {
                for layer in &mut layers {
                    layer.unshard(Phase::Forward)?;
                    layer.reshard();
                }
                for layer in layers.iter_mut().rev() {
                    layer.unshard(Phase::Backward)?;
                    layer.reshard();
                }
                let now = (pool.allocations(), pool.resident_bytes());
                assert_eq!(*first.get_or_insert(now), now);
            }
            assert_eq!(pool.sets(), if reshard { 1 } else { 3 });
            // Two layers at once need two sets, and find them again.
            layers[0].unshard(Phase::Forward)?;
            layers[1].unshard(Phase::Backward)?;
            let handle = |layer: &GatherGroup<Cpu>| -> Result<CpuBuffer<u8>, ShardError> {
                Ok(layer.tensor(0)?.buffers()[0].storage.clone())
            };
            assert!(!handle(&layers[0])?.ptr_eq(&handle(&layers[1])?));
            layers.iter_mut().for_each(GatherGroup::release);
            assert_eq!(pool.sets(), if reshard { 2 } else { 3 });
            Ok(())
        });
    }
}

#[test]
fn what_all_ranks_have_is_the_shards_own_handle_and_nothing_else_is() {
    for recipe in AnyRecipe::all() {
        ranks(2, |_, comm| {
            let tensor = shard(recipe, Shape::new(64, 32), &comm)?;
            let pool = GatherPool::new(&Cpu);
            let mut group = GatherGroup::new(&Cpu, comm, &pool, vec![tensor.clone()], true)?;
            for phase in Phase::ALL {
                group.unshard(phase)?;
                for buffer in group.tensor(0)?.buffers() {
                    let own = buffer.spec.origin == Origin::Replicated;
                    let local = tensor.local().buffer(buffer.spec.key);
                    let same = local.is_ok_and(|local| local.storage.ptr_eq(&buffer.storage));
                    assert_eq!(same, own, "{} {}", recipe.name(), buffer.spec.key);
                }
                group.reshard();
            }
            Ok(())
        });
    }
}

#[test]
fn backward_first_and_release_work_under_both_policies() {
    for recipe in AnyRecipe::all() {
        let shape = Shape::new(80, 32);
        let [old, new] = [1, 2].map(|seed| whole(recipe, shape, seed).expect("quantized"));
        for reshard in [true, false] {
            ranks(3, |_, comm| {
                let shards = vec![shard(recipe, shape, &comm)?];
                fill(&shards, &[1], &comm)?;
                let pool = GatherPool::new(&Cpu);
                let mut group =
                    GatherGroup::new(&Cpu, comm.clone(), &pool, shards.clone(), reshard)?;
                group.unshard(Phase::Backward)?;
                check(group.tensor(0)?, &old, Phase::Backward)?;
                group.unshard(Phase::Forward)?;
                check(group.tensor(0)?, &old, Phase::Forward)?;
                group.release();
                fill(&shards, &[2], &comm)?;
                group.unshard(Phase::Forward)?;
                check(group.tensor(0)?, &new, Phase::Forward)?;
                group.unshard(Phase::Backward)?;
                check(group.tensor(0)?, &new, Phase::Backward)
            });
        }
    }
}

/// A group that still holds its tensors when the shards are cast again gathers again, whatever the
/// policy, and ranks without rows with it.
#[test]
fn a_cast_makes_what_is_held_stale() {
    for recipe in AnyRecipe::all() {
        let shape = Shape::new(80, 32);
        let [old, new] = [1, 2].map(|seed| whole(recipe, shape, seed).expect("quantized"));
        for (world, reshard) in [(1, true), (3, true), (3, false), (9, false)] {
            for (first, second) in [
                (Phase::Forward, Phase::Forward),
                (Phase::Forward, Phase::Backward),
                (Phase::Backward, Phase::Backward),
            ] {
                ranks(world, |_, comm| {
                    let shards = vec![shard(recipe, shape, &comm)?];
                    fill(&shards, &[1], &comm)?;
                    let pool = GatherPool::new(&Cpu);
                    let mut group =
                        GatherGroup::new(&Cpu, comm.clone(), &pool, shards.clone(), reshard)?;
                    group.unshard(first)?;
                    check(group.tensor(0)?, &old, first)?;
                    fill(&shards, &[2], &comm)?;
                    group.unshard(second)?;
                    check(group.tensor(0)?, &new, second)
                });
            }
        }
    }
}

#[test]
fn stale_tensors_are_rejected_until_they_are_gathered_again() {
    ranks(3, |_, comm| {
        let shards = vec![
            shard(recipe_at(0), Shape::new(64, 32), &comm)?,
            shard(recipe_at(2), Shape::new(1, 32), &comm)?,
        ];
        let pool = GatherPool::new(&Cpu);
        let mut group = GatherGroup::new(&Cpu, comm.clone(), &pool, shards.clone(), false)?;
        group.unshard(Phase::Forward)?;
        fill(&shards[1..], &[1], &comm)?;
        assert!(group.tensor(0).is_ok());
        assert_eq!(group.tensor(1).err(), Some(ShardError::Stale { param: 1 }));
        group.unshard(Phase::Forward)?;
        let gathers = group.account().gathers;
        assert!(group.tensor(1).is_ok());
        // Before a write by hand.
        shards[0].begin_write();
        assert_eq!(group.tensor(0).err(), Some(ShardError::Stale { param: 0 }));
        group.unshard(Phase::Forward)?;
        group.unshard(Phase::Forward)?;
        assert_eq!(group.account().gathers, gathers + 1);
        Ok(())
    });
}

#[test]
fn one_usage_is_enough_for_one_phase() {
    for recipe in AnyRecipe::all() {
        let shape = Shape::new(33, 32);
        let expected = whole(recipe, shape, 0).expect("quantized");
        for (phase, other) in [
            (Phase::Forward, Phase::Backward),
            (Phase::Backward, Phase::Forward),
        ] {
            let failed = failing(2, |rank, comm| {
                let spec = ShardSpec::for_usage(&recipe, shape, 2, rank, phase.usage())?;
                let tensor = ShardedTensor::new(&Cpu, recipe, spec)?;
                fill(std::slice::from_ref(&tensor), &[0], &comm)?;
                let pool = GatherPool::new(&Cpu);
                let mut group = GatherGroup::new(&Cpu, comm, &pool, vec![tensor], true)?;
                group.unshard(phase)?;
                check(group.tensor(0)?, &expected, phase)?;
                group.unshard(other)
            });
            let missing = matches!(failed.cause, ShardError::MissingPhase { param: 0, .. });
            assert!(missing, "{}", failed.cause);
        }
    }
}

#[test]
fn tensors_are_there_only_while_gathered() {
    ranks(1, |_, comm| {
        let pool = GatherPool::new(&Cpu);
        let tensor = shard(recipe_at(0), Shape::new(4, 32), &comm)?;
        let mut group = GatherGroup::new(&Cpu, comm, &pool, vec![tensor], true)?;
        assert_eq!(
            group.tensor(0).err(),
            Some(ShardError::NotGathered { param: 0 })
        );
        group.unshard(Phase::Forward)?;
        assert_eq!(
            group.tensor(1).err(),
            Some(ShardError::NoSuchParam { param: 1, len: 1 })
        );
        assert!(group.tensor(0).is_ok());
        group.reshard();
        assert_eq!(
            group.tensor(0).err(),
            Some(ShardError::NotGathered { param: 0 })
        );
        Ok(())
    });
}

#[test]
fn ranks_that_plan_differently_fail_on_every_rank() {
    let group = |recipe: AnyRecipe, shape: Shape, (reshard, large): (bool, usize), comm: &Comm| {
        let tensor = shard(recipe, shape, comm)?;
        let pool = GatherPool::with_large(&Cpu, large);
        GatherGroup::new(&Cpu, comm.clone(), &pool, vec![tensor], reshard)
    };
    for differ in ["recipe", "shape", "policy", "large"] {
        let failed = failing(3, |rank, comm| {
            let differs = rank == 1;
            let recipe = recipe_at(usize::from(differs && differ == "recipe"));
            let shape = Shape::new(64, if differs && differ == "shape" { 64 } else { 32 });
            let reshard = !(differs && differ == "policy");
            let large = if differs && differ == "large" { 64 } else { 32 };
            group(recipe, shape, (reshard, large), &comm).map(drop)
        });
        assert_eq!(failed.others.len(), 2);
        assert!(
            matches!(failed.cause, ShardError::Comm(CommError::Mismatch { .. })),
            "{differ}: {}",
            failed.cause
        );
        for (_, result) in failed.others {
            assert_eq!(result, Err(failed.cause.clone()));
        }
    }
}

#[test]
fn shards_of_another_world_are_rejected() {
    let failed = failing(2, |rank, comm| {
        let spec = ShardSpec::new(&recipe_at(0), Shape::new(64, 32), 3, rank)?;
        let tensor = ShardedTensor::new(&Cpu, recipe_at(0), spec)?;
        GatherGroup::new(&Cpu, comm, &GatherPool::new(&Cpu), vec![tensor], true).map(drop)
    });
    assert!(matches!(
        failed.cause,
        ShardError::Comm(CommError::World {
            found: 3,
            world: 2,
            ..
        })
    ));
}

#[test]
fn cuts_off_the_quantum_or_of_other_rows_are_rejected() {
    let full = Shape::new(256, 32);
    for recipe in AnyRecipe::all() {
        let quantum = recipe.row_quantum(Usage::BOTH);
        let cuts = RowCuts::from_ranges(&[0..quantum + 1, quantum + 1..256]).expect("a tiling");
        let spec = ShardSpec::from_cuts(&recipe, full, cuts, 0, Usage::BOTH);
        assert_eq!(spec.is_err(), quantum > 1, "{}", recipe.name());
        let cuts = RowCuts::new(257, 2, 1).expect("cuts");
        let spec = ShardSpec::from_cuts(&recipe, full, cuts, 0, Usage::BOTH);
        assert_eq!(spec.err(), Some(ShardError::CutRows { cut: 257, full }));
        let spec = ShardSpec::new(&recipe, full, 2, 2);
        assert_eq!(
            spec.err(),
            Some(CommError::NoSuchRank { rank: 2, world: 2 }.into())
        );
    }
}

#[test]
fn scratch_is_lent_again() {
    let pool = GatherPool::new(&Cpu);
    let [twelve, eight] = [12, 8].map(|len| pool.scratches(FloatDtype::F32, len));
    let id = |of: &Arc<Scratches<Cpu>>| of.lend().expect("room").id();
    let first = id(&twelve);
    assert_eq!(id(&twelve), first, "given back, lent again");
    let again = pool.scratches(FloatDtype::F32, 12);
    assert_eq!(id(&again), first, "to who asks for as many");
    assert_ne!(id(&eight), first, "another length");
    let held = twelve.lend().expect("room");
    let other = twelve.lend().expect("room");
    assert_ne!(held.id(), other.id(), "two users at once");
    assert_eq!(other.values().len(&Cpu), 12);
    assert_eq!(
        (pool.allocations(), pool.resident_bytes()),
        (3, 4 * (12 + 8 + 12))
    );
    let narrow = pool.scratches(FloatDtype::Bf16, 12);
    assert_ne!(id(&narrow), first, "another dtype");
    assert_eq!(pool.resident_bytes(), 4 * (12 + 8 + 12) + 2 * 12);
}

/// A prefetched gather that is never used, or whose shards are cast again, does no harm.
#[test]
fn prefetched_tensors_may_be_given_up_or_grow_old() {
    let shape = Shape::new(96, 64);
    for recipe in AnyRecipe::all() {
        let wholes: Vec<Full> = (0..3)
            .map(|seed| whole(recipe, shape, seed).expect("a quantized tensor"))
            .collect();
        ranks(3, |_, comm| {
            let shards = vec![shard(recipe, shape, &comm)?];
            let pool = GatherPool::new(&Cpu);
            let mut group = GatherGroup::new(&Cpu, comm.clone(), &pool, shards.clone(), true)?;
            fill(&shards, &[0], &comm)?;
            group.prefetch(Phase::Forward)?;
            assert!(matches!(
                group.tensor(0),
                Err(ShardError::NotGathered { .. })
            ));
            group.release();
            group.prefetch(Phase::Forward)?;
            fill(&shards, &[1], &comm)?;
            group.unshard(Phase::Forward)?;
            check(group.tensor(0)?, &wholes[1], Phase::Forward)?;
            group.reshard();
            // The other phase than the one that was started.
            group.prefetch(Phase::Forward)?;
            group.unshard(Phase::Backward)?;
            check(group.tensor(0)?, &wholes[1], Phase::Backward)?;
            group.reshard();
            fill(&shards, &[2], &comm)?;
            group.unshard(Phase::Backward)?;
            check(group.tensor(0)?, &wholes[2], Phase::Backward)?;
            group.reshard();
            assert_eq!(group.held(), None);
            assert_eq!(pool.sets(), 1);
            Ok(())
        });
    }
}

/// The only rank of a world repeats its gathers as graphs, and counts them all the same.
#[test]
fn gathers_that_are_graphs_count_every_time() {
    let shape = Shape::new(64, 96);
    for recipe in AnyRecipe::all() {
        let comm: Comm = LocalComm::solo(&Cpu).into();
        let pool = GatherPool::new(&Cpu);
        let shards = vec![shard(recipe, shape, &comm).expect("a shard")];
        let made = GatherGroup::new(&Cpu, comm.clone(), &pool, shards.clone(), true);
        let mut group = made.expect("a group");
        for step in 1..=5 {
            fill(&shards, &[step], &comm).expect("a cast");
            let full = whole(recipe, shape, step).expect("a quantized tensor");
            let before = comm.traffic().all_gather_bytes;
            for phase in Phase::ALL {
                group.unshard(phase).expect("a gather");
                check(group.tensor(0).expect("gathered"), &full, phase).expect("the bytes");
                group.reshard();
            }
            let account = group.account();
            let sent = account.sent_bytes() as u64;
            assert_eq!(comm.traffic().all_gather_bytes - before, sent);
            assert_eq!(account.counted_sent_bytes, step * sent);
        }
    }
}

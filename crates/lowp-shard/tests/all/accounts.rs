//! What is counted and numbered: the bytes of gathered tensors, the entries of a scale book, casts
//! since a gather.

use std::sync::{Arc, Barrier, Mutex};

use crate::common::{self, Comm, failing, ranks};
use lowp_comm::{Communicator, GradWire, LocalComm, ReduceItem};
use lowp_format::{AnyRecipe, GatherStep, Origin, Phase, PieceLayout, Recipe, Shape, Usage};
use lowp_kernels::{Backend, Cpu, Source};
use lowp_shard::{
    Exchange, GatherGroup, GatherPoint, GatherPool, GatherWatch, ScaleBookBuilder, ScaleSlot,
    ShardError, ShardSpec, ShardedTensor,
};

fn shard(recipe: AnyRecipe, comm: &Comm) -> Result<ShardedTensor<Cpu>, ShardError> {
    let shape = Shape::new(96, 64);
    let spec = ShardSpec::new(&recipe, shape, comm.world_size(), comm.rank())?;
    ShardedTensor::new(&Cpu, recipe, spec)
}

fn group(recipe: AnyRecipe, comm: &Comm, reshard: bool) -> Result<GatherGroup<Cpu>, ShardError> {
    let pool = GatherPool::new(&Cpu);
    let shards = vec![shard(recipe, comm)?];
    GatherGroup::new(&Cpu, comm.clone(), &pool, shards, reshard)
}

/// What all ranks have is the shard's own and takes no memory of the pool.
#[test]
fn gathered_bytes_are_those_of_the_larger_phase_without_what_all_ranks_have() {
    for recipe in AnyRecipe::all() {
        for reshard in [true, false] {
            ranks(2, |_, comm| {
                let mut group = group(recipe, &comm, reshard)?;
                let account = group.account();
                let mut largest = 0;
                for phase in Phase::ALL {
                    let plan = group.plan(0, phase).expect("both usages");
                    let kept = plan.kept().filter(|s| s.origin != Origin::Replicated);
                    let kept: usize = kept.map(|s| s.bytes(plan.full)).sum();
                    group.unshard(phase)?;
                    let held = group.tensor(0)?.buffers().iter();
                    let pooled = held.filter(|b| b.spec.origin != Origin::Replicated);
                    let bytes: usize = pooled.map(|b| Cpu.len(&b.storage)).sum();
                    assert!(bytes >= kept, "{} {phase:?}", recipe.name());
                    largest = largest.max(kept);
                }
                assert_eq!(account.gathered_bytes(), largest, "{}", recipe.name());
                Ok(())
            });
        }
    }
}

#[test]
fn entries_of_a_book_are_numbered_in_order() {
    let mut book = ScaleBookBuilder::default();
    let mut slots: Vec<ScaleSlot> = Vec::new();
    for recipe in [AnyRecipe::all(), AnyRecipe::all()].concat() {
        let registered = book.register(&recipe, Shape::new(64, 32), Usage::BOTH);
        let mut new: Vec<ScaleSlot> = registered.into_iter().flatten().collect();
        new.dedup();
        slots.extend(new);
    }
    for block in [[1, 32], [16, 16], [32, 1]] {
        assert_eq!(
            book.reserve_blocks(Shape::new(64, 64), block).block(),
            block
        );
    }
    let book = book.build(&Cpu).unwrap();
    assert!(slots.len() > 10, "{} entries", slots.len());
    assert_eq!(book.slots().collect::<Vec<_>>(), slots);
    // Every entry has a place of its own, and those of tensors come first, in the order of the entries.
    let index = |slot: &ScaleSlot| book.index(*slot).expect("an entry");
    let mut places: Vec<usize> = slots.iter().map(index).collect();
    let tensors = book.scales().unwrap().len();
    let of_tensors = places.iter().copied().filter(|&place| place < tensors);
    assert_eq!(
        of_tensors.collect::<Vec<_>>(),
        (0..tensors).collect::<Vec<_>>()
    );
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), slots.len());
    assert!(
        0 < tensors && tensors < slots.len(),
        "{tensors} of {}",
        slots.len()
    );
}

/// What two ranks say whose group number `stale[rank]` was written `casts[rank]` times since its
/// gather, and five times before.
fn stale_message(stale: [usize; 2], casts: [usize; 2]) -> String {
    let failed = failing(2, |rank, comm| {
        let pool = GatherPool::new(&Cpu);
        let mut groups = Vec::new();
        for _ in 0..3 {
            let shards = vec![shard(AnyRecipe::all()[0], &comm)?];
            groups.push(GatherGroup::new(&Cpu, comm.clone(), &pool, shards, true)?);
        }
        for group in &mut groups {
            (0..5).for_each(|_| group.params()[0].begin_write());
            group.unshard(Phase::Forward)?;
        }
        let group: &mut GatherGroup<Cpu> = &mut groups[stale[rank]];
        (0..casts[rank]).for_each(|_| group.params()[0].begin_write());
        group.unshard(Phase::Forward)
    });
    failed.cause.to_string()
}

#[test]
fn ranks_with_different_casts_since_the_gather_name_them() {
    let text = stale_message([1, 1], [1, 3]);
    for casts in [1, 3] {
        let expected = format!("casts since the gather, by parameter: [{casts}]");
        assert!(text.contains(&expected), "{text}");
    }
}

/// Groups of a pool have numbers, which distinguish equal ones.
#[test]
fn ranks_with_different_stale_groups_name_them() {
    for stale in [[0, 1], [2, 1]] {
        let text = stale_message(stale, [1, 1]);
        for group in stale {
            assert!(text.contains(&format!("group {group}: casts")), "{text}");
        }
    }
}

/// A group of one meets nobody, and hears of a failure elsewhere in its world all the same.
#[test]
fn a_failure_of_the_world_reaches_groups_of_one() {
    let aborted = Barrier::new(3);
    let failed = failing(3, |rank, comm| {
        let alone = comm.split(rank, 0)?;
        alone.control().barrier()?;
        comm.control().barrier()?;
        if rank == 1 {
            comm.control().abort("out of luck");
        }
        aborted.wait();
        let error = alone.control().barrier().expect_err("the world has failed");
        assert!(error.to_string().contains("out of luck"), "{error}");
        Err::<(), _>(error.into())
    });
    // A panic of an assertion above would be a failure too.
    let errors = failed
        .others
        .into_iter()
        .map(|(_, result)| result.unwrap_err());
    for error in errors.chain([failed.cause]) {
        let text = error.to_string();
        assert!(
            text.contains("out of luck") && !text.contains("panicked"),
            "{text}"
        );
    }
}

/// A world of one has nobody to wake, so it may try again.
#[test]
fn a_world_of_one_goes_on() {
    let comm = LocalComm::solo(&Cpu);
    comm.control().abort("out of luck");
    assert_eq!(comm.control().barrier(), Ok(()));
}

/// A gradient may extend past the ranges of the ranks, and must not end before them.
#[test]
fn a_gradient_covers_the_ranges_of_all_ranks() {
    let reduce = |comm: &Comm, rank: usize, len: usize| {
        let ranges = common::tiling(&[3, 4]);
        let (grad, out) = (Cpu.upload(&vec![1.0; len])?, Cpu.alloc(3 + rank)?);
        let item = ReduceItem {
            grad: &Source::F32(grad),
            memory: 0,
            ranges: &ranges,
            out: &out,
            accumulate: false,
        };
        comm.reduce_scatter(&[item], GradWire::F32)?;
        Ok::<Vec<f32>, ShardError>(Cpu.download(&out)?)
    };
    for len in [7, 8, 100] {
        let sums = ranks(2, |rank, comm| reduce(&comm, rank, len));
        assert_eq!(sums.concat(), [2.0; 7]);
    }
    let failed = failing(2, |rank, comm| reduce(&comm, rank, 6));
    let text = failed.cause.to_string();
    assert!(text.contains("the gradient"), "{text}");
}

/// A buffer for every key that is not replicated, and one for the arrival of pieces that are
/// interleaved: nothing is interleaved where one rank has all rows. Several small buffers of a phase arrive in messages instead.
#[test]
fn a_pool_has_the_buffers_of_the_plans_and_the_arrivals_of_interleaved_pieces() {
    for recipe in AnyRecipe::all() {
        // One rank; even rows; all rows on the first of three ranks.
        for (world, rows) in [(1, 64), (2, 128), (3, 16)] {
            for reshard in [true, false] {
                ranks(world, |rank, comm| {
                    let spec = ShardSpec::new(&recipe, Shape::new(rows, 64), world, rank)?;
                    let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
                    let pool = GatherPool::new(&Cpu);
                    let comm = comm.clone();
                    let mut group = GatherGroup::new(&Cpu, comm, &pool, vec![shard], reshard)?;
                    assert_eq!((pool.allocations(), pool.resident_bytes()), (0, 0));

                    let (mut keys, mut arrivals, mut bytes) = (Vec::new(), Vec::new(), 0);
                    let mut messages = 0;
                    for plan in Phase::ALL.map(|phase| group.plan(0, phase).expect("a plan")) {
                        let sent = plan.steps.iter().filter(|step| step.wire_bytes() > 0);
                        let packed = world > 1 && sent.count() > 1;
                        let exchange = Exchange::new(&[plan], world);
                        assert_eq!(exchange.message_bytes() > 0, packed);
                        messages = messages.max(exchange.message_bytes());
                        for step in &plan.steps {
                            let key = step.spec().key;
                            if matches!(step, GatherStep::Replicated { .. }) {
                                continue;
                            }
                            if !keys.contains(&key) {
                                keys.push(key);
                                bytes += step.spec().bytes(plan.full);
                            }
                            let GatherStep::Concat { layout, pieces, .. } = step else {
                                continue;
                            };
                            let parts = pieces.iter().filter(|&&len| len > 0).count();
                            let interleaved = *layout == PieceLayout::Interleave && parts > 1;
                            if interleaved && !packed && !arrivals.contains(&key) {
                                arrivals.push(key);
                                bytes += step.wire_bytes();
                            }
                        }
                    }
                    let mut buffers = (keys.len() + arrivals.len()) as u64;
                    buffers += u64::from(messages > 0);
                    bytes += messages;
                    for _ in 0..2 {
                        for phase in Phase::ALL {
                            group.unshard(phase)?;
                            let found = (pool.allocations(), pool.resident_bytes());
                            assert_eq!(found, (buffers, bytes), "{} {world}", recipe.name());
                            group.reshard();
                        }
                    }
                    Ok(())
                });
            }
        }
    }
}

/// A watch is called before and after each gather. What was sent by then is what was sent before the gather, and with it.
#[test]
fn watches_are_called_for_every_gather() {
    for recipe in AnyRecipe::low_precision() {
        ranks(2, |rank, comm| {
            let mut group = group(recipe, &comm, true)?;
            let sent = Arc::new(Mutex::new(Vec::new()));
            let (of, to) = (comm.clone(), sent.clone());
            group.watch(GatherWatch::new(move |_: &Cpu, point| {
                let bytes = of.traffic().all_gather_bytes;
                to.lock().expect("a number").push((point, bytes));
                Ok(())
            }));
            let mut expected = Vec::new();
            for phase in [Phase::Forward, Phase::Backward, Phase::Forward] {
                let before = comm.traffic().all_gather_bytes;
                group.prefetch(phase)?;
                group.unshard(phase)?;
                let after = comm.traffic().all_gather_bytes;
                expected.extend([(GatherPoint::Begin, before), (GatherPoint::End, after)]);
                group.reshard();
            }
            // The last rank may have no rows.
            assert!(expected[0].1 < expected[1].1 || rank > 0, "{recipe:?}");
            assert_eq!(*sent.lock().expect("numbers"), expected, "{recipe:?}");
            Ok(())
        });
    }
}

//! What is counted and numbered: the bytes of gathered tensors, the entries of a scale book, casts
//! since a gather.

mod common;

use std::sync::Barrier;

use common::{Comm, failing, ranks};
use lowp_format::{AnyRecipe, Part, Phase, Recipe, Shape};
use lowp_kernels::{Backend, Cpu};
use lowp_shard::{
    Communicator, GatherGroup, GatherItem, GatherPool, GradWire, LocalComm, ReduceItem,
    ScaleBookBuilder, ShardError, ShardSpec, ShardedTensor,
};

fn group(recipe: AnyRecipe, comm: &Comm, reshard: bool) -> Result<GatherGroup<Cpu>, ShardError> {
    let shape = Shape::new(96, 64);
    let spec = ShardSpec::new(&recipe, shape, comm.world_size(), comm.rank())?;
    let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
    let pool = GatherPool::new(&Cpu);
    GatherGroup::new(&Cpu, comm.clone(), &pool, vec![shard], reshard)
}

/// A tensor scale is the shard's own and takes no memory of the pool.
#[test]
fn gathered_bytes_are_those_of_the_larger_phase_without_tensor_scales() {
    for recipe in AnyRecipe::all() {
        for reshard in [true, false] {
            ranks(2, |_, comm| {
                let mut group = group(recipe, &comm, reshard)?;
                let account = group.account();
                let mut largest = 0;
                for phase in Phase::ALL {
                    let plan = group.plan(0, phase).expect("both usages");
                    let kept = plan.kept().filter(|s| s.key.part != Part::TensorScale);
                    let kept: usize = kept.map(|s| s.bytes(plan.full)).sum();
                    group.unshard(phase)?;
                    let held = group.tensor(0)?.buffers().iter();
                    let pooled = held.filter(|b| b.spec.key.part != Part::TensorScale);
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
    let observing = AnyRecipe::all().into_iter();
    let observing = observing.filter(|r| r.scale_source().observes_tensor_amax());
    let mut entries = 0;
    for recipe in observing.cycle().take(5) {
        let slot = book.register(&recipe).expect("an entry");
        assert_eq!(slot.index(), entries);
        entries += 1;
    }
    for block in [[1, 32], [16, 16], [32, 1]] {
        assert_eq!(
            book.reserve_blocks(Shape::new(64, 64), block).block(),
            block
        );
    }
    let book = book.build(&Cpu).unwrap();
    assert_eq!(book.scales().unwrap().len(), entries);
}

/// Each rank's message has its own number of casts, whatever there was before the gather.
#[test]
fn a_stale_rank_says_how_many_casts_it_made() {
    let failed = failing(2, |rank, comm| {
        let mut group = group(AnyRecipe::all()[0], &comm, true)?;
        for _ in 0..5 {
            group.params()[0].mark_written();
        }
        group.unshard(Phase::Forward)?;
        for _ in 0..=2 * rank {
            group.params()[0].mark_written();
        }
        group.unshard(Phase::Forward)
    });
    let text = failed.cause.to_string();
    assert!(text.contains("by parameter: [1]"), "{text}");
    assert!(text.contains("by parameter: [3]"), "{text}");
}

/// Of many lengths the message shows those around the first difference.
#[test]
fn a_difference_far_behind_is_shown() {
    let failed = failing(2, |rank, comm| {
        let pieces: Vec<[usize; 2]> = (0..30)
            .map(|item| {
                if item == 20 && rank == 1 {
                    [777, 4]
                } else {
                    [3, 4]
                }
            })
            .collect();
        let mut buffers = Vec::new();
        for lens in &pieces {
            let ranges = common::tiling(lens);
            buffers.push((
                Cpu.alloc(lens[rank])?,
                Cpu.alloc(lens[0] + lens[1])?,
                ranges,
            ));
        }
        let items: Vec<GatherItem<'_, Cpu>> = buffers
            .iter()
            .map(|(source, dest, ranges)| GatherItem {
                source,
                dest,
                ranges,
            })
            .collect();
        comm.all_gather(&items)
    });
    let text = failed.cause.to_string();
    assert!(text.contains(" 777,"), "{text}");
}

/// A group of one meets nobody, and hears of a failure elsewhere in its world all the same.
#[test]
fn a_failure_of_the_world_reaches_groups_of_one() {
    let aborted = Barrier::new(3);
    let failed = failing(3, |rank, comm| {
        let alone = comm.split(rank, 0)?;
        alone.barrier()?;
        comm.barrier()?;
        if rank == 1 {
            comm.abort("out of luck");
        }
        aborted.wait();
        let error = alone.barrier().expect_err("the world has failed");
        assert!(error.to_string().contains("out of luck"), "{error}");
        Err::<(), _>(error)
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
    comm.abort("out of luck");
    assert_eq!(comm.barrier(), Ok(()));
}

/// A gradient may go on behind the ranges of the ranks, and must not end before them.
#[test]
fn a_gradient_covers_the_ranges_of_all_ranks() {
    let reduce = |comm: &Comm, rank: usize, len: usize| {
        let ranges = common::tiling(&[3, 4]);
        let (grad, out) = (Cpu.upload(&vec![1.0; len])?, Cpu.alloc(3 + rank)?);
        let item = ReduceItem {
            grad: &grad,
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

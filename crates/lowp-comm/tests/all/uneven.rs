//! Runs of uneven gradients: every rank ends with the sums that it owns, whoever made them.

use std::ops::Range;

use lowp_comm::{Adder, GradWire, ReduceStaging, StagedGrad, Traffic, UnevenRun, even, spanned};
use lowp_kernels::FloatDtype;
use proptest::prelude::*;

/// Gradients of `lens`, by gradient and rank, one after the other in one memory.
fn placed(lens: &[Vec<usize>]) -> Vec<Vec<Range<usize>>> {
    let mut end = 0;
    let mut next = |&len: &usize| {
        end += len;
        end - len..end
    };
    lens.iter()
        .map(|lens| lens.iter().map(&mut next).collect())
        .collect()
}

fn lens() -> impl Strategy<Value = Vec<Vec<usize>>> {
    (1usize..9).prop_flat_map(|world| {
        let len = prop_oneof![Just(0usize), Just(5), 0usize..400];
        let lens = prop::collection::vec(prop::collection::vec(len, world), 1..5);
        // Small ones, and such that are worth a round of messages.
        (lens, prop_oneof![Just(1usize), Just(301)]).prop_map(|(lens, times)| {
            let larger = |lens: Vec<usize>| lens.into_iter().map(|len| times * len).collect();
            lens.into_iter().map(larger).collect()
        })
    })
}

proptest! {
    #[test]
    fn each_rank_gets_what_it_owns(lens in lens(), library in any::<bool>()) {
        let (world, placed) = (lens[0].len(), placed(&lens));
        let ranges: Vec<&[Range<usize>]> = placed.iter().map(Vec::as_slice).collect();
        let batch: Vec<_> = ranges.iter().map(|&ranges| ('a', ranges)).collect();
        let adder = if library { Adder::Library } else { Adder::Receiver };
        let runs = UnevenRun::find(&batch, world, adder);
        let in_run = |item: usize| runs.iter().any(|run| run.items.contains(&item));
        for (item, ranges) in ranges.iter().enumerate() {
            prop_assert!(in_run(item) || even(ranges).is_some());
        }
        let bytes = if library { 4 } else { 2 };
        let on_wire: Vec<_> = ranges.iter().map(|&ranges| (ranges, bytes)).collect();
        let traffic = (0..world).map(|rank| Traffic::of_reduction(&on_wire, &runs, rank));
        let traffic: Vec<Traffic> = traffic.collect();
        let all = ranges.iter().map(|ranges| spanned(ranges).len()).sum::<usize>();
        let summed_on_all = runs.iter().map(|run| run.remainder.len()).sum::<usize>();
        let scattered = traffic.iter().map(|sent| sent.reduce_scatter_bytes as usize).sum::<usize>();
        prop_assert_eq!(scattered, bytes * (all - summed_on_all));
        prop_assert!(traffic.iter().all(|sent| sent.all_reduce_bytes as usize == 4 * summed_on_all));
        for run in &runs {
            let share = run.len() / world;
            for part in &run.parts {
                prop_assert!(part.len() <= share + 16);
                prop_assert!(!library || part.len() == run.parts[0].len());
            }
            let most = match library {
                true if run.parts[0].is_empty() => 4112 * run.items.len() * world,
                true => 17 * world,
                false => 0,
            };
            prop_assert!(run.remainder.len() <= most);
            let sent: Vec<_> = (0..world).map(|rank| run.sent(&ranges, rank)).collect();
            let mut arrived = 0;
            for rank in 0..world {
                let received = run.received(&ranges, rank);
                // Ranks send in the order in which they are received.
                for peer in (0..world).filter(|&peer| peer != rank) {
                    let from = received.iter().filter(|from| from.peer == peer);
                    let from = from.map(|from| (from.item, from.elements.clone()));
                    let to = sent[peer].iter().filter(|to| to.peer == rank);
                    let to = to.map(|to| (to.item, to.elements.clone()));
                    prop_assert_eq!(from.collect::<Vec<_>>(), to.collect::<Vec<_>>());
                }
                for from in &received {
                    let part = &run.parts[from.peer];
                    prop_assert!(part.start <= from.elements.start && from.elements.end <= part.end);
                    prop_assert!(!from.elements.is_empty());
                }
                let of_parts = received.iter().map(|from| (from.item, from.elements.clone()));
                let mut got: Vec<_> = of_parts.chain(run.of_remainder(&ranges, rank)).collect();
                got.sort_by_key(|(item, elements)| (*item, elements.start));
                for item in run.items.clone() {
                    let owned = &ranges[item][rank];
                    let mut end = owned.start;
                    for (_, elements) in got.iter().filter(|(of, _)| *of == item) {
                        prop_assert_eq!(elements.start, end);
                        end = elements.end;
                    }
                    prop_assert_eq!(end, owned.end);
                }
                arrived += received.len();
            }
            // However many ranks there are, a few of each.
            prop_assert!(arrived <= (run.items.len() + 1) * world);
        }
        let to_others = |run: &UnevenRun| -> usize {
            let sent = (0..world).flat_map(|rank| run.sent(&ranges, rank));
            sent.map(|to| to.elements.len()).sum()
        };
        let passed_on = traffic.iter().map(|sent| sent.passed_on_bytes as usize).sum::<usize>();
        prop_assert_eq!(passed_on, 4 * runs.iter().map(to_others).sum::<usize>());
    }
}

#[test]
fn runs_end_at_even_gradients_and_at_other_memory() {
    let placed = placed(&[vec![3, 1], vec![2, 2], vec![4, 0], vec![1, 5]]);
    let find = |memory: [char; 4]| {
        let batch: Vec<_> = memory
            .into_iter()
            .zip(placed.iter().map(Vec::as_slice))
            .collect();
        let runs = UnevenRun::find(&batch, 2, Adder::Library);
        runs.into_iter().map(|run| run.items).collect::<Vec<_>>()
    };
    assert_eq!(find(['a'; 4]), [0..1, 2..4]);
    assert_eq!(find(['a', 'a', 'a', 'b']), [0..1, 2..3, 3..4]);
    assert_eq!(find(['a', 'b', 'c', 'c']), [0..1, 2..4]);
}

/// What a rank stages of a bucket: as much of an uneven one as of an even one, and the sums on their way.
#[test]
fn uneven_buckets_stage_even_parts() {
    let (uneven, even) = (placed(&[vec![64000, 0, 0, 0]]), placed(&[vec![16000; 4]]));
    let staged = |placed: &[Vec<Range<usize>>], adder, accumulate| {
        let batch: Vec<_> = placed
            .iter()
            .map(|ranges| ((), ranges.as_slice()))
            .collect();
        let runs = UnevenRun::find(&batch, 4, adder);
        let grads = batch.iter().map(|(_, ranges)| StagedGrad {
            dtype: FloatDtype::F32,
            wire: GradWire::Bf16,
            len: spanned(ranges).len(),
            own: ranges[0].len(),
            accumulate,
        });
        ReduceStaging::of_batch(&grads.collect::<Vec<_>>(), &runs, adder, 0, 4)
    };
    let arrive = ReduceStaging {
        arrivals: [0, 64000],
        narrow: 64000,
        ..ReduceStaging::default()
    };
    assert_eq!(staged(&even, Adder::Receiver, true), arrive);
    let sums = ReduceStaging {
        passed_on: 16000,
        ..ReduceStaging::default()
    };
    let both = ReduceStaging {
        passed_on: 16000,
        ..arrive
    };
    assert_eq!(staged(&uneven, Adder::Receiver, false), both);
    assert_eq!(
        staged(&uneven, Adder::Receiver, true),
        ReduceStaging {
            added: 64000,
            ..both
        }
    );
    assert_eq!(staged(&uneven, Adder::Library, false), sums);
    assert_eq!(
        staged(&even, Adder::Library, true),
        ReduceStaging {
            added: 16000,
            ..ReduceStaging::default()
        }
    );
}

/// A rank does not hear from too many others: those of one gradient, or of many together.
#[test]
fn what_few_ranks_own_is_summed_on_all() {
    let of = |lens: &[Vec<usize>]| {
        let placed = placed(lens);
        let batch: Vec<_> = placed
            .iter()
            .map(|ranges| ((), ranges.as_slice()))
            .collect();
        let runs = UnevenRun::find(&batch, lens[0].len(), Adder::Library);
        assert_eq!(runs.len(), 1);
        (runs[0].parts[0].len(), runs[0].remainder.len())
    };
    let one = |world: usize| {
        let mut lens = vec![0; world];
        lens[0] = 8000 * world;
        of(&[lens])
    };
    assert_eq!(one(128), (8000, 0));
    assert_eq!(one(129), (0, 8000 * 129));
    // Of each of many gradients a rank owns some of another part.
    let many = |gradients: usize| {
        let len = |gradient: usize, rank: usize| 5000 + usize::from(gradient == rank);
        let lens = |gradient| (0..384).map(|rank| len(gradient, rank)).collect();
        of(&(0..gradients).map(lens).collect::<Vec<_>>()).0 > 0
    };
    assert!(many(100));
    assert!(!many(130));
}

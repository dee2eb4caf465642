//! What ranks tell each other on the host, against its definition: on every engine and any nodes, and where a control has `all_gather` alone.

use std::sync::Arc;

use crate::common::{Comm, Engine, bytes, on_engine, ranks_everywhere};
use lowp_comm::{CommError, Control};
use proptest::prelude::*;

/// A control that has the rest from `all_gather`.
#[derive(Debug)]
struct Plain(Comm);

impl Control for Plain {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn members(&self) -> &[usize] {
        self.0.control().members()
    }

    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.0.control().all_gather(tag, bytes)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        self.0.control().split(color, key)
    }

    fn fail(&self, cause: CommError) -> CommError {
        self.0.control().fail(cause)
    }

    fn failure(&self) -> Option<CommError> {
        self.0.control().failure()
    }
}

/// Values whose sums depend on the order.
fn terms(rank: usize) -> [f64; 3] {
    let at = |i: u64| f64::from(bytes(7 + i, 9)[rank]) / 3.0 - 40.0;
    [at(0), at(1) * 1e16, -0.0]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn every_call_brings_what_it_says(
        world in 1usize..=9,
        lens in prop::collection::vec(0usize..4, 9),
        same in any::<bool>(),
        ranks in 1usize..5,
        sizes in prop::array::uniform3(1usize..5),
    ) {
        let own = |rank: usize| bytes(if same { 1 } else { rank as u64 }, if same { 3 } else { lens[rank] });
        let digest = |rank: usize| lens[rank] as u64 / 2;
        let all: Vec<Vec<u8>> = (0..world).map(own).collect();
        let digests: Vec<u64> = (0..world).map(digest).collect();
        let differ = digests.chunks(ranks).any(|set| set.iter().any(|d| *d != set[0]));
        let differing = differ.then(|| digests.clone());
        let mut sum = terms(0);
        for rank in 1..world {
            sum.iter_mut().zip(terms(rank)).for_each(|(sum, x)| *sum += x);
        }
        let calls = |rank: usize, comm: Comm| {
            for plain in [false, true] {
                let of_all = Plain(comm.clone());
                let control = if plain { &of_all } else { comm.control() };
                assert_eq!(control.all_gather("all", own(rank))?, all);
                assert_eq!(control.broadcast("one", own(rank))?, all[0]);
                let first = (rank == 0).then(|| all.clone());
                assert_eq!(control.gather("first", own(rank))?, first);
                assert_eq!(control.differing("equal", digest(rank), ranks)?, differing);
                let mut values = terms(rank);
                control.sum(&mut values)?;
                assert_eq!(values.map(f64::to_bits), sum.map(f64::to_bits));
            }
            Ok(())
        };
        ranks_everywhere(world, calls);
        on_engine(Engine::Nodes(sizes), world, calls);
    }

    /// Ranks of a color, in the order of their keys, those of one key in their order.
    #[test]
    fn a_split_orders_the_ranks_of_a_color(
        asked in prop::collection::vec((0usize..3, 0usize..3), 1..9),
        sizes in prop::array::uniform3(1usize..5),
    ) {
        let split = |rank: usize, comm: Comm| {
            let (color, key) = asked[rank];
            let group = comm.control().split(color, key)?;
            let again = group.split(0, group.rank())?;
            group.barrier()?;
            assert_eq!(again.members(), group.members());
            let found = again.all_gather("who", vec![rank as u8])?.concat();
            assert!(found.iter().zip(again.members()).all(|(a, b)| usize::from(*a) == *b));
            Ok((group.rank(), group.members().to_vec()))
        };
        let groups = ranks_everywhere(asked.len(), split);
        assert_eq!(on_engine(Engine::Nodes(sizes), asked.len(), split), groups);
        for (rank, (at, members)) in groups.into_iter().enumerate() {
            let mut expected: Vec<usize> = (0..asked.len()).collect();
            expected.retain(|&other| asked[other].0 == asked[rank].0);
            expected.sort_by_key(|&other| asked[other].1);
            assert_eq!(members[at], rank);
            assert_eq!(members, expected);
        }
    }
}

/// The first rank that failed is known to all, by its number in the world, also in a group.
#[test]
fn the_first_rank_that_failed_is_known_to_all() {
    for (codes, expected) in [
        ([0, 0, 0], None),
        ([0, 2, 1], Some((1, 2))),
        ([1, 0, 0], Some((0, 1))),
    ] {
        let found = ranks_everywhere(3, |rank, comm| {
            comm.control().first_failed("it begins", codes[rank])
        });
        assert_eq!(found, [expected; 3]);
    }
    let found = ranks_everywhere(3, |rank, comm| {
        let group = comm.control().split(usize::from(rank > 0), rank)?;
        group.first_failed("it begins", if rank == 2 { 7 } else { 0 })
    });
    assert_eq!(found, [None, Some((2, 7)), Some((2, 7))]);
}

/// So is what it says, where any says something.
#[test]
fn the_first_error_is_known_to_all() {
    for (texts, expected) in [
        ([None; 3], None),
        ([None, Some("no file"), Some("")], Some((1, "no file"))),
        ([Some(""), None, None], Some((0, ""))),
    ] {
        let found = ranks_everywhere(3, |rank, comm| {
            let own = texts[rank].as_ref().map(|text| text as _);
            comm.control().first_error("what ranks found", own)
        });
        let expected = expected.map(|(rank, why)| (rank, why.to_owned()));
        assert_eq!(found, [&expected; 3].map(Clone::clone));
    }
}

/// More sets of ranks than texts travel: the others are named by their digests.
#[test]
fn only_a_few_texts_of_ranks_that_differ_travel() {
    let errors = ranks_everywhere(10, |rank, comm| {
        let error = comm
            .control()
            .all_equal("the plan", &format!("plan {rank}"));
        Ok(error.expect_err("all differ").to_string())
    });
    for error in errors {
        assert!(
            error.contains("ranks [7]: plan 7; ranks [8]: digest "),
            "{error}"
        );
    }
}

/// The error is that of the first description that differs, or that a rank lacks, as if each was compared by itself.
#[test]
fn the_first_of_many_descriptions_that_differs_is_named() {
    let compare = |of: fn(usize) -> Vec<&'static str>| {
        ranks_everywhere(3, move |rank, comm| {
            let texts = of(rank).into_iter().enumerate();
            let texts = texts.map(|(at, text)| [format!("block {at}"), text.to_owned()]);
            let texts: Vec<_> = texts.collect();
            let compared = comm.control().each_equal("the plan", &texts);
            Ok(compared.err().map(|error| error.to_string()))
        })
    };
    let alone = ranks_everywhere(3, |rank, comm| {
        let text = if rank == 1 { "b2" } else { "b" };
        let compared = comm.control().all_equal("the plan of block 1", text);
        Ok(compared.err().map(|error| error.to_string()))
    });
    assert_eq!(compare(|_| vec!["a", "b"]), [None, None, None]);
    assert_eq!(compare(|_| Vec::new()), [None, None, None]);
    let differ = |rank| match rank {
        1 => vec!["a", "b2", "c2"],
        _ => vec!["a", "b", "c"],
    };
    assert_eq!(compare(differ), alone);
    assert!(alone[0].as_ref().is_some_and(|error| error.contains("b2")));
    let lacks = |rank| match rank {
        2 => vec!["a"],
        _ => vec!["a", "b"],
    };
    for error in compare(lacks) {
        let error = error.expect("a rank lacks a plan");
        assert!(error.contains("ranks [2]: nothing"), "{error}");
    }
}

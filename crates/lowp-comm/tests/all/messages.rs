//! What ranks that differ hear: the call of each, with the part that differs, and no more.

use std::error::Error as _;

use crate::common::{Comm, failing, tiling};
use lowp_comm::{CommError, GatherItem};
use lowp_kernels::{Backend, Cpu};

/// The descriptions of a mismatch between two ranks.
fn descriptions(f: impl Fn(usize, &Comm) -> Result<(), CommError> + Sync) -> Vec<String> {
    let failed = failing(2, |rank, comm| f(rank, &comm));
    match failed.cause {
        CommError::Mismatch { descriptions, .. } => descriptions,
        other => panic!("{other}"),
    }
}

#[test]
fn calls_without_items_are_named_alone() {
    let text = descriptions(|rank, comm| match rank {
        0 => comm.control().barrier(),
        _ => comm.control().sum(&mut [0.0; 3]),
    });
    assert_eq!(text, ["ranks [0]: barrier", "ranks [1]: sum of 3 values"]);
}

/// Four lengths before the first difference and four after it, dots where there are more.
#[test]
fn long_lists_are_cut_around_the_first_difference() {
    for (different, expected) in [
        (0, "[777, 4, 3, 4, 3].."),
        (1, "[3, 4, 777, 4, 3, 4, 3].."),
        (2, "[3, 4, 3, 4, 777, 4, 3, 4, 3].."),
        (20, ".. [3, 4, 3, 4, 777, 4, 3, 4, 3].."),
        (27, ".. [3, 4, 3, 4, 777, 4, 3, 4, 3].."),
        (28, ".. [3, 4, 3, 4, 777, 4, 3, 4]"),
        (29, ".. [3, 4, 3, 4, 777, 4]"),
    ] {
        let text = descriptions(|rank, comm| {
            let mut buffers = Vec::new();
            for item in 0..30 {
                let first = if item == different && rank == 1 {
                    777
                } else {
                    3
                };
                let lens = [first, 4];
                let (source, dest) = (Cpu.alloc(lens[rank])?, Cpu.alloc(first + 4)?);
                buffers.push((source, dest, tiling(&lens)));
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
        assert_eq!(
            text[1],
            format!("ranks [1]: all_gather of 30 items, 60 piece lengths {expected}")
        );
    }
}

/// 40 characters before the first difference and 160 from it on, dots where there are more.
#[test]
fn long_texts_are_cut_around_the_first_difference() {
    for (before, after) in [
        (0, 10),
        (40, 159),
        (40, 160),
        (41, 159),
        (41, 160),
        (500, 500),
    ] {
        let whole = |rank: usize| {
            let first = ["a", "b"][rank];
            format!("{}{first}{}", "x".repeat(before), "y".repeat(after))
        };
        let text = descriptions(|rank, comm| comm.control().all_equal("the text", &whole(rank)));
        let from = before.saturating_sub(40);
        let to = (from + 200).min(before + 1 + after);
        let dots = |cut: bool| if cut { ".." } else { "" };
        for rank in [0, 1] {
            let (lead, trail) = (dots(from > 0), dots(to < before + 1 + after));
            let middle = &whole(rank)[from..to];
            let expected = format!("ranks [{rank}]: {lead}{middle}{trail}");
            assert_eq!(text[rank], expected, "{before} before, {after} after");
        }
    }
}

#[test]
fn the_source_of_failed_ranks_is_the_cause() {
    let failed = failing(2, |rank, comm| match rank {
        1 => Err::<(), _>(CommError::NoSuchRank { rank: 7, world: 2 }),
        _ => comm.control().barrier(),
    });
    assert_eq!(failed.rank, 1);
    let source = failed.source().expect("a cause").to_string();
    assert_eq!(source, failed.cause.to_string());
    assert!(failed.to_string().contains(&source));
}

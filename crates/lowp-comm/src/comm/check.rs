//! What every engine checks of a batch before it moves anything.

use std::ops::Range;

use lowp_kernels::{Backend, FloatDtype};

use super::{Collective, ReduceItem};
use crate::CommError;
use crate::control::call::{Call, Kind};

impl<B: Backend> Collective<'_, B> {
    /// Rejects ranges for another number of ranks, and buffers of another length than they say, as rank `rank` of
    /// `world`.
    ///
    /// # Errors
    /// [`CommError::World`] or [`CommError::ItemLength`].
    pub fn check(&self, backend: &B, rank: usize, world: usize) -> Result<(), CommError> {
        let op = self.name();
        match self {
            Collective::AllGather(items) => {
                for (i, item) in items.iter().enumerate() {
                    check_ranges(op, i, item.ranges, world)?;
                    let needed = item.ranges[rank].len();
                    let found = backend.len(item.source);
                    check_length(op, i, "the source", found, needed)?;
                    let needed = end(item.ranges);
                    let found = backend.len(item.dest);
                    if found < needed {
                        check_length(op, i, "the destination", found, needed)?;
                    }
                }
            }
            Collective::ReduceScatter(items, _) => {
                for (i, item) in items.iter().enumerate() {
                    check_ranges(op, i, item.ranges, world)?;
                    let (found, needed) = (backend.len(item.out), item.ranges[rank].len());
                    check_length(op, i, "the output", found, needed)?;
                    let (found, needed) = (item.grad.len(backend), end(item.ranges));
                    if found < needed {
                        check_length(op, i, "the gradient", found, needed)?;
                    }
                }
                check_memory(items, backend)?;
            }
            Collective::Owned(items, _) => {
                for (i, item) in items.iter().enumerate() {
                    check_ranges(op, i, item.ranges, world)?;
                    let (found, needed) = (backend.len(item.piece), item.ranges[rank].len());
                    check_length(op, i, "the piece", found, needed)?;
                    if item.owner >= world {
                        return Err(CommError::World {
                            what: format!("the owner of item {i} of {op}, counted from 0,"),
                            found: item.owner,
                            world,
                        });
                    }
                    let (found, needed) = (backend.len(item.whole), end(item.ranges));
                    if item.owner == rank && found < needed {
                        check_length(op, i, "the whole", found, needed)?;
                    }
                }
            }
            Collective::Max(_) | Collective::Sum(_) => {}
        }
        Ok(())
    }

    /// The name of the call, with what ranks must agree on beside lengths.
    fn call_name(&self) -> String {
        let name = self.name();
        let Collective::ReduceScatter(items, _) = self else {
            return name.to_owned();
        };
        let narrow = |(i, item): (usize, &ReduceItem<'_, B>)| {
            (item.grad.dtype() == FloatDtype::Bf16).then_some(i)
        };
        let narrow: Vec<usize> = items.iter().enumerate().filter_map(narrow).collect();
        match narrow.len() {
            0 => name.to_owned(),
            all if all == items.len() => format!("{name} of bf16 gradients"),
            _ => format!("{name} with bf16 gradients in items {narrow:?}"),
        }
    }

    /// The call, as ranks compare it.
    pub(crate) fn call(&self, label: &str, backend: &B) -> Call {
        let of = |ranges: &[Range<usize>]| -> Vec<usize> {
            ranges.iter().map(ExactSizeIterator::len).collect()
        };
        let (items, lengths) = match self {
            Collective::AllGather(items) => (
                items.len(),
                items.iter().flat_map(|item| of(item.ranges)).collect(),
            ),
            Collective::ReduceScatter(items, _) => (
                items.len(),
                items.iter().flat_map(|item| of(item.ranges)).collect(),
            ),
            // Owners are compared as lengths are.
            Collective::Owned(items, _) => {
                let lengths = items.iter().map(|item| [of(item.ranges), vec![item.owner]]);
                (items.len(), lengths.flatten().flatten().collect())
            }
            Collective::Max(values) => (1, vec![backend.len(values)]),
            Collective::Sum(buffers) => {
                let lengths = buffers.iter().map(|values| backend.len(values));
                (buffers.len(), lengths.collect())
            }
        };
        Call {
            kind: Kind::AllGather,
            items,
            lengths,
            label: label.to_owned(),
            ..Call::named(self.call_name())
        }
    }
}

/// Gradients that follow each other with one number of memory lie in one.
fn check_memory<B: Backend>(items: &[ReduceItem<'_, B>], backend: &B) -> Result<(), CommError> {
    let lies = |item: &ReduceItem<'_, B>| (item.grad.span(backend), item.grad.dtype());
    let mut pairs = items.windows(2).enumerate();
    let other = |pair: &[ReduceItem<'_, B>]| {
        pair[0].memory == pair[1].memory && lies(&pair[0]) != lies(&pair[1])
    };
    match pairs.find(|(_, pair)| other(pair)) {
        Some((item, pair)) => Err(CommError::ItemMemory {
            items: [item, item + 1],
            memory: pair[0].memory,
        }),
        None => Ok(()),
    }
}

fn end(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(|range| range.end).max().unwrap_or(0)
}

fn check_ranges(
    op: &str,
    item: usize,
    ranges: &[Range<usize>],
    world: usize,
) -> Result<(), CommError> {
    if ranges.len() == world {
        return Ok(());
    }
    Err(CommError::World {
        what: format!("{op}, item {item}"),
        found: ranges.len(),
        world,
    })
}

fn check_length(
    op: &'static str,
    item: usize,
    what: &'static str,
    found: usize,
    needed: usize,
) -> Result<(), CommError> {
    if found == needed {
        return Ok(());
    }
    Err(CommError::ItemLength {
        op,
        item,
        what,
        needed,
        found,
    })
}

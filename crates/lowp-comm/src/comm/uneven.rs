//! [`UnevenRun`]: gradients of which ranks own uneven parts, reduced in even ones. NCCL scatters sums in one operation only where all ranks
//! get as many, and ranks that add parts themselves wait for the one that adds most.
//!
//! ```text
//! memory       |         gradient 0        |  1 |     gradient 2     |
//! owned by     |  rank 0   |    rank 1     |  0 | rank 1 |  rank 2   |
//! even parts   | part of rank 0 | part of rank 1 | part of rank 2 | remainder
//! passed on                  0 to 1          1 to 0    2 to 1
//! ```
//!
//! A run ends at a gradient of even parts: its sums are scattered to their owners, and would be passed on in a run.

use std::ops::Range;

use super::{ReduceStaging, even};

/// Parts are multiples of this many elements, so that words of 16 bytes are not cut.
const UNIT: usize = 16;

/// Parts of fewer elements for each gradient are not worth a round of messages: a library sums all of them on all ranks.
const LEAST_PART: usize = 4096;

/// Most ranks that one gets its sums from, each of which takes memory of the library.
const MOST_PEERS: usize = 128;

/// Most GPUs of a group that read each other's gradients ([`Adder::Reader`]).
pub const MAX_PEER_GPUS: usize = 16;

/// Who adds the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adder {
    /// A library, on the way, to which all parts are equal.
    Library,
    /// The rank that receives the parts.
    Receiver,
    /// The rank that owns the sums, which reads the parts in the memory of all ranks, however uneven they are.
    Reader,
}

/// Gradients of a batch that follow each other in one memory, of each of which some ranks own more than others. Each rank first gets the sums of an even
/// part of that memory, and ranks then send each other what they own of it. Where parts must be equal there is a remainder after them, whose
/// sums all ranks get. It is all of a run that is small or of many small gradients, and all of one of which a rank owns some of more than 128 parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnevenRun {
    /// Which of the batch.
    pub items: Range<usize>,
    /// The elements of the memory whose sums each rank gets first, in rank order.
    pub parts: Vec<Range<usize>>,
    /// The elements after them.
    pub remainder: Range<usize>,
}

/// Sums that go from the rank that has them to the one that owns them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The rank on the other side, which sends or receives them.
    pub peer: usize,
    /// Which of the batch.
    pub item: usize,
    /// The elements of the memory.
    pub elements: Range<usize>,
}

impl UnevenRun {
    /// Those of a batch of `world` ranks: the memory of each gradient, equal for those that share one, and the elements that ranks own there, in
    /// rank order. Gradients that are not in any have even parts as they are.
    pub fn find<M: PartialEq>(
        batch: &[(M, &[Range<usize>])],
        world: usize,
        adder: Adder,
    ) -> Vec<Self> {
        let mut runs = Vec::new();
        if adder == Adder::Reader {
            return runs;
        }
        let mut start = 0;
        while start < batch.len() {
            let mut elements = spanned(batch[start].1);
            let mut end = start + 1;
            if even(batch[start].1).is_some() {
                start = end;
                continue;
            }
            while let Some((memory, ranges)) = batch.get(end)
                && *memory == batch[start].0
                && even(ranges).is_none()
                && spanned(ranges).start == elements.end
            {
                elements.end = spanned(ranges).end;
                end += 1;
            }
            let owned = batch[start..end].iter().map(|(_, ranges)| *ranges);
            let owned: Vec<_> = owned.collect();
            runs.push(Self::new(start, elements, &owned, world, adder));
            start = end;
        }
        runs
    }

    /// Of the gradients from item `start` on, of which ranks own `owned`, and their elements.
    fn new(
        start: usize,
        elements: Range<usize>,
        owned: &[&[Range<usize>]],
        world: usize,
        adder: Adder,
    ) -> Self {
        let items = start..start + owned.len();
        let in_parts_of = |each: usize| {
            let cut = |rank: usize| elements.end.min(elements.start + rank * each);
            Self {
                items: items.clone(),
                parts: (0..world).map(|rank| cut(rank)..cut(rank + 1)).collect(),
                remainder: cut(world)..elements.end,
            }
        };
        match adder {
            Adder::Receiver | Adder::Reader => {
                in_parts_of(elements.len().div_ceil(world).next_multiple_of(UNIT))
            }
            Adder::Library => {
                let each = elements.len() / world / UNIT * UNIT;
                let run = in_parts_of(each);
                let is_small = each < LEAST_PART * items.len();
                match is_small || run.most_peers(owned) > MOST_PEERS {
                    true => in_parts_of(0),
                    false => run,
                }
            }
        }
    }

    /// The most ranks that one gets the sums from that it owns, of `owned` by item and rank.
    fn most_peers(&self, owned: &[&[Range<usize>]]) -> usize {
        let of_rank = |rank: usize| {
            let (mut peers, mut next) = (0, 0);
            for ranges in owned {
                let parts = self.parts_with(&ranges[rank]);
                // Items follow each other, and so do the parts that they are in.
                peers += parts.end.saturating_sub(parts.start.max(next));
                next = next.max(parts.end);
            }
            peers
        };
        (0..self.parts.len()).map(of_rank).max().unwrap_or(0)
    }

    /// The ranks whose parts have some of `elements`.
    fn parts_with(&self, elements: &Range<usize>) -> Range<usize> {
        let Some(first) = self.parts.first() else {
            return 0..0;
        };
        if elements.is_empty() || first.is_empty() {
            return 0..0;
        }
        let part = |at: usize| (at - first.start) / first.len();
        let end = self.parts.len().min(part(elements.end - 1) + 1);
        part(elements.start).min(end)..end
    }

    /// Those of `items` gradients that are in none of `runs`.
    pub fn others(runs: &[Self], items: usize) -> impl Iterator<Item = usize> {
        let mut next = runs.iter().map(|run| run.items.clone()).peekable();
        (0..items).filter(move |item| {
            next.next_if(|run| run.end <= *item);
            next.peek().is_none_or(|run| *item < run.start)
        })
    }

    /// The elements of the memory that it has.
    pub fn elements(&self) -> Range<usize> {
        let first = self.parts.first().unwrap_or(&self.remainder);
        first.start..self.remainder.end
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.elements().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What `rank` sends to others: of its part, what they own.
    pub fn sent(&self, batch: &[&[Range<usize>]], rank: usize) -> Vec<Move> {
        let part = &self.parts[rank];
        let of_item = |item: usize| {
            let owned = batch[item].iter().enumerate();
            owned.map(move |(peer, range)| Move {
                peer,
                item,
                elements: overlap(part, range),
            })
        };
        let moves = self.items.clone().flat_map(of_item);
        let to_others = |to: &Move| to.peer != rank && !to.elements.is_empty();
        moves.filter(to_others).collect()
    }

    /// What `rank` owns of the parts of all ranks: it is sent those of others, in the order in which they send them.
    pub fn received(&self, batch: &[&[Range<usize>]], rank: usize) -> Vec<Move> {
        let of_item = |item: usize| {
            let owned = &batch[item][rank];
            self.parts_with(owned).map(move |peer| Move {
                peer,
                item,
                elements: overlap(&self.parts[peer], owned),
            })
        };
        self.items.clone().flat_map(of_item).collect()
    }

    /// What `rank` owns of the remainder, by item.
    pub fn of_remainder(
        &self,
        batch: &[&[Range<usize>]],
        rank: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let owned = self.items.clone();
        let owned = owned.map(move |item| (item, overlap(&self.remainder, &batch[item][rank])));
        owned.filter(|(_, elements)| !elements.is_empty())
    }

    /// Memory for the sums of the part of `rank`, and of the remainder after all parts.
    pub fn staging(&self, rank: usize) -> ReduceStaging {
        ReduceStaging::of_run(self.parts[rank].len(), self.remainder.len())
    }
}

/// From the first element to the last.
pub fn spanned(ranges: &[Range<usize>]) -> Range<usize> {
    let filled = || ranges.iter().filter(|range| !range.is_empty());
    let start = filled().map(|range| range.start).min().unwrap_or(0);
    start..filled().map(|range| range.end).max().unwrap_or(start)
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

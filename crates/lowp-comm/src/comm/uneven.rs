//! [`UnevenRun`]: gradients of which ranks own uneven parts, reduced in even ones. NCCL scatters sums in one operation only where all ranks
//! get as many, and ranks that add parts themselves wait for the one that adds most.

use std::ops::Range;

use super::{ReduceStaging, even};

/// Parts are multiples of this many elements, so that words of 16 bytes are not cut.
const UNIT: usize = 16;

/// Parts of fewer elements for each gradient are not worth a round of messages: a library sums all of them on all ranks.
const LEAST_PART: usize = 4096;

/// Most ranks that one gets its sums from, each of which takes memory of the library.
const MOST_PEERS: usize = 128;

/// Who adds the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adds {
    /// A library, on the way, to which all parts are equal.
    Library,
    /// The rank that receives the parts.
    Receiver,
}

/// Gradients of a batch that follow each other in one memory, of each of which some ranks own more than others. Each rank first gets the sums of an even
/// part of that memory, and ranks then send each other what they own of it. Where parts must be equal there is a rest after them, whose
/// sums all ranks get. It is all of a run that is small or of many small gradients, and all of one of which a rank owns more than [`MOST_PEERS`] parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnevenRun {
    /// Which of the batch.
    pub items: Range<usize>,
    /// The elements of the memory whose sums each rank gets first, in rank order.
    pub parts: Vec<Range<usize>>,
    /// The elements after them.
    pub rest: Range<usize>,
}

/// Sums that go from the rank that has them to the one that owns them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The other rank.
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
        adds: Adds,
    ) -> Vec<Self> {
        let mut runs = Vec::new();
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
            let owned = |rank: usize| {
                batch[start..end]
                    .iter()
                    .map(move |(_, all)| all[rank].len())
            };
            let most = (0..world).map(|rank| owned(rank).sum()).max();
            runs.push(Self::new(
                (start..end, elements),
                most.unwrap_or(0),
                world,
                adds,
            ));
            start = end;
        }
        runs
    }

    /// Of gradients, and their elements, of which a rank owns `most`.
    fn new(
        (items, elements): (Range<usize>, Range<usize>),
        most: usize,
        world: usize,
        adds: Adds,
    ) -> Self {
        let each = match adds {
            Adds::Library => elements.len() / world / UNIT * UNIT,
            Adds::Receiver => elements.len().div_ceil(world).next_multiple_of(UNIT),
        };
        let is_small = each < LEAST_PART * items.len() || most > MOST_PEERS * each;
        let each = match adds {
            Adds::Library if is_small => 0,
            _ => each,
        };
        let cut = |rank: usize| elements.end.min(elements.start + rank * each);
        let parts = (0..world).map(|rank| cut(rank)..cut(rank + 1)).collect();
        let rest = cut(world)..elements.end;
        Self { items, parts, rest }
    }

    /// Elements of all of it.
    pub fn len(&self) -> usize {
        let start = self
            .parts
            .first()
            .map_or(self.rest.start, |part| part.start);
        self.rest.end - start
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
            let parts = self.parts.iter().enumerate();
            parts.map(move |(peer, part)| Move {
                peer,
                item,
                elements: overlap(part, owned),
            })
        };
        let moves = self.items.clone().flat_map(of_item);
        moves.filter(|from| !from.elements.is_empty()).collect()
    }

    /// What `rank` owns of the rest, by item.
    pub fn of_rest(
        &self,
        batch: &[&[Range<usize>]],
        rank: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let owned = self.items.clone();
        let owned = owned.map(move |item| (item, overlap(&self.rest, &batch[item][rank])));
        owned.filter(|(_, elements)| !elements.is_empty())
    }

    /// Memory for the sums of the part of `rank`, and of the rest after all parts.
    pub fn staging(&self, rank: usize) -> ReduceStaging {
        ReduceStaging::of_run(self.parts[rank].len(), self.rest.len())
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

//! [`Exchange`]: how the pieces of a gather travel. Large ones go straight to where they belong; the small ones of a rank go in one message.

use std::ops::Range;

use lowp_comm::LARGE_PIECE;
use lowp_format::GatherPlan;

use super::steps::{MemoryStep, memory_steps, piece_ranges};

/// Messages of unequal lengths are padded to the longest if that adds at most this part of their bytes: equal pieces are one operation of
/// NCCL, others are one for each rank.
const MOST_PADDING: usize = 8;

/// Pieces begin in messages at multiples of this: GPUs copy so many bytes at once.
const ALIGN: usize = 16;

/// The gathers of parameters that are done together, by these ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange<'p> {
    /// The steps of each parameter. Small pieces are [`MemoryStep::Unpack`].
    pub steps: Vec<Vec<MemoryStep<'p>>>,
    /// Where the message of each rank arrives; nothing if none is sent.
    pub messages: Vec<Range<usize>>,
    /// Bytes of each rank's message that belong to no piece: after pieces whose length is no multiple of 16, and at its end.
    pub padding: Vec<usize>,
}

impl<'p> Exchange<'p> {
    /// The gathers of `plans`, one of each parameter, by the first `ranks` of the ranks that they are for.
    pub fn new(plans: &[&'p GatherPlan], ranks: usize) -> Self {
        Self::with_large(plans, ranks, LARGE_PIECE)
    }

    /// As [`Exchange::new`], where pieces of `large` bytes go straight to where they belong.
    pub fn with_large(plans: &[&'p GatherPlan], ranks: usize, large: usize) -> Self {
        let mut steps: Vec<_> = plans.iter().map(|plan| memory_steps(plan)).collect();
        for step in steps.iter_mut().flatten() {
            if let MemoryStep::Fetch { pieces, .. } = step {
                *pieces = pieces.get(..ranks).unwrap_or(pieces);
            }
        }
        let is_small = |step: &MemoryStep<'_>| match step {
            MemoryStep::Fetch { pieces, .. } => (1..large).contains(&longest(pieces)),
            _ => false,
        };
        let [mut lens, mut bytes] = [vec![0; ranks], vec![0; ranks]];
        let mut small = 0;
        for step in steps.iter().flatten().filter(|step| is_small(step)) {
            if let MemoryStep::Fetch { pieces, .. } = step {
                small += 1;
                let each = lens.iter_mut().zip(*pieces);
                each.for_each(|(len, &piece)| *len += aligned(piece));
                let each = bytes.iter_mut().zip(*pieces);
                each.for_each(|(bytes, piece)| *bytes += piece);
            }
        }
        // A single piece is a message by itself, and a single rank sends nothing.
        if small < 2 || ranks < 2 {
            return Self {
                steps,
                messages: Vec::new(),
                padding: vec![0; ranks],
            };
        }
        let messages = messages(&lens);
        let padding = messages.iter().zip(bytes);
        let padding = padding.map(|(message, bytes)| message.len() - bytes);
        let padding = padding.collect();
        for steps in &mut steps {
            *steps = unpacked(std::mem::take(steps), is_small);
        }
        Self {
            steps,
            messages,
            padding,
        }
    }

    /// Bytes of the memory that messages arrive in.
    pub fn message_bytes(&self) -> usize {
        self.messages.last().map_or(0, |last| last.end)
    }

    /// Where each rank's piece begins in the messages, of every [`MemoryStep::Unpack`] in the order of steps.
    pub fn starts(&self) -> impl Iterator<Item = Vec<usize>> {
        let starts = self.messages.iter().map(|message| message.start);
        let mut ends: Vec<usize> = starts.collect();
        self.steps.iter().flatten().filter_map(move |step| {
            let MemoryStep::Unpack { pieces, .. } = step else {
                return None;
            };
            let starts = ends.clone();
            let each = ends.iter_mut().zip(*pieces);
            each.for_each(|(end, &piece)| *end += aligned(piece));
            Some(starts)
        })
    }

    /// Bytes of the pieces of each buffer that goes straight to where it belongs, by rank.
    pub fn fetched(&self) -> impl Iterator<Item = &'p [usize]> {
        self.steps.iter().flatten().filter_map(|step| match step {
            MemoryStep::Fetch { pieces, .. } => Some(*pieces),
            _ => None,
        })
    }

    /// In how many batches GPUs exchange pieces: large ones, and small ones.
    pub fn batches(&self) -> usize {
        let messages = self.messages.iter().map(ExactSizeIterator::len).max();
        let lens: Vec<usize> = self.fetched().map(longest).chain(messages).collect();
        let large = lens.iter().any(|bytes| *bytes >= LARGE_PIECE);
        let small = lens.iter().any(|bytes| (1..LARGE_PIECE).contains(bytes));
        usize::from(large) + usize::from(small)
    }
}

/// The longest piece.
fn longest(pieces: &[usize]) -> usize {
    pieces.iter().copied().max().unwrap_or(0)
}

/// The bytes that a piece of `len` takes in a message.
const fn aligned(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// Where messages of these lengths arrive.
fn messages(lens: &[usize]) -> Vec<Range<usize>> {
    let (longest, bytes) = (longest(lens), lens.iter().sum::<usize>());
    match (longest * lens.len() - bytes) * MOST_PADDING <= bytes {
        true => piece_ranges(&vec![longest; lens.len()]).collect(),
        false => piece_ranges(lens).collect(),
    }
}

/// The steps of a parameter whose small pieces follow each other in the messages.
fn unpacked<'p>(
    steps: Vec<MemoryStep<'p>>,
    is_small: impl Fn(&MemoryStep<'_>) -> bool,
) -> Vec<MemoryStep<'p>> {
    let mut made: Vec<MemoryStep<'p>> = Vec::new();
    for step in steps {
        let small = is_small(&step);
        match (step, made.last_mut()) {
            (MemoryStep::Fetch { spec, to, pieces }, _) if small => {
                made.push(MemoryStep::Unpack {
                    spec,
                    to,
                    pieces,
                    outer: 1,
                });
            }
            // Out of the messages at once.
            (
                MemoryStep::Interleave {
                    outer, from, to, ..
                },
                Some(MemoryStep::Unpack {
                    to: arrived,
                    outer: rows,
                    ..
                }),
            ) if *arrived == from => (*arrived, *rows) = (to, outer),
            (step, _) => made.push(step),
        }
    }
    made
}

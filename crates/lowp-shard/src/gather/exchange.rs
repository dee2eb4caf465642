//! [`Exchange`]: how the pieces of a gather travel. Large ones go straight to where they belong; the small ones of a rank go in one message.

use std::ops::Range;

use lowp_comm::{LARGE_PIECE, is_large};
use lowp_format::GatherPlan;

use super::steps::{MemoryStep, memory_steps};

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

    /// The same where pieces of `large` bytes go straight to where they belong.
    pub fn with_large(plans: &[&'p GatherPlan], ranks: usize, large: usize) -> Self {
        let mut steps: Vec<_> = plans.iter().map(|plan| memory_steps(plan)).collect();
        for step in steps.iter_mut().flatten() {
            if let MemoryStep::Fetch { ranges, .. } = step {
                ranges.truncate(ranks);
            }
        }
        let is_small = |step: &MemoryStep<'_>| match step {
            MemoryStep::Fetch { ranges, .. } => {
                let longest = ranges.iter().map(ExactSizeIterator::len).max();
                (1..large).contains(&longest.unwrap_or(0))
            }
            _ => false,
        };
        let [mut lens, mut bytes] = [vec![0; ranks], vec![0; ranks]];
        let mut small = 0;
        for step in steps.iter().flatten().filter(|step| is_small(step)) {
            if let MemoryStep::Fetch { ranges, .. } = step {
                small += 1;
                let each = lens.iter_mut().zip(ranges);
                each.for_each(|(len, range)| *len += aligned(range.len()));
                let each = bytes.iter_mut().zip(ranges);
                each.for_each(|(bytes, range)| *bytes += range.len());
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
        let mut ends: Vec<usize> = messages.iter().map(|message| message.start).collect();
        for steps in &mut steps {
            *steps = unpacked(std::mem::take(steps), is_small, &mut ends);
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

    /// The pieces that each rank sends: those of large buffers, and the message.
    pub fn pieces(&self) -> impl Iterator<Item = &[Range<usize>]> {
        let fetched = self.steps.iter().flatten().filter_map(|step| match step {
            MemoryStep::Fetch { ranges, .. } => Some(&**ranges),
            _ => None,
        });
        let message = (!self.messages.is_empty()).then_some(&*self.messages);
        fetched.chain(message)
    }

    /// In how many batches GPUs exchange them: large ones, and small ones.
    pub fn batches(&self) -> usize {
        let sent = |ranges: &&[Range<usize>]| ranges.iter().any(|range| !range.is_empty());
        let [mut large, mut small] = [false; 2];
        for ranges in self.pieces().filter(sent) {
            match is_large(ranges) {
                true => large = true,
                false => small = true,
            }
        }
        usize::from(large) + usize::from(small)
    }
}

/// The bytes that a piece of `len` takes in a message.
const fn aligned(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// Where messages of these lengths arrive.
fn messages(lens: &[usize]) -> Vec<Range<usize>> {
    let longest = lens.iter().max().copied().unwrap_or(0);
    let bytes: usize = lens.iter().sum();
    let padded = (longest * lens.len() - bytes) * MOST_PADDING <= bytes;
    let mut end = 0;
    let message = |&len: &usize| {
        let start = end;
        end += if padded { longest } else { len };
        start..end
    };
    lens.iter().map(message).collect()
}

/// The steps of a parameter whose small pieces follow each other in the messages; `ends` is where the messages end so far.
fn unpacked<'p>(
    steps: Vec<MemoryStep<'p>>,
    is_small: impl Fn(&MemoryStep<'_>) -> bool,
    ends: &mut [usize],
) -> Vec<MemoryStep<'p>> {
    let mut made: Vec<MemoryStep<'p>> = Vec::new();
    for step in steps {
        let small = is_small(&step);
        match (step, made.last_mut()) {
            (MemoryStep::Fetch { spec, to, ranges }, _) if small => {
                let starts = ends.to_vec();
                let each = ends.iter_mut().zip(&ranges);
                each.for_each(|(end, range)| *end += aligned(range.len()));
                made.push(MemoryStep::Unpack {
                    spec,
                    to,
                    ranges,
                    starts,
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

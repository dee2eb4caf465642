//! Which gradients share a bucket, and [`Slabs`]: memory that buckets use one after the other.

use std::collections::VecDeque;
use std::ops::Range;

use lowp_kernels::{Backend, FloatDtype, Source};

use crate::ShardError;
use lowp_comm::{Started, even};

/// Elements of a gradient, and what it shares a bucket with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradLen {
    /// Elements of the gradient.
    pub len: usize,
    /// The block of the network whose gradients share a bucket with it that may be as long as the longest of them; none of a gradient that
    /// ranks own even parts of.
    pub block: Option<usize>,
}

impl GradLen {
    /// Of a gradient of which ranks own `ranges`, in a block of the network.
    pub fn new(ranges: &[Range<usize>], block: Option<usize>) -> Self {
        Self {
            len: ranges.last().map_or(0, |range| range.end),
            block: block.filter(|_| even(ranges).is_none()),
        }
    }
}

/// The buckets of gradients, as ranges of the list: those that follow each other go together up to `most` elements. Gradients of a block that ranks own
/// uneven parts of go together up to the length of the longest: the few ranks that own a short one have to get it besides what all get.
pub fn grad_bucket_ranges(grads: &[GradLen], most: usize) -> Vec<Range<usize>> {
    let longest = |block: usize| {
        let of_block = grads.iter().filter(|grad| grad.block == Some(block));
        of_block.map(|grad| grad.len).max().unwrap_or(0)
    };
    let mut buckets: Vec<Range<usize>> = Vec::new();
    // Of the last one: its elements, its only block, and the longest gradient of that.
    let mut filled = 0;
    let mut known: Option<(usize, usize)> = None;
    for (at, grad) in grads.iter().enumerate() {
        let same = known.filter(|(block, _)| grad.block == Some(*block));
        let limit = same.map_or(most, |(_, longest)| most.max(longest));
        match buckets.last_mut() {
            Some(last) if filled + grad.len <= limit => {
                last.end = at + 1;
                filled += grad.len;
                known = same;
            }
            _ => {
                buckets.push(at..at + 1);
                filled = grad.len;
                known = match (grad.block, same) {
                    (Some(_), Some(same)) => Some(same),
                    (block, _) => block.map(|block| (block, longest(block))),
                };
            }
        }
    }
    buckets
}

/// Slabs of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradSlabs {
    /// Elements of each.
    pub len: usize,
    /// How many there are.
    pub count: usize,
}

/// The memory that buckets of `lens` elements use one after the other, by length. Those up to `limit` have slabs of one length, of
/// which there are `at_once`, or as many as there are buckets. Of a larger length there are as many as buckets of it that follow each
/// other with fewer elements between them: where as much is written between two, as between a head and an embedding, the first one was sent.
pub fn grad_slabs(lens: &[usize], limit: usize, at_once: usize) -> Vec<GradSlabs> {
    struct Length {
        len: usize,
        slabs: usize,
        /// Buckets that follow each other, the last one included.
        close: usize,
        /// Where the last one ends.
        end: usize,
    }
    let common = common(lens, limit);
    let mut known: Vec<Length> = Vec::new();
    let mut begin = 0;
    for &own in lens {
        let (len, end) = (common.max(own), begin + own);
        match known.iter_mut().find(|known| known.len == len) {
            Some(known) => {
                let far = len > common && begin - known.end >= len;
                known.close = if far { 1 } else { known.close + 1 };
                known.slabs = known.slabs.max(at_once.min(known.close));
                known.end = end;
            }
            None => known.push(Length {
                len,
                slabs: 1,
                close: 1,
                end,
            }),
        }
        begin = end;
    }
    let slabs = known.iter().map(|known| GradSlabs {
        len: known.len,
        count: known.slabs,
    });
    slabs.collect()
}

/// The longest bucket within the limit.
fn common(lens: &[usize], limit: usize) -> usize {
    let within = lens.iter().filter(|&&len| len <= limit);
    within.max().copied().unwrap_or(0)
}

/// Memory of one bucket.
#[derive(Debug)]
pub(super) struct Slab<B: Backend> {
    pub(super) values: Source<B>,
    len: usize,
}

/// Memory for buckets: of one length for all that fit into the limit, and of their own length for larger ones.
#[derive(Debug)]
pub(super) struct Slabs<B: Backend> {
    backend: B,
    dtype: FloatDtype,
    /// The longest bucket within the limit.
    common: usize,
    /// Slabs of each length, unless more are written at once: before another one is made, the oldest that was sent is taken
    /// again.
    enough: Vec<GradSlabs>,
    /// Those that no bucket has, the oldest first, with what still reads them.
    free: VecDeque<(Slab<B>, Option<Started<B>>)>,
    /// Lengths of all slabs.
    made: Vec<usize>,
}

impl<B: Backend> Slabs<B> {
    /// No memory yet, for buckets of `lens`, of which those up to `limit` share slabs of one length ([`grad_slabs`]).
    pub(super) fn new(
        backend: &B,
        dtype: FloatDtype,
        lens: &[usize],
        limit: usize,
        at_once: usize,
    ) -> Self {
        Self {
            backend: backend.clone(),
            dtype,
            common: common(lens, limit),
            enough: grad_slabs(lens, limit, at_once),
            free: VecDeque::new(),
            made: Vec::new(),
        }
    }

    /// Memory for `len` values: what the stream writes to it from now on follows its last reader.
    pub(super) fn take(&mut self, len: usize) -> Result<Slab<B>, ShardError> {
        let len = len.max(self.common);
        let made = self.made.iter().filter(|made| **made == len).count();
        let of_len = self.enough.iter().find(|known| known.len == len);
        let enough = of_len.is_none_or(|known| made >= known.count);
        let idle = |(slab, reader): &(Slab<B>, Option<_>)| slab.len == len && reader.is_none();
        let first = self.free.iter().position(|(slab, _)| slab.len == len);
        let first = first.filter(|_| enough);
        if let Some(at) = self.free.iter().position(idle).or(first)
            && let Some((slab, reader)) = self.free.remove(at)
        {
            if let Some(reader) = reader {
                reader.wait(&self.backend)?;
            }
            return Ok(slab);
        }
        let values = Source::alloc(&self.backend, self.dtype, len)?;
        self.made.push(len);
        Ok(Slab { values, len })
    }

    /// Takes back memory that `reader` still reads.
    pub(super) fn give_back(&mut self, slab: Slab<B>, reader: Started<B>) {
        self.free.push_back((slab, Some(reader)));
    }

    /// Takes back memory that only the stream itself has used.
    pub(super) fn give_back_unsent(&mut self, slab: Slab<B>) {
        self.free.push_back((slab, None));
    }

    /// Says that what the stream is given from now on follows all readers.
    pub(super) fn followed(&mut self) {
        for (_, reader) in &mut self.free {
            *reader = None;
        }
    }

    /// The dtype of the gradients in the slabs.
    pub(super) fn dtype(&self) -> FloatDtype {
        self.dtype
    }

    /// Bytes of all slabs.
    pub(super) fn bytes(&self) -> usize {
        self.dtype.bytes() * self.made.iter().sum::<usize>()
    }
}

//! [`Moves`]: where the elements of all ranks go. Whole bytes go straight to their places; a byte that two
//! ranks share goes as two halves, which are joined where they arrive.

use std::ops::Range;

use lowp_format::Code;
use lowp_kernels::{Backend, TransposeJob, Work};

use crate::{FlatShard, ShardError};
use lowp_comm::GatherItem;

/// One buffer of the gather.
#[derive(Debug)]
struct Move<B: Backend> {
    source: B::Buffer<u8>,
    dest: B::Buffer<u8>,
    ranges: Vec<Range<usize>>,
}

/// The gather of all buffers, and the work around it.
#[derive(Debug)]
pub(super) struct Moves<B: Backend> {
    backend: B,
    rank: usize,
    moves: Vec<Move<B>>,
    split: Vec<TransposeJob<B>>,
    join: Vec<TransposeJob<B>>,
    /// Takes the own halves out of shared bytes.
    pub(super) before: Option<B::Plan>,
    /// Joins the halves of all ranks to bytes.
    pub(super) after: Option<B::Plan>,
}

impl<B: Backend> Moves<B> {
    pub(super) fn new(backend: &B, rank: usize) -> Self {
        Self {
            backend: backend.clone(),
            rank,
            moves: Vec::new(),
            split: Vec::new(),
            join: Vec::new(),
            before: None,
            after: None,
        }
    }

    /// Adds `data`, a whole buffer of which the ranks hold `shards`, which cover it in rank order.
    pub(super) fn add(
        &mut self,
        data: &B::Buffer<u8>,
        shards: &[FlatShard],
    ) -> Result<(), ShardError> {
        let ranges: Vec<Range<usize>> = shards.iter().map(FlatShard::whole_bytes).collect();
        if ranges.iter().any(|range| !range.is_empty()) {
            let own = ranges[self.rank].clone();
            self.moves.push(Move {
                source: self.backend.view::<u8>(data, own)?,
                dest: data.clone(),
                ranges,
            });
        }
        let pieces: Vec<Halves> = shards.iter().map(Halves::of).collect();
        if pieces.iter().any(|halves| halves.len() > 0) {
            self.add_halves(data, &pieces)?;
        }
        Ok(())
    }

    /// Adds `scales`, a whole buffer of which the ranks hold entries of `bytes` bytes: those of `blocks`, in rank order. All ranks have
    /// the others.
    pub(super) fn add_blocks(
        &mut self,
        scales: &B::Buffer<u8>,
        blocks: &[Range<usize>],
        bytes: usize,
    ) -> Result<(), ShardError> {
        let ranges = blocks
            .iter()
            .map(|blocks| bytes * blocks.start..bytes * blocks.end);
        let ranges: Vec<Range<usize>> = ranges.collect();
        if ranges.iter().any(|range| !range.is_empty()) {
            let own = ranges[self.rank].clone();
            self.moves.push(Move {
                source: self.backend.view::<u8>(scales, own)?,
                dest: scales.clone(),
                ranges,
            });
        }
        Ok(())
    }

    /// The half bytes of every rank. A transpose of two nibbles takes a byte apart or joins it: a byte of
    /// two entries becomes two bytes of one, each in the low half.
    fn add_halves(&mut self, data: &B::Buffer<u8>, pieces: &[Halves]) -> Result<(), ShardError> {
        let Self { backend, .. } = self;
        let code = Code::E2M1;
        let at = |byte: usize| backend.view::<u8>(data, byte..byte + 1);
        // Low and high half of the first byte, then of the last one: what is sent lies together.
        let staged = backend.alloc::<u8>(4)?;
        let own = &pieces[self.rank];
        for (byte, place) in [(own.first, 0..2), (own.last, 2..4)] {
            if let Some(byte) = byte {
                self.split.push(TransposeJob {
                    code,
                    entries: [1, 2],
                    from: at(byte)?,
                    to: backend.view::<u8>(&staged, place)?,
                });
            }
        }
        let sent = 2 - usize::from(own.first.is_some())..2 + usize::from(own.last.is_some());
        let mut end = 0;
        let ranges: Vec<Range<usize>> = pieces
            .iter()
            .map(|halves| {
                end += halves.len();
                end - halves.len()..end
            })
            .collect();
        let arrived = backend.alloc::<u8>(end)?;
        // In rank order the low half of a byte comes right before its high half.
        for (byte, low) in pieces
            .iter()
            .filter_map(|p| p.last)
            .zip((0..end).step_by(2))
        {
            self.join.push(TransposeJob {
                code,
                entries: [2, 1],
                from: backend.view::<u8>(&arrived, low..low + 2)?,
                to: at(byte)?,
            });
        }
        self.moves.push(Move {
            source: backend.view::<u8>(&staged, sent)?,
            dest: arrived,
            ranges,
        });
        Ok(())
    }

    /// Plans the work around the gather, once everything is added.
    pub(super) fn plan(&mut self) -> Result<(), ShardError> {
        let plan = |jobs: &mut Vec<TransposeJob<B>>| match std::mem::take(jobs) {
            jobs if jobs.is_empty() => Ok(None),
            jobs => self.backend.plan(Work::Transpose(jobs)).map(Some),
        };
        (self.before, self.after) = (plan(&mut self.split)?, plan(&mut self.join)?);
        Ok(())
    }

    /// Bytes of this rank's pieces.
    pub(super) fn sent_bytes(&self) -> usize {
        self.moves.iter().map(|m| m.ranges[self.rank].len()).sum()
    }

    /// The batch of the all-gather: the same buffers in the same order on every rank.
    pub(super) fn items(&self) -> impl Iterator<Item = GatherItem<'_, B>> {
        self.moves.iter().map(|m| GatherItem {
            source: &m.source,
            dest: &m.dest,
            ranges: &m.ranges,
        })
    }
}

/// The bytes at the ends of a slice of which the slice has one half.
#[derive(Debug)]
struct Halves {
    /// The byte whose high half is the slice's first element.
    first: Option<usize>,
    /// The byte whose low half is the slice's last element.
    last: Option<usize>,
}

impl Halves {
    fn of(shard: &FlatShard) -> Self {
        let (elements, per_byte) = (shard.elements(), shard.code().entries_per_byte());
        let half = |at: usize| {
            let cut = !shard.is_empty() && !at.is_multiple_of(per_byte);
            cut.then_some(at / per_byte)
        };
        Self {
            first: half(elements.start),
            last: half(elements.end),
        }
    }

    fn len(&self) -> usize {
        usize::from(self.first.is_some()) + usize::from(self.last.is_some())
    }
}

//! [`HookInput`] and [`HookOutput`]: what travels, and what the full tensor is made of.

use std::ops::Range;

use lowp_format::{BufferKey, BufferSpec};

/// A buffer of which every rank sends its piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookInput {
    /// The buffer.
    pub spec: BufferSpec,
    /// Bytes of each rank's piece, in rank order; none where the buffer travels in the other phase alone
    /// ([`crate::GatherHooks::phases`]).
    pub pieces: Vec<usize>,
    /// Bytes that every rank sends: its piece, then padding of any content.
    pub padded: usize,
    /// Whether pieces are interleaved when all are there; otherwise they follow one another.
    pub interleaved: bool,
    /// Whether pieces are in the order of rows and the buffer in that of columns: they are transposed when all are there.
    pub transposed: bool,
}

impl HookInput {
    /// Bytes that arrive: those of all ranks, in rank order.
    pub fn arriving(&self) -> usize {
        self.pieces.len() * self.padded
    }

    /// Where each rank's piece lies in what arrives, padding left out.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let starts = (0..).step_by(self.padded.max(1));
        let ranges = self.pieces.iter().zip(starts);
        ranges.map(|(&bytes, start)| start..start + bytes)
    }

    /// The part of what arrives in which the pieces follow one another without padding between them, if they do.
    /// They do wherever all ranks before the last one with rows have as many, which is how
    /// [`lowp_format::RowCuts::new`] and FSDP2 cut.
    pub fn joined(&self) -> Option<Range<usize>> {
        let mut joined: Option<Range<usize>> = None;
        for range in self.ranges().filter(|range| !range.is_empty()) {
            joined = match joined {
                None => Some(range),
                Some(before) if before.end == range.start => Some(before.start..range.end),
                Some(_) => return None,
            };
        }
        Some(joined.unwrap_or(0..0))
    }

    /// The part of what arrives that is the full buffer, if there is one: nothing is copied.
    pub fn whole(&self) -> Option<Range<usize>> {
        if self.interleaved || self.transposed {
            None
        } else {
            self.joined()
        }
    }
}

/// What a buffer of the full tensor is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookSource {
    /// It is a part of what arrived, and keeps that memory in use.
    Arrived {
        /// The number of the input.
        input: usize,
        /// The bytes of the input.
        bytes: Range<usize>,
    },
    /// Memory of its own, which the pieces of an input are copied, interleaved or transposed into.
    Pieces {
        /// The number of the input.
        input: usize,
    },
    /// Memory of its own, which another buffer is transposed into.
    TransposeOf(BufferKey),
    /// The shard's own buffer: its content is equal on all ranks.
    Shard,
}

/// A buffer of the full tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookOutput {
    /// The buffer of the full tensor.
    pub spec: BufferSpec,
    /// Bytes of the buffer.
    pub bytes: usize,
    /// What the buffer is made of.
    pub source: HookSource,
    /// Whether it is there only after [`crate::FullTensor::derive`].
    pub delayed: bool,
}

impl HookOutput {
    /// Whether it has memory of its own, which is allocated for it.
    pub fn has_memory(&self) -> bool {
        matches!(
            self.source,
            HookSource::Pieces { .. } | HookSource::TransposeOf(_)
        )
    }
}

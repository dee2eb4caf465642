//! [`Planner`]: what the checks of all jobs share. It notes which buffers they touch, and how.

use std::ops::Range;

use half::bf16;
use lowp_format::{BufferSpec, Extent, Orientation, Shape};

use super::access::{Access, AccessList, Mode};
use crate::{Backend, BlockAmax, KernelError, Slot, Source};

/// What goes through the jobs of a plan, and notes what they touch.
pub(super) struct Planner<'b, B: Backend> {
    pub(super) backend: &'b B,
    pub(super) access: Access<B>,
    pub(super) elements: usize,
}

pub(super) type Done = Result<(), KernelError>;

impl<B: Backend> Planner<'_, B> {
    /// Notes a use of `buffer`, which must hold `needed` entries.
    pub(super) fn whole<T: AccessList>(
        &mut self,
        job: usize,
        what: impl std::fmt::Display,
        buffer: &B::Buffer<T>,
        needed: usize,
        mode: Mode,
    ) -> Done {
        let what = format!("{what} of job {job}");
        check_length(&what, needed, self.backend.len::<T>(buffer))?;
        self.access.add::<T>(self.backend, job, what, buffer, mode)
    }

    /// Notes a use of `buffer`, of which entry `index` must exist.
    pub(super) fn entry(
        &mut self,
        job: usize,
        what: &str,
        buffer: &B::Buffer<f32>,
        index: usize,
        mode: Mode,
    ) -> Done {
        let what = format!("{what} of job {job}");
        let found = self.backend.len::<f32>(buffer);
        if index >= found {
            let needed = index.saturating_add(1);
            return Err(KernelError::Length {
                what,
                needed,
                found,
            });
        }
        self.access
            .add::<f32>(self.backend, job, what, buffer, mode)
    }

    /// Notes a use of `entries` of a vector that begin at a slot. Without entries nothing is touched, but the slot must lie in
    /// its vector or at its end.
    pub(super) fn slot(
        &mut self,
        job: usize,
        what: &'static str,
        slot: &Slot<B>,
        entries: usize,
        mode: Mode,
    ) -> Done {
        let Slot { buffer, index } = slot;
        match entries.checked_sub(1) {
            Some(last) => self.entry(job, what, buffer, index.saturating_add(last), mode),
            None => range(what, *index, 0, self.backend.len::<f32>(buffer)).map(drop),
        }
    }

    pub(super) fn len(&self, source: &Source<B>) -> usize {
        source.len(self.backend)
    }

    pub(super) fn source(
        &mut self,
        job: usize,
        what: &str,
        source: &Source<B>,
        needed: usize,
    ) -> Done {
        self.elements = self.elements.saturating_add(needed);
        self.values(job, what, source, needed, Mode::Read)
    }

    pub(super) fn values(
        &mut self,
        job: usize,
        what: &str,
        values: &Source<B>,
        needed: usize,
        mode: Mode,
    ) -> Done {
        match values {
            Source::F32(buffer) => self.whole::<f32>(job, what, buffer, needed, mode),
            Source::Bf16(buffer) => self.whole::<bf16>(job, what, buffer, needed, mode),
        }
    }

    /// Notes a use of the amaxes of one kind of blocks in a vector.
    pub(super) fn blocks(
        &mut self,
        job: usize,
        what: &'static str,
        shape: Shape,
        part: &BlockAmax,
        vector: &B::Buffer<f32>,
    ) -> Done {
        let entries = block_entries(shape, part.block)?;
        let len = self.backend.len::<f32>(vector);
        match range(what, part.start, entries, len)?.last() {
            Some(last) => self.entry(job, what, vector, last, Mode::Shared),
            None => Ok(()),
        }
    }
}

/// Checks a block that codes share a scale in: the device keeps its sides in 32 bits.
pub(super) fn check_block(block: [usize; 2]) -> Result<(), KernelError> {
    let most = BufferSpec::MAX_SIDE;
    match block.iter().find(|side| !(1..=most).contains(*side)) {
        Some(&side) => Err(KernelError::BlockSide { side, most }),
        None => Ok(()),
    }
}

/// Number of blocks of `shape` that have an amax each; a line may be one.
pub(super) fn block_entries(shape: Shape, block: [usize; 2]) -> Result<usize, KernelError> {
    let lines = Orientation::ALL.map(|orientation| Extent::Line.block(orientation));
    if !lines.contains(&block) {
        check_block(block)?;
    }
    let blocks = |len: usize, side: usize| match side {
        BufferSpec::WHOLE => 1,
        side => len.div_ceil(side),
    };
    Ok(blocks(shape.rows, block[0]) * blocks(shape.cols, block[1]))
}

/// Checks that `what` has `needed` entries.
pub(super) fn check_length(what: &str, needed: usize, found: usize) -> Done {
    if found == needed {
        return Ok(());
    }
    Err(KernelError::Length {
        what: what.to_owned(),
        needed,
        found,
    })
}

pub(super) fn missing(job: usize, what: &str) -> Done {
    Err(KernelError::Missing {
        what: format!("{what} of job {job}"),
    })
}

/// Elements of `shape`, whose sides are small enough to compute with.
pub(super) fn elements(shape: Shape) -> Result<usize, KernelError> {
    shape.check()?;
    Ok(shape.elements())
}

/// `start..start + count` of a buffer of `len` entries.
pub(crate) fn range(
    what: &'static str,
    start: usize,
    count: usize,
    len: usize,
) -> Result<Range<usize>, KernelError> {
    match start.checked_add(count) {
        Some(end) if end <= len => Ok(start..end),
        end => {
            let end = end.unwrap_or(usize::MAX);
            Err(KernelError::Range {
                what,
                start,
                end,
                len,
            })
        }
    }
}

//! What the operations share: what a job of the device table must say of itself, and how addresses come
//! into one.

use lowp_format::{Axis, SourceRounding};

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::code;
use crate::{KernelError, Source, Target};

/// A job of the device table.
pub(crate) trait Job: Copy {
    /// The kernels of the operation. The first one runs any such job, unless [`Job::launches`] says which kernel runs it.
    const KERNELS: &'static [Kernel];
    /// Whether tiles run from the last to the first: what such a launch read or wrote last is in the cache for the
    /// next launch, which begins with the first tile.
    const BACKWARDS: bool = false;
    /// Jobs by the launch that they need: all in one, but for kinds that have kernels of their own.
    fn launches(jobs: Vec<Self>) -> Vec<Vec<Self>> {
        vec![jobs]
    }
    /// The kernel that runs `jobs`, which were laid out, in one launch: the general one, or one that
    /// knows less and is faster for these.
    fn kernel(_jobs: &[Self]) -> Kernel {
        Self::KERNELS[0]
    }
    /// Fills the fields that follow from the others.
    fn lay_out(&mut self);
    /// Fills those that follow from all jobs of a launch, once each was laid out.
    fn lay_out_together(_jobs: &mut [Self]) {}
    /// Thread blocks of a job that was laid out.
    fn tiles(&self) -> u64;
}

pub(super) fn cdiv(a: u64, b: u64) -> u64 {
    a.div_ceil(b.max(1))
}

/// Bits of one entry of `code`.
pub(super) fn bits(code: u8) -> u64 {
    match code {
        code::E2M1 => 4,
        code::BF16 => 16,
        code::F32 => 32,
        _ => 8,
    }
}

/// Whether `pointer` and every multiple of `pitch` bytes after it are aligned to `bytes`.
pub(super) fn aligned(pointer: u64, pitch: u64, bytes: u64) -> bool {
    pointer.is_multiple_of(bytes) && pitch.is_multiple_of(bytes)
}

/// The kernel of all `jobs`, if they are of one kind that has a kernel of its own.
pub(super) fn of_one_kind<J>(jobs: &[J], kind: impl Fn(&J) -> Option<Kernel>) -> Option<Kernel> {
    let (first, rest) = jobs.split_first()?;
    let first = kind(first)?;
    let same = rest.iter().all(|job| kind(job) == Some(first));
    same.then_some(first)
}

/// A vector of values.
#[derive(Clone, Copy)]
pub(super) struct Vector {
    pub(super) pointer: u64,
    pub(super) code: u8,
    /// Number of values.
    pub(super) len: u64,
}

impl Vector {
    pub(super) fn new(values: &Source<Cuda>) -> Self {
        let (pointer, code, len) = match values {
            Source::F32(buffer) => (buffer.pointer(), code::F32, buffer.len()),
            Source::Bf16(buffer) => (buffer.pointer(), code::BF16, buffer.len()),
        };
        Self {
            pointer,
            code,
            len: len as u64,
        }
    }
}

pub(super) fn via_bf16(rounding: SourceRounding) -> u8 {
    u8::from(rounding == SourceRounding::ViaBf16)
}

/// Block sides; 0 where blocks have no scale. They are at most [`lowp_format::BufferSpec::MAX_SIDE`], or whole: larger
/// than any matrix.
pub(super) fn sides(block: Option<[usize; 2]>) -> [u32; 2] {
    block.map_or([0, 0], |block| {
        block.map(|side| u32::try_from(side).unwrap_or(u32::MAX))
    })
}

pub(super) fn transposed(target: &Target<Cuda>) -> usize {
    usize::from(target.spec.axes[0] == Axis::Cols)
}

/// Puts something into the first job that takes it; where none does, into another job for the same
/// source.
pub(super) fn place<J: Copy>(
    jobs: &mut Vec<J>,
    base: J,
    mut put: impl FnMut(&mut J) -> bool,
) -> Result<(), KernelError> {
    if jobs.iter_mut().any(&mut put) {
        return Ok(());
    }
    let mut job = base;
    let placed = put(&mut job);
    jobs.push(job);
    if placed {
        return Ok(());
    }
    Err(KernelError::FusedTargets)
}

/// Puts `pointer` where there is nothing.
pub(super) fn put(slot: &mut u64, pointer: u64) -> bool {
    let free = *slot == 0;
    if free {
        *slot = pointer;
    }
    free
}

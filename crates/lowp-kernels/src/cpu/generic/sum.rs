//! Sums of vectors, and their conversion from dtype to dtype.

use half::bf16;

use super::convert::FloatSlice;
use super::stored::Stored;
use super::{Context, for_each, source};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::lanes::{Isa, Kernel, LANES, Lanes};
use crate::{ConvertJob, KernelError, Source, SumJob};

/// Elements of one task.
const TASK: usize = 64 * 1024;

/// `into += from`, or `into = from` where `ADD` is false.
pub(super) struct Merge<'a, F, I, const ADD: bool> {
    pub(super) from: &'a [F],
    pub(super) into: &'a mut [I],
}

impl<F: Stored, I: Stored, const ADD: bool> Merge<'_, F, I, ADD> {
    #[inline(always)]
    fn line<L: Lanes>(lanes: L, from: &[F; LANES], into: &mut [I; LANES]) {
        let mut x = F::load(lanes, from);
        if ADD {
            x = lanes.add(I::load(lanes, into), x);
        }
        I::store(lanes, x, into);
    }
}

impl<F: Stored, I: Stored, const ADD: bool> Kernel for Merge<'_, F, I, ADD> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (froms, from) = self.from.as_chunks::<LANES>();
        let (intos, into) = self.into.as_chunks_mut::<LANES>();
        for (from, into) in froms.iter().zip(intos) {
            Self::line(lanes, from, into);
        }
        // The tail is a line of which only the beginning counts.
        let (mut last_from, mut last_into) = ([F::default(); LANES], [I::default(); LANES]);
        let count = into.len();
        last_from[..count].copy_from_slice(from);
        last_into[..count].copy_from_slice(into);
        Self::line(lanes, &last_from, &mut last_into);
        into.copy_from_slice(&last_into[..count]);
    }
}

/// A range of a vector that is written.
enum FloatSliceMut<'v> {
    F32(&'v mut [f32]),
    Bf16(&'v mut [bf16]),
}

struct Task<'v> {
    from: FloatSlice<'v>,
    into: FloatSliceMut<'v>,
}

impl Task<'_> {
    fn add(self, isa: Isa) {
        use {FloatSlice as Read, FloatSliceMut as Write};
        fn add<F: Stored, I: Stored>(isa: Isa, from: &[F], into: &mut [I]) {
            isa.run(Merge::<F, I, true> { from, into });
        }
        match (self.from, self.into) {
            (Read::F32(from), Write::F32(into)) => add(isa, from, into),
            (Read::F32(from), Write::Bf16(into)) => add(isa, from, into),
            (Read::Bf16(from), Write::F32(into)) => add(isa, from, into),
            (Read::Bf16(from), Write::Bf16(into)) => add(isa, from, into),
        }
    }

    fn convert(self, isa: Isa) {
        use {FloatSlice as Read, FloatSliceMut as Write};
        match (self.from, self.into) {
            // Not by way of arithmetic, which quiets a signalling NaN.
            (Read::F32(from), Write::F32(into)) => into.copy_from_slice(from),
            (Read::Bf16(from), Write::Bf16(into)) => into.copy_from_slice(from),
            (Read::F32(from), Write::Bf16(into)) => {
                isa.run(Merge::<f32, bf16, false> { from, into });
            }
            (Read::Bf16(from), Write::F32(into)) => {
                isa.run(Merge::<bf16, f32, false> { from, into });
            }
        }
    }
}

/// The tasks of one job.
fn tasks<'v>(
    from: &Source<Cpu>,
    into: &Source<Cpu>,
    views: &mut AllViews<'v>,
) -> Result<Vec<Task<'v>>, KernelError> {
    let from = source(from, views)?;
    let starts = (0..from.len()).step_by(TASK);
    let pieces = starts.map(|start| from.slice(start..(start + TASK).min(from.len())));
    let task = |(from, into)| Task { from, into };
    Ok(match into {
        Source::F32(buffer) => {
            let into = views.floats.take(buffer)?.chunks_mut(TASK);
            pieces.zip(into.map(FloatSliceMut::F32)).map(task).collect()
        }
        Source::Bf16(buffer) => {
            let into = views.halves.take(buffer)?.chunks_mut(TASK);
            pieces
                .zip(into.map(FloatSliceMut::Bf16))
                .map(task)
                .collect()
        }
    })
}

/// Runs every sum of a plan.
pub(crate) fn sums(
    jobs: &[SumJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let pairs = jobs.iter().map(|job| (&job.from, &job.into));
    run(pairs, context, views, Task::add)
}

/// Runs every conversion of a plan.
pub(crate) fn conversions(
    jobs: &[ConvertJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let pairs = jobs.iter().map(|job| (&job.from, &job.into));
    run(pairs, context, views, Task::convert)
}

/// Runs `work` on every piece of every pair of vectors.
fn run<'v, 'j>(
    pairs: impl Iterator<Item = (&'j Source<Cpu>, &'j Source<Cpu>)>,
    context: &Context<'_>,
    views: &mut AllViews<'v>,
    work: impl Fn(Task<'v>, Isa) + Sync + Send,
) -> Result<(), KernelError> {
    let mut all = Vec::new();
    for (from, into) in pairs {
        all.extend(tasks(from, into, views)?);
    }
    for_each(context, all, |task| {
        work(task, context.isa);
        Ok(())
    })
}

//! The kernels on slices, written once for every instruction set.

use std::sync::{Mutex, PoisonError};

use self::convert::FloatSlice;
use super::Cpu;
use super::access::AllViews;
use super::threads;
use crate::lanes::Isa;
use crate::{KernelError, Source, StepScalars};

pub(crate) mod amax;
mod choose;
mod codes;
mod convert;
pub(crate) mod decode;
pub(crate) mod encode;
mod factors;
pub(crate) mod flat;
mod hadamard;
pub(crate) mod history;
pub(crate) mod interleave;
mod lines;
mod maxima;
pub(crate) mod momentum;
pub(crate) mod norm;
pub(crate) mod normalize;
mod quantize;
pub(crate) mod rearrange;
pub(crate) mod repack;
mod rule;
mod state;
pub(crate) mod step_scalars;
mod store;
mod stored;
pub(crate) mod sum;
pub(crate) mod sum_parts;
mod tensor;
pub(crate) mod transpose;
pub(crate) mod update;

/// Work on fewer elements than this runs on the calling thread: waking others costs more.
const INLINE_ELEMENTS: usize = 16 * 1024;

/// What a run fixes for all its tasks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context<'a> {
    pub(crate) isa: Isa,
    pub(crate) scalars: &'a StepScalars,
    /// Elements of all jobs.
    pub(crate) elements: usize,
    /// Elements from which decodes write past the caches.
    pub(crate) streamed: usize,
}

/// The threads for `tasks` tasks: 1 where others do not pay.
fn threads_for(context: &Context<'_>, tasks: usize) -> usize {
    if context.elements < INLINE_ELEMENTS || tasks < 2 {
        1
    } else {
        threads::available()
    }
}

/// Runs independent tasks, in parallel where that pays.
fn for_each<T: Send>(
    context: &Context<'_>,
    tasks: Vec<T>,
    run: impl Fn(T) -> Result<(), KernelError> + Sync + Send,
) -> Result<(), KernelError> {
    let threads = threads_for(context, tasks.len());
    if threads == 1 {
        return tasks.into_iter().try_for_each(run);
    }
    // Each is taken once, so that what runs in parallel is compiled once, for numbers.
    let slots: Vec<_> = tasks
        .into_iter()
        .map(|task| Mutex::new(Some(task)))
        .collect();
    threads::in_parallel(threads, slots.len(), &|index| {
        let task = slots[index]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        task.map_or(Ok(()), &run)
    })
}

/// Runs independent tasks and returns their results in order.
fn map<T: Send, U: Send>(
    context: &Context<'_>,
    tasks: Vec<T>,
    run: impl Fn(T) -> U + Sync + Send,
) -> Result<Vec<U>, KernelError> {
    let mut results: Vec<Option<U>> = tasks.iter().map(|_| None).collect();
    let tasks = tasks.into_iter().zip(&mut results).collect();
    for_each(context, tasks, |(task, result)| {
        *result = Some(run(task));
        Ok(())
    })?;
    Ok(results.into_iter().flatten().collect())
}

/// The values of `source`.
fn source<'v>(
    source: &Source<Cpu>,
    views: &mut AllViews<'v>,
) -> Result<FloatSlice<'v>, KernelError> {
    match source {
        Source::F32(buffer) => views.floats.read(buffer).map(FloatSlice::F32),
        Source::Bf16(buffer) => views.halves.read(buffer).map(FloatSlice::Bf16),
    }
}

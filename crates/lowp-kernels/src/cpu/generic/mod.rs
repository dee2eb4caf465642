//! The kernels on slices, written once for every instruction set.

use rayon::prelude::*;

use self::convert::Values;
use super::Cpu;
use super::access::AllViews;
use super::threads;
use crate::lanes::Isa;
use crate::{KernelError, Source, StepScalars};

pub(crate) mod adamw;
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
mod maxima;
pub(crate) mod norm;
mod quantize;
pub(crate) mod repack;
pub(crate) mod step_scalars;
mod store;
pub(crate) mod sum;
mod tensor;
pub(crate) mod transpose;

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
    match threads_for(context, tasks.len()) {
        1 => tasks.into_iter().try_for_each(run),
        more => threads::install(more, || tasks.into_par_iter().try_for_each(run))?,
    }
}

/// Runs independent tasks and returns their results in order.
fn map<T: Send, U: Send>(
    context: &Context<'_>,
    tasks: Vec<T>,
    run: impl Fn(T) -> U + Sync + Send,
) -> Result<Vec<U>, KernelError> {
    match threads_for(context, tasks.len()) {
        1 => Ok(tasks.into_iter().map(run).collect()),
        more => threads::install(more, || tasks.into_par_iter().map(run).collect()),
    }
}

/// The values of `source`.
fn source<'v>(source: &Source<Cpu>, views: &mut AllViews<'v>) -> Result<Values<'v>, KernelError> {
    match source {
        Source::F32(buffer) => views.floats.read(buffer).map(Values::F32),
        Source::Bf16(buffer) => views.halves.read(buffer).map(Values::Bf16),
    }
}

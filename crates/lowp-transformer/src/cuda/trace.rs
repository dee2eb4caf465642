//! [`Trace`]: where the time of a stream goes.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lowp_kernels::{Cuda, CudaMark, KernelError};

/// What a stream that waits for gathered weights is said to spend its time on ([`Spent::what`]).
pub const GATHERS: &str = "gather of weights";

/// What a step spent its time on.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The stream that computes, by work, the most first.
    pub spent: Vec<Spent>,
    /// Milliseconds of the stream that gathers weights from the begin to the end of each gather; `None` where it gathered none.
    pub gathering: Option<f64>,
}

/// What a stream spent on one kind of work.
#[derive(Clone, Debug, PartialEq)]
pub struct Spent {
    /// The work.
    pub what: String,
    /// How often it ran.
    pub count: usize,
    /// Milliseconds of the device, with what it waited for before.
    pub milliseconds: f64,
}

/// Marks behind each piece of work, while someone asked for them.
#[derive(Debug)]
pub(super) struct Trace {
    cuda: Cuda,
    marks: Mutex<Option<Vec<(String, CudaMark)>>>,
    /// The begin and the end of each gather, on its stream.
    gathers: Mutex<Vec<CudaMark>>,
}

impl Trace {
    pub(super) fn new(cuda: &Cuda) -> Self {
        Self {
            cuda: cuda.clone(),
            marks: Mutex::default(),
            gathers: Mutex::default(),
        }
    }

    /// Begins to mark.
    pub(super) fn start(&self) -> Result<(), KernelError> {
        let first = ("start".to_owned(), self.cuda.mark()?);
        lock(&self.gathers).clear();
        *lock(&self.marks) = Some(vec![first]);
        Ok(())
    }

    /// Marks the end of what `label` names.
    pub(super) fn mark(&self, label: impl FnOnce() -> String) -> Result<(), KernelError> {
        let mut marks = lock(&self.marks);
        if let Some(marks) = marks.as_mut() {
            marks.push((label(), self.cuda.mark()?));
        }
        Ok(())
    }

    /// Marks the begin or the end of a gather on its `stream`.
    pub(super) fn mark_gather(&self, stream: &Cuda) -> Result<(), KernelError> {
        if lock(&self.marks).is_some() {
            lock(&self.gathers).push(stream.mark()?);
        }
        Ok(())
    }

    /// Ends the marks. Waits for the device.
    pub(super) fn take(&self) -> Result<Profile, KernelError> {
        let marks = lock(&self.marks).take().unwrap_or_default();
        let gathers = std::mem::take(&mut *lock(&self.gathers));
        let mut sums: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
        for pair in marks.windows(2) {
            let [(_, before), (what, behind)] = pair else {
                continue;
            };
            let sum = sums.entry(what).or_default();
            sum.0 += 1;
            sum.1 += f64::from(before.milliseconds_to(behind)?);
        }
        let spent = |(what, (count, milliseconds)): (&str, (usize, f64))| Spent {
            what: what.to_owned(),
            count,
            milliseconds,
        };
        let mut all: Vec<Spent> = sums.into_iter().map(spent).collect();
        all.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
        let mut gathering = None;
        for pair in gathers.chunks_exact(2) {
            let milliseconds = f64::from(pair[0].milliseconds_to(&pair[1])?);
            *gathering.get_or_insert(0.0) += milliseconds;
        }
        Ok(Profile {
            spent: all,
            gathering,
        })
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

//! [`Trace`]: where the time of a stream goes.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use lowp_kernels::{Cuda, CudaMark, KernelError};

/// What a stream that waits for gathered weights is said to spend its time on ([`Spent::what`]).
pub const GATHERS: &str = "gather of weights";

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
}

impl Trace {
    pub(super) fn new(cuda: &Cuda) -> Self {
        Self {
            cuda: cuda.clone(),
            marks: Mutex::default(),
        }
    }

    /// Begins to mark.
    pub(super) fn start(&self) -> Result<(), KernelError> {
        let first = ("start".to_owned(), self.cuda.mark()?);
        *self.marks.lock().unwrap_or_else(PoisonError::into_inner) = Some(vec![first]);
        Ok(())
    }

    /// Marks the end of what `label` names.
    pub(super) fn mark(&self, label: impl FnOnce() -> String) -> Result<(), KernelError> {
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(marks) = marks.as_mut() {
            marks.push((label(), self.cuda.mark()?));
        }
        Ok(())
    }

    /// Ends the marks: what each kind of work took, the most first. Waits for the device.
    pub(super) fn take(&self) -> Result<Vec<Spent>, KernelError> {
        let marks = self
            .marks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let marks = marks.unwrap_or_default();
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
        Ok(all)
    }
}

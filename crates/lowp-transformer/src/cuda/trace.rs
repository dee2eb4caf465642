//! [`Trace`]: where the time of a stream goes.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lowp_kernels::{Cuda, CudaMark, KernelError};
use lowp_shard::GatherPoint;
use lowp_train::network::ProfileEntry;

/// What a stream that waits for gathered weights is said to spend its time on ([`ProfileEntry::what`]).
pub(super) const GATHERS: &str = "gather of weights";

/// The same for an embedding or a head.
pub(super) const VAR_GATHERS: &str = "gather of embeddings and heads";

/// What a step spent its time on.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The stream that computes, by work, the most first.
    pub spent: Vec<ProfileEntry>,
    /// The stream that gathers weights; `None` where it gathered none.
    pub gathers: Option<Gathers>,
}

/// What gathers of weights took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gathers {
    /// Milliseconds from the begin to the end of each.
    pub milliseconds: f64,
    /// Those of them in which the stream that computes did not wait for a weight.
    pub hidden: f64,
}

/// A mark after each piece of work, while someone asked for marks.
#[derive(Debug)]
pub(super) struct Trace {
    cuda: Cuda,
    marks: Mutex<Option<Vec<(String, CudaMark)>>>,
    /// The begin and the end of each gather, on its stream.
    gathers: Mutex<Vec<(CudaMark, Option<CudaMark>)>>,
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

    /// Marks a point of a gather on its `stream`.
    pub(super) fn mark_gather(&self, stream: &Cuda, point: GatherPoint) -> Result<(), KernelError> {
        if lock(&self.marks).is_none() {
            return Ok(());
        }
        let (mark, mut gathers) = (stream.mark()?, lock(&self.gathers));
        match (point, gathers.last_mut()) {
            (GatherPoint::Begin, _) => gathers.push((mark, None)),
            (GatherPoint::End, Some((_, end))) => *end = Some(mark),
            // It began before anyone asked.
            (GatherPoint::End, None) => {}
        }
        Ok(())
    }

    /// Ends the marks. Waits for the device.
    pub(super) fn take(&self) -> Result<Profile, KernelError> {
        let marks = lock(&self.marks).take().unwrap_or_default();
        let gathers = std::mem::take(&mut *lock(&self.gathers));
        let mut waits: Vec<[f64; 2]> = Vec::new();
        let since_start = |mark: &CudaMark| match marks.first() {
            Some((_, start)) => start.milliseconds_to(mark).map(f64::from),
            None => Ok(0.0),
        };
        let mut sums: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
        for pair in marks.windows(2) {
            let [(_, before), (what, after)] = pair else {
                continue;
            };
            let sum = sums.entry(what).or_default();
            sum.0 += 1;
            sum.1 += f64::from(before.milliseconds_to(after)?);
            if what == GATHERS {
                waits.push([since_start(before)?, since_start(after)?]);
            }
        }
        let spent = |(what, (count, milliseconds)): (&str, (usize, f64))| ProfileEntry {
            what: what.to_owned(),
            count,
            milliseconds,
        };
        let mut all: Vec<ProfileEntry> = sums.into_iter().map(spent).collect();
        all.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
        let mut timed = Vec::new();
        for (begin, end) in &gathers {
            // One that failed has no end.
            if let Some(end) = end {
                timed.push([since_start(begin)?, since_start(end)?]);
            }
        }
        Ok(Profile {
            spent: all,
            gathers: (!timed.is_empty()).then(|| Gathers::of(&timed, &waits)),
        })
    }
}

impl Gathers {
    /// Those of `gathers`, where another stream had these `waits`: all from begin to end.
    fn of(gathers: &[[f64; 2]], waits: &[[f64; 2]]) -> Self {
        let mut sum = Self::default();
        for &[begin, end] in gathers {
            let beside = |&[from, to]: &[f64; 2]| (to.min(end) - from.max(begin)).max(0.0);
            let exposed: f64 = waits.iter().map(beside).sum();
            sum.milliseconds += end - begin;
            sum.hidden += (end - begin - exposed).max(0.0);
        }
        sum
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wait for other work of the stream that gathers hides nothing of other gathers.
    #[test]
    fn what_waits_overlap_is_not_hidden() {
        let gathers = [[0.0, 4.0], [10.0, 12.0], [20.0, 21.0]];
        let waits = [[3.0, 4.0], [5.0, 11.0], [19.0, 30.0]];
        let found = Gathers::of(&gathers, &waits);
        let expected = Gathers {
            milliseconds: 7.0,
            hidden: 3.0 + 1.0,
        };
        assert_eq!(found, expected);
        assert_eq!(Gathers::of(&[], &waits), Gathers::default());
    }
}

//! [`Lending`]: memory that one user at a time borrows.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lowp_kernels::{Backend, KernelError};

/// Things that nobody borrows now, each with the point in its stream after which it is free.
type Free<B, T> = Vec<(Arc<T>, <B as Backend>::Event)>;

/// Memory whose users do not overlap.
#[derive(Debug)]
pub(super) struct Lending<B: Backend, T>(Mutex<Free<B, T>>);

impl<B: Backend, T> Lending<B, T> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// What was given back last, for work of `streams`: they follow its last use. What was given back within a capture stays with
    /// the graph, which writes to it at every launch.
    pub(super) fn take(&self, streams: &[&B]) -> Result<Option<Arc<T>>, KernelError> {
        let mut free = self.lock();
        for at in (0..free.len()).rev() {
            let last_use = &free[at].1;
            match streams.iter().try_for_each(|stream| stream.wait(last_use)) {
                Ok(()) => return Ok(Some(free.remove(at).0)),
                Err(KernelError::InCapture { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Takes `memory` back, to be lent after the work that `stream` has by now. A device that cannot say when it is done does not
    /// get the memory again.
    pub(super) fn give_back(&self, memory: &Arc<T>, stream: &B) {
        if let Ok(last_use) = stream.record() {
            self.lock().push((Arc::clone(memory), last_use));
        }
    }

    /// Changes under this lock are whole even if a backend panicked in between.
    fn lock(&self) -> MutexGuard<'_, Free<B, T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

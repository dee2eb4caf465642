//! [`CpuGraph`]: calls taken by [`crate::Backend::capture`], to be done later.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use crate::KernelError;

type Call = Box<dyn Fn() -> Result<(), KernelError> + Send + Sync>;

thread_local! {
    /// The calls of the capture that this thread is in.
    static CAPTURE: RefCell<Option<Vec<Call>>> = const { RefCell::new(None) };
}

/// Captured calls, in order.
#[derive(Clone)]
pub struct CpuGraph {
    calls: Arc<[Call]>,
}

impl CpuGraph {
    /// Takes the calls that `work` makes on this thread.
    pub(super) fn capture<E: From<KernelError>>(
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let nested = CAPTURE.with_borrow_mut(|calls| match calls {
            Some(_) => true,
            None => {
                *calls = Some(Vec::new());
                false
            }
        });
        if nested {
            return Err(in_capture("a capture").into());
        }
        /// Ends the capture also where `work` panics.
        struct End;
        impl Drop for End {
            fn drop(&mut self) {
                CAPTURE.take();
            }
        }
        let _end = End;
        work()?;
        let calls = CAPTURE.take().unwrap_or_default();
        if calls.is_empty() {
            return Err(nothing().into());
        }
        Ok(Self {
            calls: calls.into(),
        })
    }

    /// Does the calls.
    pub(super) fn launch(&self) -> Result<(), KernelError> {
        if is_capturing() {
            return Err(in_capture("the launch of a graph"));
        }
        self.calls.iter().try_for_each(|call| call())
    }
}

impl fmt::Debug for CpuGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuGraph({} calls)", self.calls.len())
    }
}

/// Does `call`, or keeps it for the graph that is captured.
pub(super) fn call(
    call: impl Fn() -> Result<(), KernelError> + Send + Sync + 'static,
) -> Result<(), KernelError> {
    let done = CAPTURE.with_borrow_mut(|calls| match calls {
        Some(calls) => {
            calls.push(Box::new(call));
            None
        }
        None => Some(call),
    });
    done.map_or(Ok(()), |call| call())
}

/// Whether this thread captures.
pub(super) fn is_capturing() -> bool {
    CAPTURE.with_borrow(Option::is_some)
}

/// An error where this thread captures: `what` cannot be captured.
pub(super) fn not_in_capture(what: &'static str) -> Result<(), KernelError> {
    if is_capturing() {
        return Err(in_capture(what));
    }
    Ok(())
}

/// `what` cannot be captured.
fn in_capture(what: &'static str) -> KernelError {
    KernelError::InCapture { what }
}

/// A capture of nothing.
pub(crate) fn nothing() -> KernelError {
    KernelError::Missing {
        what: "work in a capture".to_owned(),
    }
}

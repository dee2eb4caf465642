//! [`GatherWatch`]: what is called for gathers as they are given to a stream.

use std::fmt;
use std::sync::Arc;

use lowp_kernels::{Backend, KernelError};

/// Called with the stream of a gather, right before the stream is given the gather and right after it: a device can mark both points to
/// time it. What the host does for the gather before is not between them: ranks that compare what they gather, the capture of a graph.
pub struct GatherWatch<B>(Arc<Call<B>>);

type Call<B> = dyn Fn(&B, GatherPoint) -> Result<(), KernelError> + Send + Sync;

/// A point of a gather.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatherPoint {
    /// Before it; once more where a graph cannot be launched and the calls themselves are given.
    Begin,
    /// After it; a gather that fails has none.
    End,
}

impl<B: Backend> GatherWatch<B> {
    /// A watch that calls `call` at each point.
    pub fn new(
        call: impl Fn(&B, GatherPoint) -> Result<(), KernelError> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(call))
    }

    pub(super) fn tell(&self, stream: &B, point: GatherPoint) -> Result<(), KernelError> {
        (self.0)(stream, point)
    }
}

impl<B> fmt::Debug for GatherWatch<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GatherWatch")
    }
}

//! [`GatherWatch`]: what is told of gathers as they are given to a stream.

use std::fmt;
use std::sync::Arc;

use lowp_kernels::{Backend, KernelError};

/// Called with the stream of a gather, right before the stream is given the gather and right behind it: a device can mark both points to
/// time it.
pub struct GatherWatch<B>(Arc<Call<B>>);

type Call<B> = dyn Fn(&B) -> Result<(), KernelError> + Send + Sync;

impl<B: Backend> GatherWatch<B> {
    /// One that calls `call`.
    pub fn new(call: impl Fn(&B) -> Result<(), KernelError> + Send + Sync + 'static) -> Self {
        Self(Arc::new(call))
    }

    pub(super) fn tell(&self, stream: &B) -> Result<(), KernelError> {
        (self.0)(stream)
    }
}

impl<B> fmt::Debug for GatherWatch<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GatherWatch")
    }
}

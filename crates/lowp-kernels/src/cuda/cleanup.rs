//! [`Cleanup`]: calls of the driver in destructors, beside whatever the thread is doing.

#![expect(
    unsafe_code,
    reason = "keeps destructors out of a stream capture of their thread"
)]

use std::marker::PhantomData;

use cudarc::driver::result::DriverError;
use cudarc::driver::{CudaContext, sys};

/// While it lives, calls of the driver from this thread stand apart from what the thread is doing.
///
/// - A capture ([`crate::Backend::capture`]) that this thread is in neither rejects them nor is ended
///   by them.
/// - An error that an earlier destructor left for the next call that can report is not taken for theirs, and is
///   still there afterwards.
pub(super) struct Cleanup<'c> {
    context: &'c CudaContext,
    earlier: Result<(), DriverError>,
    mode: Option<sys::CUstreamCaptureMode>,
    /// The mode is that of this thread.
    here: PhantomData<*const ()>,
}

impl<'c> Cleanup<'c> {
    pub(super) fn begin(context: &'c CudaContext) -> Self {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the mode of this thread with the variable.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result();
        Self {
            context,
            earlier: context.check_err(),
            mode: exchanged.is_ok().then_some(mode),
            here: PhantomData,
        }
    }
}

impl Drop for Cleanup<'_> {
    fn drop(&mut self) {
        if let Some(mode) = &mut self.mode {
            // SAFETY: gives the thread back the mode that it had.
            let restored = unsafe { sys::cuThreadExchangeStreamCaptureMode(mode) }.result();
            self.context.record_err(restored);
        }
        self.context.record_err(self.earlier);
    }
}

//! Errors of the driver, and its copy.

#![expect(unsafe_code, reason = "copies between addresses")]

use cudarc::driver::{DriverError, sys};

use crate::KernelError;

/// Copies `bytes` bytes in the order of `stream`. Either end is memory of the device, page-locked memory or other memory of the host: addresses
/// are unified, and the driver knows by them which it is. Where neither end is page-locked memory or the device's, it returns after the copy.
///
/// # Safety
/// Both ends have as many bytes, apart from each other, until the stream has passed the copy.
pub(super) unsafe fn copy(
    to: u64,
    from: u64,
    bytes: usize,
    stream: sys::CUstream,
) -> Result<(), KernelError> {
    // SAFETY: the caller's promise.
    let copied = unsafe { sys::cuMemcpyAsync(to, from, bytes, stream) };
    copied.result().map_err(failed("cuMemcpyAsync"))
}

/// Names the driver call that failed.
pub(super) fn failed(call: &'static str) -> impl Fn(DriverError) -> KernelError {
    move |error| {
        let text = |text: Result<&std::ffi::CStr, _>| {
            text.map_or("unknown error".to_owned(), |text: &std::ffi::CStr| {
                text.to_string_lossy().into_owned()
            })
        };
        let why = format!(
            "{} ({})",
            text(error.error_string()),
            text(error.error_name())
        );
        KernelError::Device { call, why }
    }
}

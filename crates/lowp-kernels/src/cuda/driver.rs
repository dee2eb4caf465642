//! Errors of the driver, and its copies.

#![expect(unsafe_code, reason = "copies between addresses")]

use cudarc::driver::{DriverError, result, sys};

use crate::KernelError;

/// Copies `bytes` bytes in the order of `stream`. Either end is memory of the device, page-locked memory or other memory of the host: addresses
/// are unified, and the driver knows by them which it is. Where both ends are memory of the host, or one is that is not page-locked, the calling
/// thread waits for the stream and for the copy.
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

/// Copies `bytes` bytes between two ends in page-locked memory of the host, by way of memory of the device: nothing waits, and it takes two copies of the bus
/// in place of one of a thread, which is slower.
///
/// # Safety
/// As [`copy`], and the stream is not captured.
pub(super) unsafe fn copy_on_host(
    to: u64,
    from: u64,
    bytes: usize,
    stream: sys::CUstream,
) -> Result<(), KernelError> {
    const CHUNK: usize = 8 << 20;
    let len = bytes.min(CHUNK);
    // SAFETY: the stream is alive; the result is checked, used in the order of the stream and freed there.
    let between = unsafe { result::malloc_async(stream, len) }.map_err(no_room(len))?;
    let mut chunks = (0..bytes).step_by(CHUNK);
    let copied = chunks.try_for_each(|at| {
        let (len, at) = (CHUNK.min(bytes - at), at as u64);
        // SAFETY: the caller's promise; the memory between has as many bytes.
        unsafe {
            copy(between, from + at, len, stream)?;
            copy(to + at, between, len, stream)
        }
    });
    // SAFETY: allocated above, freed once, after the work of the only stream that uses it.
    let freed = unsafe { result::free_async(between, stream) };
    copied.and(freed.map_err(failed("cuMemFreeAsync")))
}

/// Names an allocation of `bytes` bytes of the device that failed.
pub(super) fn no_room(bytes: usize) -> impl Fn(DriverError) -> KernelError {
    move |error| match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => KernelError::no_memory::<u8>(bytes),
        _ => failed("cuMemAllocAsync")(error),
    }
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

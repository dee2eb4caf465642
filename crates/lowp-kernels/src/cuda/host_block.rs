//! [`HostBlock`]: page-locked memory of the host.

#![expect(unsafe_code, reason = "page-locked memory of the driver")]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::cleanup::Cleanup;
use super::driver::failed;
use crate::KernelError;

/// Page-locked memory, which the device copies from and to and which its kernels read and write.
pub(super) struct HostBlock {
    pub(super) pointer: *mut u8,
    context: Arc<CudaContext>,
}

// SAFETY: plain memory, of which there is one owner.
unsafe impl Send for HostBlock {}
// SAFETY: as above; shared references do not reach the memory.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// `bytes` bytes of any content.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, KernelError> {
        context
            .bind_to_thread()
            .map_err(failed("cuCtxSetCurrent"))?;
        // All devices have addresses in common with the host, where the flags say no more than what holds anyway.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the result is checked, and freed with the block.
        let pointer = unsafe { result::malloc_host(bytes, flags) };
        let pointer = pointer.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => KernelError::NoHostMemory { bytes },
            _ => failed("cuMemHostAlloc")(error),
        })?;
        Ok(Self {
            pointer: pointer.cast(),
            context: Arc::clone(context),
        })
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        let _cleanup = Cleanup::begin(&self.context);
        self.context.record_err(self.context.bind_to_thread());
        let pointer: *mut c_void = self.pointer.cast();
        // SAFETY: allocated by `new`, freed once; the device has passed all work with it.
        self.context
            .record_err(unsafe { result::free_host(pointer) });
    }
}

//! [`DeviceMemory`]: memory that a device uses, of its pool, of the host or of another library.

#![expect(unsafe_code, reason = "allocates, fills and frees device memory")]

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result, sys};

use super::cleanup::Cleanup;
use super::deferred;
use super::device::Device;
use super::driver::{failed, no_room};
use super::host_block::HostBlock;
use crate::KernelError;

/// Memory that a device uses, freed or given back with its last handle.
pub(super) struct DeviceMemory {
    pub(super) pointer: u64,
    pub(super) device: Arc<Device>,
    owner: Owner,
}

enum Owner {
    /// Allocated here, in the order of this stream.
    Stream(Arc<CudaStream>),
    /// Page-locked memory of the host; `None` after it was given back.
    Host(Option<HostBlock>),
    /// Memory of another library, and what keeps it alive; `None` where nothing does, and after that was given back.
    Other(Option<deferred::Owner>),
}

impl DeviceMemory {
    /// `bytes` bytes of zeros, ready for work of `stream`.
    pub(super) fn zeros(
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
        bytes: usize,
    ) -> Result<Self, KernelError> {
        // What is given back to others may be what there is no room for.
        device.reap();
        device.bind()?;
        let owner = Owner::Stream(Arc::clone(stream));
        let stream = stream.cu_stream();
        // SAFETY: the stream is alive; the result is checked.
        let pointer = unsafe { result::malloc_async(stream, bytes) };
        let pointer = pointer.map_err(no_room(bytes))?;
        let memory = Self {
            pointer,
            device: Arc::clone(device),
            owner,
        };
        memory.zeroed(bytes, stream)
    }

    /// `bytes` bytes of zeros in page-locked memory of the host.
    pub(super) fn host_zeros(
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
        bytes: usize,
    ) -> Result<Self, KernelError> {
        device.reap();
        let block = HostBlock::new(&device.context, bytes)?;
        // Addresses are unified: the device knows page-locked memory by the address that the host has.
        let memory = Self {
            pointer: block.pointer as u64,
            device: Arc::clone(device),
            owner: Owner::Host(Some(block)),
        };
        memory.zeroed(bytes, stream.cu_stream())
    }

    /// Whether it is page-locked memory of the host.
    pub(super) fn is_on_host(&self) -> bool {
        matches!(self.owner, Owner::Host(_))
    }

    /// Whether it is memory of the device's pool.
    pub(super) fn is_of_pool(&self) -> bool {
        matches!(self.owner, Owner::Stream(_))
    }

    /// Sets all of its `bytes` bytes to zero in the order of `stream`.
    fn zeroed(self, bytes: usize, stream: sys::CUstream) -> Result<Self, KernelError> {
        // SAFETY: the memory was just allocated with as many bytes and is used in the order of the stream.
        let zeroed = unsafe { result::memset_d8_async(self.pointer, 0, bytes, stream) };
        zeroed.map_err(failed("cuMemsetD8Async"))?;
        Ok(self)
    }

    /// Memory of others at `pointer`, which `owner` keeps alive, if something must.
    pub(super) fn of(device: &Arc<Device>, pointer: u64, owner: Option<deferred::Owner>) -> Self {
        Self {
            pointer,
            device: Arc::clone(device),
            owner: Owner::Other(owner),
        }
    }

    /// Copies `values` to address `pointer` in the order of `stream`, and waits.
    ///
    /// # Safety
    /// `pointer` must lie in the memory, with room for the values.
    pub(super) unsafe fn upload<T>(
        &self,
        stream: &CudaStream,
        pointer: u64,
        values: &[T],
    ) -> Result<(), KernelError> {
        self.device.bind()?;
        // SAFETY: the caller's promise; the values outlive the copy, which is waited for.
        let copied = unsafe { result::memcpy_htod_async(pointer, values, stream.cu_stream()) };
        let done = self.device.events.finish(stream);
        self.device.reap();
        copied.map_err(failed("cuMemcpyHtoDAsync"))?;
        done.map_err(failed("cuStreamSynchronize"))
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:#x})", self.pointer)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let device = &self.device;
        match &mut self.owner {
            Owner::Stream(stream) => {
                let cleanup = Cleanup::begin(&device.context);
                // A destructor cannot report; a failing device reports at the next call. Memory that
                // might still be used is leaked rather than freed.
                let ready =
                    device.context.bind_to_thread().is_ok() && device.gather(stream).is_ok();
                if ready {
                    // SAFETY: allocated by `zeros`, freed once, after the work of every stream.
                    let freed = unsafe { result::free_async(self.pointer, stream.cu_stream()) };
                    device.context.record_err(freed);
                }
                drop(cleanup);
            }
            Owner::Host(block) => {
                if let Some(block) = block.take() {
                    device.release(Box::new(block));
                }
            }
            Owner::Other(owner) => match owner.take() {
                Some(owner) => device.release(owner),
                None => return,
            },
        }
        device.reap();
    }
}

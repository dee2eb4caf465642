//! [`Cuda`]: a device and a stream on it.

#![expect(unsafe_code, reason = "asks for the memory of the device's pool")]

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};

use super::capture;
use super::device::Device;
use super::driver::failed;
use super::queue::Queue;
use crate::KernelError;

/// A point in a stream's work ([`Cuda::mark`]).
#[derive(Debug)]
pub struct CudaMark {
    event: CudaEvent,
    device: Arc<Device>,
}

/// A CUDA device and a stream on it. Cloning clones the handle: clones share the stream.
///
/// Work of one stream runs in order. [`crate::Backend::fork`] gives another stream of the same device, and
/// [`crate::Backend::wait_for`] orders the two. All handles of one device, however they were made, may share buffers and
/// plans: memory is freed after the work of every one of them. The last handle of a stream waits for the
/// stream's work when it is dropped.
#[derive(Clone)]
pub struct Cuda {
    pub(super) queue: Arc<Queue>,
    /// Whether its buffers are page-locked memory of the host.
    pub(super) host_buffers: bool,
}

impl Cuda {
    /// The stream, a `CUstream`: for work of other libraries between plans, such as a collective. It
    /// lives as long as a handle to it does. They must not capture it. Within a capture of this thread
    /// ([`crate::Backend::capture`]) it is the one that is captured, and is used no longer than that.
    ///
    /// # Errors
    /// This thread captures, and this handle takes no part.
    pub fn stream(&self) -> Result<u64, KernelError> {
        Ok(self.queue.current()?.cu_stream() as u64)
    }

    /// Has another library give work to the stream: `call` gets the stream ([`Cuda::stream`]), with the device current on
    /// this thread. `memory` is what that work uses: in a capture the graph keeps it. Elsewhere buffers are freed after
    /// the work of all streams, so their owner may drop them at once.
    ///
    /// # Errors
    /// Those of `call`; this thread captures, and this handle takes no part.
    pub fn foreign_work<M: Send + Sync + 'static, T, E: From<KernelError>>(
        &self,
        memory: impl FnOnce() -> M,
        call: impl FnOnce(u64) -> Result<T, E>,
    ) -> Result<T, E> {
        self.bind()?;
        let stream = self.stream()?;
        capture::keep(memory);
        call(stream)
    }

    /// For destructors: has another library free what it has on this device, with the device current on this thread. The work of this
    /// stream is over then; where it cannot be waited for, because the device failed or this thread captures, `free` is not called and
    /// what it would free stays.
    pub fn free_foreign(&self, free: impl FnOnce()) {
        if self.finish().and_then(|()| self.bind()).is_ok() {
            free();
        }
    }

    /// A new stream, whose work follows what this one was given so far.
    pub(super) fn fork_stream(&self) -> Result<Self, KernelError> {
        capture::not_in("a new stream")?;
        let stream = self.queue.stream.fork();
        let stream = stream.map_err(failed("cuStreamCreate"))?;
        Self::with(Arc::clone(self.device()), stream)
    }

    /// As [`crate::Backend::fork`], but of the highest priority: where work of several streams is ready, the thread blocks of this one
    /// get the next free places. For collectives, which wait for other devices and take few places. Graphs have the priority of the
    /// stream that launches them.
    ///
    /// # Errors
    /// The device has no room, or this thread captures.
    pub fn fork_with_priority(&self) -> Result<Self, KernelError> {
        capture::not_in("a new stream")?;
        self.bind()?;
        let create = || -> Result<Arc<CudaStream>, DriverError> {
            let (_, highest) = result::stream::get_priority_range()?;
            let stream = self.device().context.new_stream_with_priority(highest)?;
            stream.join(&self.queue.stream)?;
            Ok(stream)
        };
        let stream = create().map_err(failed("cuStreamCreateWithPriority"))?;
        Self::with(Arc::clone(self.device()), stream)
    }

    pub(super) fn with(device: Arc<Device>, stream: Arc<CudaStream>) -> Result<Self, KernelError> {
        let queue = Arc::new(Queue::new(device, stream)?);
        Ok(Self {
            queue,
            host_buffers: false,
        })
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.queue.device
    }

    /// Waits until the work of this handle is done, and reports its failures. Owners of foreign memory
    /// ([`super::CudaBuffer::from_raw`]) that wait for nothing else are dropped.
    pub(super) fn finish(&self) -> Result<(), KernelError> {
        capture::not_in("waiting for work")?;
        let done = self.device().events.finish(&self.queue.stream);
        self.device().reap();
        done.map_err(failed("cuStreamSynchronize"))
    }

    /// Whether the calling thread is in a capture ([`crate::Backend::capture`]), whose owner decides what an error of its work means.
    pub fn is_capturing(&self) -> bool {
        capture::is_on()
    }

    /// Marks this point in the stream.
    ///
    /// # Errors
    /// The driver failed.
    pub fn mark(&self) -> Result<CudaMark, KernelError> {
        capture::not_in("a mark")?;
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let event = self.queue.stream.record_event(Some(flags));
        Ok(CudaMark {
            event: event.map_err(failed("cuEventRecord"))?,
            device: Arc::clone(self.device()),
        })
    }

    /// How often the host waited for this device so far, in this process: for the end of a stream's work, for
    /// a point in it, or for values to arrive.
    pub fn waits(&self) -> u64 {
        self.device().events.waits()
    }

    /// How often scalars of a step were written for this stream.
    #[doc(hidden)]
    pub fn scalar_changes(&self) -> u64 {
        self.queue.step.changes()
    }

    /// The device's name.
    ///
    /// # Errors
    /// The driver failed.
    pub fn name(&self) -> Result<String, KernelError> {
        let name = self.device().context.name();
        name.map_err(failed("cuDeviceGetName"))
    }

    /// The compute capability, major and minor.
    ///
    /// # Errors
    /// The driver failed.
    pub fn capability(&self) -> Result<(i32, i32), KernelError> {
        let capability = self.device().context.compute_capability();
        capability.map_err(failed("cuDeviceGetAttribute"))
    }

    /// The device's number.
    pub fn ordinal(&self) -> usize {
        self.device().context.ordinal()
    }

    /// Bytes of memory: free, and all.
    ///
    /// # Errors
    /// The driver failed.
    pub fn memory(&self) -> Result<[usize; 2], KernelError> {
        let info = self.device().context.mem_get_info();
        info.map(|(free, all)| [free, all])
            .map_err(failed("cuMemGetInfo"))
    }

    /// The most bytes that were allocated from the device's pool at once since the last [`Cuda::reset_peak_memory`]: that is buffers and
    /// tables of plans of every handle of the device in this process, but for buffers that are memory of the host.
    ///
    /// # Errors
    /// The driver failed.
    pub fn peak_memory(&self) -> Result<u64, KernelError> {
        let mut bytes = 0u64;
        self.pool_high(|pool, high| {
            let to = (&raw mut bytes).cast();
            // SAFETY: the attribute is a 64-bit number.
            unsafe { sys::cuMemPoolGetAttribute(pool, high, to) }.result()
        })?;
        Ok(bytes)
    }

    /// Counts the peak ([`Cuda::peak_memory`]) from what is allocated now.
    ///
    /// # Errors
    /// The driver failed.
    pub fn reset_peak_memory(&self) -> Result<(), KernelError> {
        let mut zero = 0u64;
        self.pool_high(|pool, high| {
            let from = (&raw mut zero).cast();
            // SAFETY: the attribute is a 64-bit number.
            unsafe { sys::cuMemPoolSetAttribute(pool, high, from) }.result()
        })
    }

    fn pool_high(
        &self,
        call: impl FnOnce(
            sys::CUmemoryPool,
            sys::CUmemPool_attribute,
        ) -> Result<(), result::DriverError>,
    ) -> Result<(), KernelError> {
        self.bind()?;
        let pool = self.pool()?;
        let high = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
        call(pool, high).map_err(failed("cuMemPoolGetAttribute"))
    }

    /// The pool that `cuMemAllocAsync` takes from. The device is current on this thread.
    pub(super) fn pool(&self) -> Result<sys::CUmemoryPool, KernelError> {
        let mut pool = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let asked =
            unsafe { sys::cuDeviceGetMemPool(&mut pool, self.device().context.cu_device()) };
        asked.result().map_err(failed("cuDeviceGetMemPool"))?;
        Ok(pool)
    }

    /// Bytes of the second-level cache.
    ///
    /// # Errors
    /// The driver failed.
    pub fn cache_bytes(&self) -> Result<usize, KernelError> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        let bytes = self.device().context.attribute(attribute);
        bytes
            .map(|bytes| usize::try_from(bytes).unwrap_or(0))
            .map_err(failed("cuDeviceGetAttribute"))
    }

    /// Makes the device current on this thread.
    pub(super) fn bind(&self) -> Result<(), KernelError> {
        self.device().bind()
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({})", self.ordinal())
    }
}

impl CudaMark {
    /// Milliseconds from this point to `later`, of the same device. Waits for both.
    ///
    /// # Errors
    /// A mark of another device, or the device failed.
    pub fn milliseconds_to(&self, later: &Self) -> Result<f32, KernelError> {
        let remedy = "devices have clocks of their own";
        self.device.same(&later.device, "the later mark", remedy)?;
        self.event
            .elapsed_ms(&later.event)
            .map_err(failed("cuEventElapsedTime"))
    }

    /// Whether the stream has come to this point. Does not wait.
    ///
    /// # Errors
    /// The device failed.
    pub fn passed(&self) -> Result<bool, KernelError> {
        self.event.try_is_complete().map_err(failed("cuEventQuery"))
    }

    /// Waits until the stream has come to this point.
    ///
    /// # Errors
    /// The device failed.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.event
            .synchronize()
            .map_err(failed("cuEventSynchronize"))
    }
}

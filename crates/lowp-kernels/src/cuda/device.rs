//! [`Cuda`]: a device and a stream on it.

#![expect(
    unsafe_code,
    reason = "asks for the driver and its streams, and wraps streams of other libraries"
)]

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};

use super::capture;
use super::cleanup::Cleanup;
use super::deferred::{Deferred, Owner, Point};
use super::event::EventPool;
use super::failed;
use super::host::HostPool;
use super::module::Modules;
use super::queue::Queue;
use super::registry::Registry;
use crate::KernelError;

/// The CUDA version that the kernels are compiled with, as the driver counts.
const CUDA_VERSION: i32 = 13000;

/// The devices of this process that someone uses.
static DEVICES: Registry<Device> = Registry::new();

/// A CUDA device and a stream on it. Cloning clones the handle: clones share the stream.
///
/// Work of one stream runs in order. [`crate::Backend::fork`] gives another stream of the same device, and
/// [`crate::Backend::wait_for`] orders the two. All handles of one device, however they were made, may share buffers and
/// plans: memory is freed behind the work of every one of them. The last handle of a stream waits for the
/// stream's work when it is dropped.
#[derive(Clone)]
pub struct Cuda {
    pub(super) queue: Arc<Queue>,
}

/// What all streams of a device share: one per device and process.
pub(super) struct Device {
    pub(super) context: Arc<CudaContext>,
    pub(super) modules: Modules,
    /// The stream of every handle, until its work is done: memory is freed behind all of them.
    streams: Mutex<Vec<Arc<CudaStream>>>,
    /// Owners of foreign memory that work may still use.
    deferred: Deferred<CudaEvent>,
    pub(super) events: EventPool,
    /// Host memory for copies that nobody waits for.
    pub(super) host: HostPool,
    waits: AtomicU64,
}

impl Point for CudaEvent {
    /// Not where the device failed either: memory that might still be used is kept.
    fn passed(&self) -> bool {
        self.is_complete()
    }
}

/// A point in a stream's work ([`Cuda::mark`]).
#[derive(Debug)]
pub struct CudaMark {
    event: CudaEvent,
    device: Arc<Device>,
}

impl Cuda {
    /// The number of devices that this machine has; 0 without NVIDIA's driver.
    ///
    /// # Errors
    /// The driver failed.
    pub fn count() -> Result<usize, KernelError> {
        // SAFETY: loads the driver's library, as `Device::open` does.
        if !unsafe { sys::is_culib_present() } {
            return Ok(0);
        }
        let count = CudaContext::device_count().map_err(failed("cuDeviceGetCount"))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The device `ordinal`, with a stream of its own.
    ///
    /// # Errors
    /// [`KernelError::NoDevice`] without NVIDIA's driver, with one that is too old, without such a
    /// device, or in a program that was built without kernels.
    pub fn new(ordinal: usize) -> Result<Self, KernelError> {
        capture::not_in("a new stream")?;
        let device = DEVICES.get(ordinal, || Device::open(ordinal))?;
        let stream = device.context.new_stream();
        Self::with(device, stream.map_err(failed("cuStreamCreate"))?)
    }

    /// The device `ordinal`, with work on `stream`, a `CUstream` that another library owns: 0 is the
    /// default stream.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    ///
    /// # Safety
    /// `stream` must be a stream of the device's primary context, and must live as long as every handle,
    /// buffer, plan and graph that is made from this handle. Nobody may capture it meanwhile.
    pub unsafe fn with_stream(ordinal: usize, stream: u64) -> Result<Self, KernelError> {
        capture::not_in("a new stream")?;
        let device = DEVICES.get(ordinal, || Device::open(ordinal))?;
        let raw = stream as *mut c_void;
        // SAFETY: the caller's promise.
        let stream = unsafe { device.context.wrap_borrowed_stream(raw.cast()) };
        Self::with(device, stream)
    }

    /// The stream, a `CUstream`: for work of other libraries between plans, such as a collective. It
    /// lives as long as a handle to it does. They must not capture it. Within a capture of this thread
    /// ([`crate::Backend::capture`]) it is the one that is captured, and is used no longer than that.
    ///
    /// # Errors
    /// This thread captures, and this handle takes no part.
    pub fn stream(&self) -> Result<u64, KernelError> {
        Ok(capture::stream_of(&self.queue)?.cu_stream() as u64)
    }

    /// Has another library give work to the stream: `call` gets the stream ([`Cuda::stream`]), with the device current on
    /// this thread. `memory` is what that work uses: in a capture the graph keeps it. Elsewhere buffers are freed behind
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

    fn with(device: Arc<Device>, stream: Arc<CudaStream>) -> Result<Self, KernelError> {
        let queue = Arc::new(Queue::new(device, stream)?);
        Ok(Self { queue })
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.queue.device
    }

    /// Waits until the work of this handle is done, and reports its failures. Owners of foreign memory
    /// ([`super::CudaBuffer::from_raw`]) that wait for nothing else are dropped.
    pub(super) fn finish(&self) -> Result<(), KernelError> {
        capture::not_in("waiting for work")?;
        let done = self.device().finish(&self.queue.stream);
        self.device().reap();
        done.map_err(failed("cuStreamSynchronize"))
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
        self.device().waits.load(Ordering::Relaxed)
    }

    /// How often scalars of a step were written for this stream.
    #[cfg(test)]
    pub(crate) fn scalar_changes(&self) -> u64 {
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
    /// tables of plans of every handle of the device in this process.
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
        let mut pool = std::ptr::null_mut();
        // SAFETY: writes one handle, of the pool that `cuMemAllocAsync` takes from.
        let asked =
            unsafe { sys::cuDeviceGetMemPool(&mut pool, self.device().context.cu_device()) };
        asked.result().map_err(failed("cuDeviceGetMemPool"))?;
        let high = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
        call(pool, high).map_err(failed("cuMemPoolGetAttribute"))
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
        let bound = self.device().context.bind_to_thread();
        bound.map_err(failed("cuCtxSetCurrent"))
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

impl Device {
    fn open(ordinal: usize) -> Result<Self, KernelError> {
        let no = |why: String| KernelError::NoDevice { ordinal, why };
        // SAFETY: loads the driver's library, which is what initialising CUDA does; it has no
        // precondition. Without this question cudarc would panic where there is no driver.
        if !unsafe { sys::is_culib_present() } {
            return Err(no(
                "NVIDIA's driver library (libcuda) was not found; install the driver, or use the CPU"
                    .to_owned(),
            ));
        }
        let mut version = 0;
        // SAFETY: writes one integer.
        let asked = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
        asked.map_err(failed("cuDriverGetVersion"))?;
        if version < CUDA_VERSION {
            let [found, needed] =
                [version, CUDA_VERSION].map(|v| format!("{}.{}", v / 1000, v % 1000 / 10));
            return Err(no(format!(
                "the driver is for CUDA {found} and the kernels need {needed}; update the driver"
            )));
        }
        let why = |error: cudarc::driver::DriverError| match failed("cuInit")(error) {
            KernelError::Device { why, .. } => no(why),
            other => other,
        };
        let count = CudaContext::device_count().map_err(why)?;
        if usize::try_from(count).is_ok_and(|count| ordinal >= count) {
            return Err(no(format!("this machine has {count}")));
        }
        let context = CudaContext::new(ordinal).map_err(why)?;
        let modules = Modules::load(&context)?;
        Ok(Self {
            context,
            modules,
            streams: Mutex::new(Vec::new()),
            deferred: Deferred::new(),
            events: EventPool::default(),
            host: HostPool::default(),
            waits: AtomicU64::new(0),
        })
    }

    /// Checks that `what`, which belongs to `other`, belongs to this device.
    pub(super) fn same(
        self: &Arc<Self>,
        other: &Arc<Self>,
        what: &'static str,
        remedy: &'static str,
    ) -> Result<(), KernelError> {
        if Arc::ptr_eq(self, other) {
            return Ok(());
        }
        Err(KernelError::OtherDevice {
            what,
            ordinal: self.context.ordinal(),
            found: other.context.ordinal(),
            remedy,
        })
    }

    /// Remembers a stream that work will be given to.
    pub(super) fn follow(&self, stream: &Arc<CudaStream>) {
        self.streams().push(Arc::clone(stream));
    }

    /// Forgets a stream whose work is done and which gets no more. It is not touched afterwards.
    pub(super) fn forget(&self, stream: &Arc<CudaStream>) {
        let mut streams = self.streams();
        if let Some(at) = streams.iter().position(|other| Arc::ptr_eq(other, stream)) {
            streams.swap_remove(at);
        }
    }

    /// Waits until the work of `stream` is done, also where a destructor has left an error to report: host
    /// memory and streams of others depend on it. Then reports.
    pub(super) fn finish(&self, stream: &CudaStream) -> Result<(), result::DriverError> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the context and the stream are alive.
        let done = unsafe {
            result::ctx::set_current(self.context.cu_ctx())?;
            result::stream::synchronize(stream.cu_stream())
        };
        self.context.check_err().and(done)
    }

    /// Waits for `event`.
    pub(super) fn wait(&self, event: &CudaEvent) -> Result<(), KernelError> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        // Not by way of cudarc, which returns at once where a destructor has left an error to report.
        // SAFETY: the context and the event are alive.
        unsafe {
            result::ctx::set_current(self.context.cu_ctx()).map_err(failed("cuCtxSetCurrent"))?;
            result::event::synchronize(event.cu_event()).map_err(failed("cuEventSynchronize"))
        }
    }

    fn streams(&self) -> MutexGuard<'_, Vec<Arc<CudaStream>>> {
        // Whoever failed in between left the list as it was.
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `stream` wait for what every other stream was given so far.
    pub(super) fn gather(&self, stream: &CudaStream) -> Result<(), KernelError> {
        // Locked meanwhile: a stream of others may end as soon as it is forgotten.
        for other in self.streams().iter() {
            if **other != *stream {
                stream.join(other).map_err(failed("cuStreamWaitEvent"))?;
            }
        }
        Ok(())
    }

    /// Drops `owner` as soon as every stream has passed what it was given so far: now, if nothing is in
    /// flight, else in a later call ([`Device::reap`]).
    pub(super) fn release(&self, owner: Owner) {
        let _cleanup = Cleanup::begin(&self.context);
        match self.points() {
            Ok(points) if points.is_empty() => drop(owner),
            Ok(points) => self.deferred.hold(points, owner),
            Err(error) => {
                // What might still be used is leaked rather than given back.
                self.context.record_err(Err::<(), _>(error));
                std::mem::forget(owner);
            }
        }
    }

    /// The point at which each stream is that has work in flight.
    fn points(&self) -> Result<Vec<CudaEvent>, result::DriverError> {
        self.context.bind_to_thread()?;
        let mut points = Vec::new();
        for stream in self.streams().iter() {
            // SAFETY: the stream is alive as long as it is in the list.
            match unsafe { sys::cuStreamQuery(stream.cu_stream()) }.result() {
                Ok(()) => {}
                Err(result::DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => {
                    points.push(stream.record_event(None)?);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(points)
    }

    /// Drops the owners of foreign memory that no work uses any more.
    pub(super) fn reap(&self) {
        if self.deferred.is_empty() {
            return;
        }
        // Owners run code of others: beside a capture of this thread, too, and without a lock.
        let _cleanup = Cleanup::begin(&self.context);
        match self.context.bind_to_thread() {
            Ok(()) => drop(self.deferred.take_passed()),
            Err(error) => self.context.record_err(Err::<(), _>(error)),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _cleanup = Cleanup::begin(&self.context);
        // Work of handles is done by now; that of other libraries may not be.
        let done = self.context.synchronize();
        let owners = self.deferred.take_all();
        match done {
            Ok(()) => drop(owners),
            Err(_) => {
                std::mem::forget(owners);
                self.host.leak();
            }
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.context.ordinal())
    }
}

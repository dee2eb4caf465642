//! [`Device`]: what all streams of a device share.

#![expect(unsafe_code, reason = "asks streams whether they have work")]

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};

use super::cleanup::Cleanup;
use super::deferred::{Deferred, Owner, Point};
use super::driver::failed;
use super::events::Events;
use super::host_pool::HostPool;
use super::module::{Kernel, Modules};
use crate::KernelError;

/// What all streams of a device share: one per device and process.
pub(super) struct Device {
    pub(super) context: Arc<CudaContext>,
    pub(super) modules: Modules,
    /// The stream of every handle, until its work is done: memory is freed after the work of all of them.
    streams: Mutex<Vec<Arc<CudaStream>>>,
    /// Owners of foreign memory that work may still use.
    deferred: Deferred<CudaEvent>,
    pub(super) events: Events,
    /// Host memory for copies that nobody waits for.
    pub(super) host: HostPool,
}

impl Point for CudaEvent {
    /// Not where the device failed either: memory that might still be used is kept.
    fn passed(&self) -> bool {
        self.is_complete()
    }
}

impl Device {
    /// The device `ordinal`, which is there, with `kernels`, which are all that there are.
    pub(super) fn new(
        context: Arc<CudaContext>,
        kernels: &[&[Kernel]],
    ) -> Result<Self, KernelError> {
        let modules = Modules::load(&context, kernels)?;
        Ok(Self {
            modules,
            streams: Mutex::new(Vec::new()),
            deferred: Deferred::new(),
            events: Events::new(&context),
            host: HostPool::default(),
            context,
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

    /// Makes the device current on this thread.
    pub(super) fn bind(&self) -> Result<(), KernelError> {
        let bound = self.context.bind_to_thread();
        bound.map_err(failed("cuCtxSetCurrent"))
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

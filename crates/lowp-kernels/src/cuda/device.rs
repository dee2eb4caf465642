//! [`Cuda`]: a device and a stream on it.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};

use super::buffer::CudaBuffer;
use super::failed;
use super::module::Modules;
use super::step::StepMemory;
use crate::{Element, KernelError};

/// The CUDA version that the kernels are compiled with, as the driver counts.
const CUDA_VERSION: i32 = 13000;

/// A CUDA device and a stream on it. Cloning clones the handle: clones share the stream.
///
/// Work of one stream runs in order. [`Cuda::fork`] gives another stream of the same device, and
/// [`Cuda::wait_for`] orders the two.
#[derive(Clone)]
pub struct Cuda {
    pub(super) device: Arc<Device>,
    pub(super) stream: Arc<CudaStream>,
    pub(super) step: Arc<StepMemory>,
}

/// What all streams of a device share.
pub(super) struct Device {
    pub(super) context: Arc<CudaContext>,
    pub(super) modules: Modules,
    /// Every stream that work was given to: memory is freed behind all of them.
    streams: Mutex<Vec<Weak<CudaStream>>>,
}

/// A point in a stream's work ([`Cuda::mark`]).
#[derive(Debug)]
pub struct CudaMark(CudaEvent);

impl Cuda {
    /// The device `ordinal`, with a stream of its own.
    ///
    /// # Errors
    /// [`KernelError::NoDevice`] without NVIDIA's driver, with one that is too old, without such a
    /// device, or in a program that was built without kernels.
    pub fn new(ordinal: usize) -> Result<Self, KernelError> {
        let (device, stream) = Device::open(ordinal)?;
        Self::with(device, stream)
    }

    /// The device `ordinal`, with work on `stream`, a `CUstream` that another library owns: 0 is the
    /// default stream.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    ///
    /// # Safety
    /// `stream` must be a stream of the device's primary context, not being captured, and must
    /// live as long as every handle, buffer, plan and graph that is made from this handle.
    pub unsafe fn with_stream(ordinal: usize, stream: u64) -> Result<Self, KernelError> {
        let (device, _) = Device::open(ordinal)?;
        let raw = stream as *mut c_void;
        // SAFETY: the caller's promise.
        let stream = unsafe { device.context.wrap_borrowed_stream(raw.cast()) };
        Self::with(device, stream)
    }

    /// The stream, a `CUstream`: for work of other libraries between plans, such as a collective. It
    /// lives as long as a handle to it does.
    pub fn stream(&self) -> u64 {
        self.stream.cu_stream() as u64
    }

    /// The same device with a new stream, whose work follows what this one was given so far.
    ///
    /// # Errors
    /// The driver has no room.
    pub fn fork(&self) -> Result<Self, KernelError> {
        let stream = self.stream.fork().map_err(failed("cuStreamCreate"))?;
        Self::with(Arc::clone(&self.device), stream)
    }

    fn with(device: Arc<Device>, stream: Arc<CudaStream>) -> Result<Self, KernelError> {
        device.follow(&stream);
        let step = Arc::new(StepMemory::new(&device.context)?);
        Ok(Self {
            device,
            stream,
            step,
        })
    }

    /// Makes later work of this handle follow what `other` was given so far.
    ///
    /// # Errors
    /// The handles are of different devices, or the driver failed.
    pub fn wait_for(&self, other: &Self) -> Result<(), KernelError> {
        self.stream
            .join(&other.stream)
            .map_err(failed("cuStreamWaitEvent"))
    }

    /// Waits until the work of this handle is done, and reports its failures.
    ///
    /// # Errors
    /// The device failed.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.stream
            .synchronize()
            .map_err(failed("cuStreamSynchronize"))
    }

    /// Marks this point in the stream.
    ///
    /// # Errors
    /// The driver failed.
    pub fn mark(&self) -> Result<CudaMark, KernelError> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let event = self.stream.record_event(Some(flags));
        event.map(CudaMark).map_err(failed("cuEventRecord"))
    }

    /// The device's name.
    ///
    /// # Errors
    /// The driver failed.
    pub fn name(&self) -> Result<String, KernelError> {
        self.device
            .context
            .name()
            .map_err(failed("cuDeviceGetName"))
    }

    /// The device's number.
    pub fn ordinal(&self) -> usize {
        self.device.context.ordinal()
    }

    /// Bytes of memory: free, and all.
    ///
    /// # Errors
    /// The driver failed.
    pub fn memory(&self) -> Result<[usize; 2], KernelError> {
        let info = self.device.context.mem_get_info();
        info.map(|(free, all)| [free, all])
            .map_err(failed("cuMemGetInfo"))
    }

    /// Bytes of the second-level cache.
    ///
    /// # Errors
    /// The driver failed.
    pub fn cache_bytes(&self) -> Result<usize, KernelError> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        let bytes = self.device.context.attribute(attribute);
        bytes
            .map(|bytes| usize::try_from(bytes).unwrap_or(0))
            .map_err(failed("cuDeviceGetAttribute"))
    }

    /// Makes the device current on this thread.
    pub(super) fn bind(&self) -> Result<(), KernelError> {
        self.device
            .context
            .bind_to_thread()
            .map_err(failed("cuCtxSetCurrent"))
    }

    /// Refuses a buffer of another device.
    pub(super) fn own<T: Element>(&self, buffer: &CudaBuffer<T>) -> Result<(), KernelError> {
        match buffer.ordinal() {
            Some(other) if other != self.ordinal() => Err(KernelError::NoDevice {
                ordinal: self.ordinal(),
                why: format!("the buffer lies on device {other}; copy it through the host"),
            }),
            _ => Ok(()),
        }
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
    /// The device failed.
    pub fn milliseconds_to(&self, later: &Self) -> Result<f32, KernelError> {
        self.0
            .elapsed_ms(&later.0)
            .map_err(failed("cuEventElapsedTime"))
    }

    /// Waits until the stream has come to this point.
    ///
    /// # Errors
    /// The device failed.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.0.synchronize().map_err(failed("cuEventSynchronize"))
    }
}

impl Device {
    fn open(ordinal: usize) -> Result<(Arc<Self>, Arc<CudaStream>), KernelError> {
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
        let stream = context.new_stream().map_err(failed("cuStreamCreate"))?;
        let device = Self {
            context,
            modules,
            streams: Mutex::new(Vec::new()),
        };
        Ok((Arc::new(device), stream))
    }

    /// Remembers a stream that work will be given to.
    fn follow(&self, stream: &Arc<CudaStream>) {
        if let Ok(mut streams) = self.streams.lock() {
            streams.retain(|stream| stream.strong_count() > 0);
            streams.push(Arc::downgrade(stream));
        }
    }

    /// Makes `stream` wait for what every other stream was given so far.
    pub(super) fn gather(&self, stream: &CudaStream) -> Result<(), KernelError> {
        let others: Vec<_> = match self.streams.lock() {
            Ok(streams) => streams.iter().filter_map(Weak::upgrade).collect(),
            Err(_) => return Err(KernelError::Poisoned),
        };
        for other in others {
            if *other != *stream {
                stream.join(&other).map_err(failed("cuStreamWaitEvent"))?;
            }
        }
        Ok(())
    }
}

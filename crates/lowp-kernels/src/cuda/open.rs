//! Devices that are opened, once per process.

#![expect(
    unsafe_code,
    reason = "asks for the driver, and wraps streams of other libraries"
)]

use std::ffi::c_void;

use cudarc::driver::{CudaContext, sys};

use super::capture;
use super::device::Device;
use super::driver::failed;
use super::handle::Cuda;
use super::ops::KERNELS;
use super::registry::Registry;
use crate::KernelError;

/// The CUDA version that the kernels are compiled with, as the driver counts.
const CUDA_VERSION: i32 = 13000;

/// The devices of this process that someone uses.
static DEVICES: Registry<Device> = Registry::new();

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
        let device = DEVICES.get(ordinal, || open(ordinal))?;
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
        let device = DEVICES.get(ordinal, || open(ordinal))?;
        let raw = stream as *mut c_void;
        // SAFETY: the caller's promise.
        let stream = unsafe { device.context.wrap_borrowed_stream(raw.cast()) };
        Self::with(device, stream)
    }
}

fn open(ordinal: usize) -> Result<Device, KernelError> {
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
    Device::new(context, &KERNELS)
}

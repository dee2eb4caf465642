//! The compiled kernels, embedded in the program and loaded once per device.

#![expect(unsafe_code, reason = "loads the embedded kernels")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::failed;
use super::library::Loaded;
use super::table::Kernel;
use crate::KernelError;

/// Bytes where the driver may read words.
#[repr(C, align(16))]
struct Aligned<B: ?Sized>(B);

/// The kernels of each `.cu` file, for every architecture. Written by build.rs. Empty in a program that was built with
/// `LOWP_CUDA_KERNELS=none`.
const UNITS: &[(&str, &Aligned<[u8]>)] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The kernels of a device.
pub(super) struct Modules {
    context: Arc<CudaContext>,
    loaded: Loaded,
    /// In the order of [`Kernel::ALL`].
    functions: Vec<sys::CUfunction>,
}

// SAFETY: handles of the driver, which may be used from any thread; they are not changed after
// loading.
unsafe impl Send for Modules {}
// SAFETY: as above.
unsafe impl Sync for Modules {}

impl Modules {
    /// Loads every kernel.
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Self, KernelError> {
        let no = |why: String| KernelError::NoDevice {
            ordinal: context.ordinal(),
            why,
        };
        if UNITS.is_empty() {
            return Err(no(
                "this program was built with LOWP_CUDA_KERNELS=none and holds no kernels; build it \
                 without"
                    .to_owned(),
            ));
        }
        context
            .bind_to_thread()
            .map_err(failed("cuCtxSetCurrent"))?;
        let mut modules = Self {
            context: Arc::clone(context),
            loaded: Loaded::default(),
            functions: Vec::new(),
        };
        for (name, image) in UNITS {
            // SAFETY: the image is a whole fat binary, made by nvcc and checked by build.rs.
            let added = unsafe { modules.loaded.add(name, &image.0) };
            added.map_err(|error| {
                let device = context.compute_capability().unwrap_or((0, 0));
                no(format!(
                    "its kernels `{}` cannot be loaded on compute capability {}.{}: {}",
                    name,
                    device.0,
                    device.1,
                    failed("cuModuleLoadData")(error)
                ))
            })?;
        }
        for kernel in Kernel::ALL {
            let function = modules.find(kernel)?;
            modules.functions.push(function);
        }
        Ok(modules)
    }

    /// A kernel lies in the unit whose name its own begins with.
    fn find(&self, kernel: Kernel) -> Result<sys::CUfunction, KernelError> {
        let missing = || missing(kernel);
        let stem = kernel.name().trim_start_matches("lowp_");
        let units = UNITS.iter().map(|(name, _)| *name);
        let unit = units
            .filter(|name| stem.starts_with(name))
            .max_by_key(|name| name.len())
            .ok_or_else(missing)?;
        let function = self.loaded.function(unit, kernel.name())?;
        let shared = kernel.shared_bytes();
        if shared != 0 {
            // More than 48 KiB are given only to those who ask.
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found in a loaded module.
            unsafe {
                result::function::set_function_attribute(function, attribute, shared.cast_signed())
            }
            .map_err(failed("cuFuncSetAttribute"))?;
        }
        Ok(function)
    }

    /// The entry point of `kernel`.
    pub(super) fn function(&self, kernel: Kernel) -> Result<sys::CUfunction, KernelError> {
        let at = Kernel::ALL.iter().position(|&other| other == kernel);
        at.and_then(|at| self.functions.get(at).copied())
            .ok_or_else(|| missing(kernel))
    }
}

fn missing(kernel: Kernel) -> KernelError {
    let kernel = kernel.name();
    KernelError::NotCompiled { kernel }
}

impl Drop for Modules {
    fn drop(&mut self) {
        self.context.record_err(self.context.bind_to_thread());
        // A kernel that still runs needs its module.
        self.context.record_err(self.context.synchronize());
        for unloaded in self.loaded.unload() {
            self.context.record_err(unloaded);
        }
    }
}

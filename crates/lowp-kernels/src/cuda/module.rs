//! Compiled kernels: loaded fat binaries, and those that are embedded in the program, loaded once per device.

#![expect(unsafe_code, reason = "loads compiled kernels")]

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::{CudaContext, sys};

use super::driver::failed;
use super::table::THREADS;
use crate::KernelError;

/// Fat binaries that are loaded, each with its name. Their owner unloads them, as it knows when nothing runs them any more.
#[derive(Default)]
pub(super) struct Loaded(Vec<(&'static str, sys::CUmodule)>);

// SAFETY: handles of the driver, which any thread may use; they are not changed after loading.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Loaded {
    /// Loads `image` as `unit` in the context of this thread.
    ///
    /// # Safety
    /// The image is a whole fat binary, made by nvcc.
    pub(super) unsafe fn add(
        &mut self,
        unit: &'static str,
        image: &'static [u8],
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }?;
        self.0.push((unit, module));
        Ok(())
    }

    /// The kernel `name` of `unit`.
    pub(super) fn function(
        &self,
        unit: &str,
        name: &'static str,
    ) -> Result<CudaFunction, KernelError> {
        let missing = || KernelError::NotCompiled { kernel: name };
        let mut units = self.0.iter();
        let (_, module) = units
            .find(|(other, _)| *other == unit)
            .ok_or_else(missing)?;
        let text = CString::new(name).map_err(|_| missing())?;
        // SAFETY: the module is loaded, and stays so as long as `self`.
        let function = unsafe { result::module::get_function(*module, text) };
        function.map(CudaFunction).map_err(|_| missing())
    }

    /// Unloads what is loaded, in the context of this thread, once nothing runs it; the results are those of each.
    pub(super) fn unload(&mut self) -> impl Iterator<Item = Result<(), DriverError>> {
        let loaded = std::mem::take(&mut self.0).into_iter();
        // SAFETY: loaded once, unloaded once.
        loaded.map(|(_, module)| unsafe { result::module::unload(module) })
    }
}

/// A kernel of a [`super::CudaLibrary`].
#[derive(Clone, Copy, Debug)]
pub struct CudaFunction(pub(super) sys::CUfunction);

// SAFETY: a handle of the driver, which any thread may use.
unsafe impl Send for CudaFunction {}
// SAFETY: as above.
unsafe impl Sync for CudaFunction {}

/// A kernel of this crate. It takes `(tiles: *const Tile, jobs: *const Job, step: *const Step, flags: u32)`
/// and runs one block of threads per tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    /// The entry point.
    pub(super) name: &'static str,
    /// Threads of a block.
    pub(super) threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub(super) shared_bytes: u32,
}

impl Kernel {
    /// A kernel without dynamic shared memory.
    pub(super) const fn new(name: &'static str) -> Self {
        Self::with_shared(name, 0)
    }

    pub(super) const fn with_shared(name: &'static str, shared_bytes: u32) -> Self {
        Self {
            name,
            threads: THREADS as u32,
            shared_bytes,
        }
    }
}

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
    /// The functions of the module, by name.
    functions: HashMap<&'static str, CudaFunction>,
}

impl Modules {
    /// Loads `kernels`, which are all that there are, by operation.
    pub(super) fn load(
        context: &Arc<CudaContext>,
        kernels: &[&[Kernel]],
    ) -> Result<Self, KernelError> {
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
            functions: HashMap::new(),
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
        for kernel in kernels.iter().copied().flatten() {
            let function = modules.find(kernel)?;
            modules.functions.insert(kernel.name, function);
        }
        Ok(modules)
    }

    /// A kernel lies in the unit whose name its own begins with.
    fn find(&self, kernel: &Kernel) -> Result<CudaFunction, KernelError> {
        let stem = kernel.name.trim_start_matches("lowp_");
        let units = UNITS.iter().map(|(name, _)| *name);
        let unit = units
            .filter(|name| stem.starts_with(name))
            .max_by_key(|name| name.len())
            .ok_or(KernelError::NotCompiled {
                kernel: kernel.name,
            })?;
        let function = self.loaded.function(unit, kernel.name)?;
        if kernel.shared_bytes != 0 {
            // More than 48 KiB are given only to those who ask.
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = kernel.shared_bytes.cast_signed();
            // SAFETY: the function was just found in a loaded module.
            unsafe { result::function::set_function_attribute(function.0, attribute, bytes) }
                .map_err(failed("cuFuncSetAttribute"))?;
        }
        Ok(function)
    }

    /// The entry point of `kernel`. It may be launched as long as these are loaded.
    pub(super) fn function(&self, kernel: &Kernel) -> Result<CudaFunction, KernelError> {
        let function = self.functions.get(kernel.name).copied();
        function.ok_or(KernelError::NotCompiled {
            kernel: kernel.name,
        })
    }
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

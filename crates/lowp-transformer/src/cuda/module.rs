//! [`Kernels`]: the compiled kernels of this crate, loaded once per stream, and their launches.

#![expect(unsafe_code, reason = "loads the embedded kernels and launches them")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};

use cudarc::driver::{result, sys};
use lowp_kernels::{Cuda, KernelError};

use super::TransformerError;
use crate::params::{Arg, KERNELS, Kind, check};

/// Bytes where the driver may read words.
#[repr(C, align(16))]
struct Aligned<B: ?Sized>(B);

/// Name and image of each `.cu` file. Empty in a program that was built with `LOWP_CUDA_KERNELS=none`.
const UNITS: &[(&str, &Aligned<[u8]>)] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The kernels, on a stream.
pub(super) struct Kernels {
    cuda: Cuda,
    modules: Vec<sys::CUmodule>,
    functions: BTreeMap<&'static str, (&'static [Kind], sys::CUfunction)>,
}

// SAFETY: handles of the driver, which any thread may use; they are not changed after loading.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernels({:?})", self.cuda)
    }
}

pub(super) fn failed(call: &'static str) -> impl Fn(result::DriverError) -> KernelError {
    move |error| KernelError::Device {
        call,
        why: format!("{error:?}"),
    }
}

impl Kernels {
    /// Loads every kernel.
    ///
    /// # Errors
    /// A program without kernels, or a device that they do not fit.
    pub(super) fn load(cuda: &Cuda) -> Result<Self, KernelError> {
        let mut loaded = Self {
            cuda: cuda.clone(),
            modules: Vec::new(),
            functions: BTreeMap::new(),
        };
        cuda.foreign_work(|| (), |_| loaded.find())?;
        Ok(loaded)
    }

    fn find(&mut self) -> Result<(), KernelError> {
        for (unit, kernels) in KERNELS {
            let Some((_, image)) = UNITS.iter().find(|(name, _)| *name == unit) else {
                return Err(KernelError::NotCompiled { kernel: unit });
            };
            // SAFETY: the image is a whole fat binary, made by nvcc.
            let module = unsafe { result::module::load_data(image.0.as_ptr().cast()) };
            let module = module.map_err(failed("cuModuleLoadData"))?;
            self.modules.push(module);
            for (name, kinds) in kernels {
                let missing = || KernelError::NotCompiled { kernel: name };
                let text = CString::new(*name).map_err(|_| missing())?;
                // SAFETY: the module is loaded, and stays so as long as `self`.
                let function = unsafe { result::module::get_function(module, text) };
                let function = function.map_err(|_| missing())?;
                self.functions.insert(name, (kinds, function));
            }
        }
        Ok(())
    }

    /// Gives the stream a launch of `blocks` blocks of `threads` threads.
    ///
    /// # Errors
    /// Parameters that the kernel does not take, or a device failure.
    ///
    /// # Safety
    /// The addresses in `args` are those of memory of the device as long as the kernel takes them to be,
    /// which is not freed before work that the stream has by now.
    pub(super) unsafe fn launch(
        &self,
        name: &'static str,
        blocks: [usize; 2],
        threads: [usize; 2],
        args: &[Arg],
    ) -> Result<(), TransformerError> {
        let (kinds, function) = *self
            .functions
            .get(name)
            .ok_or(KernelError::NotCompiled { kernel: name })?;
        check((name, kinds), args).map_err(TransformerError::Unsupported)?;
        if blocks.contains(&0) {
            return Ok(());
        }
        let mut words: Vec<u64> = args.iter().map(|arg| arg.word()).collect();
        let mut pointers: Vec<*mut c_void> = words
            .iter_mut()
            .map(|word| (&raw mut *word).cast())
            .collect();
        let [bx, by] = blocks.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let [tx, ty] = threads.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        self.cuda.foreign_work(
            || (),
            |stream| {
                let stream = stream as *mut c_void;
                // SAFETY: the caller's promise; the parameters are read before the call returns.
                let launched = unsafe {
                    result::launch_kernel(
                        function,
                        (bx, by, 1),
                        (tx, ty, 1),
                        0,
                        stream.cast(),
                        &mut pointers,
                    )
                };
                Ok(launched.map_err(failed("cuLaunchKernel"))?)
            },
        )
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let modules = std::mem::take(&mut self.modules);
        // A kernel that still runs needs its module.
        self.cuda.free_foreign(|| {
            for module in modules {
                // SAFETY: loaded once, unloaded once. Nobody is left to hear of one that stays.
                let _ = unsafe { result::module::unload(module) };
            }
        });
    }
}

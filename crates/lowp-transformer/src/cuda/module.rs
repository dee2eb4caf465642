//! [`Kernels`]: the compiled kernels of this crate, loaded once per stream, and their launches.

#![expect(unsafe_code, reason = "loads the embedded kernels and launches them")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};

use cudarc::driver::{result, sys};
use lowp_kernels::{Backend, Cuda, KernelError};

/// Bytes where the driver may read words.
#[repr(C, align(16))]
struct Aligned<B: ?Sized>(B);

/// Name and image of each `.cu` file. Empty in a program that was built with `LOWP_CUDA_KERNELS=none`.
const UNITS: &[(&str, &Aligned<[u8]>)] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The entry points of each.
const NAMES: [(&str, &[&str]); 4] = [
    ("norm", &["norm_forward", "norm_backward", "column_sums"]),
    (
        "activation",
        &[
            "gelu_forward",
            "gelu_backward",
            "swiglu_forward",
            "swiglu_backward",
            "narrow",
            "two_level_factors",
        ],
    ),
    (
        "attention",
        &[
            "split_heads",
            "merge_heads",
            "rotate",
            "softmax_forward",
            "softmax_backward",
        ],
    ),
    (
        "tokens",
        &[
            "embedding_forward",
            "sum_rows",
            "cross_entropy",
            "add_losses",
        ],
    ),
];

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Arg {
    Pointer(u64),
    Int(usize),
    Size(usize),
    Float(f32),
}

impl Arg {
    /// As the kernel reads it, from the lowest byte on.
    fn word(self) -> u64 {
        match self {
            Arg::Pointer(address) => address,
            Arg::Int(value) | Arg::Size(value) => value as u64,
            Arg::Float(value) => u64::from(value.to_bits()),
        }
    }
}

/// The kernels, on a stream.
pub(super) struct Kernels {
    cuda: Cuda,
    modules: Vec<sys::CUmodule>,
    functions: BTreeMap<&'static str, sys::CUfunction>,
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
        for (unit, names) in NAMES {
            let Some((_, image)) = UNITS.iter().find(|(name, _)| *name == unit) else {
                return Err(KernelError::NotCompiled { kernel: unit });
            };
            // SAFETY: the image is a whole fat binary, made by nvcc.
            let module = unsafe { result::module::load_data(image.0.as_ptr().cast()) };
            let module = module.map_err(failed("cuModuleLoadData"))?;
            self.modules.push(module);
            for name in names {
                let missing = || KernelError::NotCompiled { kernel: name };
                let text = CString::new(*name).map_err(|_| missing())?;
                // SAFETY: the module is loaded, and stays so as long as `self`.
                let function = unsafe { result::module::get_function(module, text) };
                self.functions
                    .insert(name, function.map_err(|_| missing())?);
            }
        }
        Ok(())
    }

    /// Gives the stream a launch of `blocks` blocks of `threads` threads.
    ///
    /// # Safety
    /// `args` are the parameters of the kernel, and their addresses those of memory of the device as long as the kernel takes them to be,
    /// which is not freed before work that the stream has by now.
    pub(super) unsafe fn launch(
        &self,
        name: &'static str,
        blocks: [usize; 2],
        threads: [usize; 2],
        args: &[Arg],
    ) -> Result<(), KernelError> {
        let function = *self
            .functions
            .get(name)
            .ok_or(KernelError::NotCompiled { kernel: name })?;
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
                launched.map_err(failed("cuLaunchKernel"))
            },
        )
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // A kernel that still runs needs its module; one that cannot be waited for keeps it.
        if self.cuda.synchronize().is_err() {
            return;
        }
        let modules = std::mem::take(&mut self.modules);
        let unloaded = self.cuda.foreign_work(
            || (),
            |_| {
                for module in modules {
                    // SAFETY: loaded once, unloaded once.
                    unsafe { result::module::unload(module) }.map_err(failed("cuModuleUnload"))?;
                }
                Ok::<_, KernelError>(())
            },
        );
        // Nobody is left to hear of a module that stays.
        drop(unloaded);
    }
}

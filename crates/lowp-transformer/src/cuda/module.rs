//! [`Kernels`]: the compiled kernels of this crate, loaded once per stream, and their launches.

#![expect(unsafe_code, reason = "loads the embedded kernels and launches them")]

use std::collections::BTreeMap;

use lowp_kernels::{Cuda, CudaFunction, CudaLibrary, KernelError};

use super::TransformerError;
use crate::params::{Arg, KERNELS, Kind, check};

/// Bytes where the driver may read words.
#[repr(C, align(16))]
struct Aligned<B: ?Sized>(B);

/// Name and image of each `.cu` file. Empty in a program that was built with `LOWP_CUDA_KERNELS=none`.
const UNITS: &[(&str, &Aligned<[u8]>)] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The kernels, on a stream.
#[derive(Debug)]
pub(super) struct Kernels {
    library: CudaLibrary,
    functions: BTreeMap<&'static str, (&'static [Kind], CudaFunction)>,
}

impl Kernels {
    /// Loads every kernel.
    ///
    /// # Errors
    /// A program without kernels, or a device that they do not fit.
    pub(super) fn load(cuda: &Cuda) -> Result<Self, KernelError> {
        let image = |(unit, _): (&'static str, _)| {
            let mut units = UNITS.iter();
            let (_, image) = units
                .find(|(name, _)| *name == unit)
                .ok_or(KernelError::NotCompiled { kernel: unit })?;
            Ok((unit, &image.0))
        };
        let images = KERNELS.into_iter().map(image);
        let images: Vec<_> = images.collect::<Result<_, KernelError>>()?;
        // SAFETY: each image is a whole fat binary, made by nvcc.
        let library = unsafe { CudaLibrary::load(cuda, images) }?;
        let mut functions = BTreeMap::new();
        for (unit, kernels) in KERNELS {
            for &(name, kinds) in kernels {
                functions.insert(name, (kinds, library.function(unit, name)?));
            }
        }
        Ok(Self { library, functions })
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
        // SAFETY: the caller's promise; the parameters are those that the kernel takes.
        Ok(unsafe { self.library.launch(function, blocks, threads, &mut words) }?)
    }
}

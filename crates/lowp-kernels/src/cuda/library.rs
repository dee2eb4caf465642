//! [`CudaLibrary`]: the compiled kernels of another crate, loaded as those of this one are ([`Loaded`]).

#![expect(unsafe_code, reason = "loads kernels and launches them")]

use std::ffi::c_void;
use std::fmt;

use cudarc::driver::result;

use super::driver::failed;
use super::handle::Cuda;
use super::module::{CudaFunction, Loaded};
use crate::KernelError;

/// Compiled kernels of another crate (by `lowp-nvcc`), for the stream of a [`Cuda`] handle. They are unloaded after its work.
pub struct CudaLibrary {
    cuda: Cuda,
    loaded: Loaded,
}

impl fmt::Debug for CudaLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaLibrary({:?})", self.cuda)
    }
}

impl CudaLibrary {
    /// Loads `units`, fat binaries that begin at multiples of 16 bytes, each with its name.
    ///
    /// # Errors
    /// A device that they do not fit; this thread captures.
    ///
    /// # Safety
    /// Each is whole, and made by nvcc.
    pub unsafe fn load(
        cuda: &Cuda,
        units: impl IntoIterator<Item = (&'static str, &'static [u8])>,
    ) -> Result<Self, KernelError> {
        let mut library = Self {
            cuda: cuda.clone(),
            loaded: Loaded::default(),
        };
        let loaded = &mut library.loaded;
        cuda.foreign_work(
            || (),
            |_| {
                let mut units = units.into_iter();
                // SAFETY: the caller's promise.
                let added = units.try_for_each(|(unit, image)| unsafe { loaded.add(unit, image) });
                added.map_err(failed("cuModuleLoadData"))
            },
        )?;
        Ok(library)
    }

    /// The kernel `name` of `unit`.
    ///
    /// # Errors
    /// [`KernelError::NotCompiled`] where there is none.
    pub fn function(&self, unit: &str, name: &'static str) -> Result<CudaFunction, KernelError> {
        self.cuda
            .foreign_work(|| (), |_| self.loaded.function(unit, name))
    }

    /// Gives the stream a launch of `blocks` blocks of `threads` threads; `words` are the parameters, each from its lowest byte on.
    ///
    /// # Errors
    /// More blocks or threads than a device takes, or the device failed.
    ///
    /// # Safety
    /// The function is one of this library, and `words` are its parameters. Addresses among them are those of memory of the device as
    /// long as the kernel takes them to be, which is not freed before work that the stream has by now. A graph that captures the launch is
    /// not launched once the library or that memory is gone.
    pub unsafe fn launch(
        &self,
        CudaFunction(function): CudaFunction,
        blocks: [usize; 2],
        threads: [usize; 2],
        words: &mut [u64],
    ) -> Result<(), KernelError> {
        let [[bx, by], [tx, ty]] = launchable(blocks, threads)?;
        let mut pointers: Vec<*mut c_void> = words
            .iter_mut()
            .map(|word| (&raw mut *word).cast())
            .collect();
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

impl Drop for CudaLibrary {
    fn drop(&mut self) {
        // A kernel that still runs needs its module. Nobody is left to hear of one that stays.
        let loaded = &mut self.loaded;
        self.cuda.free_foreign(|| loaded.unload().for_each(drop));
    }
}

/// Most blocks of a launch, and threads of a block, on every device.
const MOST_BLOCKS: [usize; 2] = [(1 << 31) - 1, (1 << 16) - 1];
const MOST_THREADS: usize = 1024;

/// The sizes of a launch as the driver takes them.
fn launchable(blocks: [usize; 2], threads: [usize; 2]) -> Result<[[u32; 2]; 2], KernelError> {
    let [tx, ty] = threads;
    let fits = (1..=MOST_BLOCKS[0]).contains(&blocks[0])
        && (1..=MOST_BLOCKS[1]).contains(&blocks[1])
        && (1..=MOST_THREADS).contains(&tx.saturating_mul(ty));
    let narrow = |sizes: [usize; 2]| -> Option<[u32; 2]> {
        let [x, y] = sizes.map(|n| u32::try_from(n).ok());
        Some([x?, y?])
    };
    let sizes = narrow(blocks).zip(narrow(threads)).filter(|_| fits);
    let too_large = || KernelError::Launch { blocks, threads };
    sizes
        .map(|(blocks, threads)| [blocks, threads])
        .ok_or_else(too_large)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_those_that_a_device_takes() {
        let most = [(1 << 31) - 1, (1 << 16) - 1];
        let made = launchable(most, [32, 32]).expect("a launch");
        assert_eq!(made, [[u32::MAX >> 1, 65535], [32, 32]]);
        for (blocks, threads) in [
            ([1 << 31, 1], [32, 1]),
            ([1, 1 << 16], [32, 1]),
            ([1 << 32, 1], [32, 1]),
            ([0, 1], [32, 1]),
            ([1, 1], [1025, 1]),
            ([1, 1], [64, 32]),
            ([1, 1], [0, 32]),
            ([1, 1], [usize::MAX, 2]),
        ] {
            let error = launchable(blocks, threads).expect_err("too large");
            let expected = format!(
                "{}x{} blocks of {}x{}",
                blocks[0], blocks[1], threads[0], threads[1]
            );
            assert!(error.to_string().contains(&expected), "{error}");
        }
    }
}

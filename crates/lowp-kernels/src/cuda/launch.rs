//! One launch: a kernel and its table on the device.

#![expect(unsafe_code, reason = "launches kernels over a table of addresses")]

use std::ffi::c_void;

use cudarc::driver::{result, sys};

use super::buffer::Memory;
use super::device::Cuda;
use super::failed;
use super::geometry::{Job, tile_table};
use super::table::{Kernel, Tile, flags};
use crate::KernelError;

/// A kernel over a table that stays on the device.
#[derive(Debug)]
pub(super) struct Launch {
    kernel: Kernel,
    blocks: u32,
    tiles: u64,
    jobs: u64,
    /// Tiles, then jobs.
    #[expect(dead_code, reason = "held: `tiles` and `jobs` point into it")]
    table: Memory,
}

impl Launch {
    /// Lays `jobs` out and puts them on the device; `None` if there is nothing to do.
    pub(super) fn new<J: Job>(cuda: &Cuda, mut jobs: Vec<J>) -> Result<Option<Self>, KernelError> {
        jobs.iter_mut().for_each(Job::lay_out);
        J::lay_out_together(&mut jobs);
        let kernel = J::kernel(&jobs);
        let tiles = tile_table(&jobs).ok_or(KernelError::TooManyTiles {
            kernel: kernel.name(),
        })?;
        if tiles.is_empty() {
            return Ok(None);
        }
        let blocks = tiles.len() as u32;
        // Jobs have 8-byte fields.
        let jobs_at = (tiles.len() * size_of::<Tile>()).next_multiple_of(align_of::<J>().max(16));
        let table = Memory::zeros(cuda, jobs_at + jobs.len() * size_of::<J>())?;
        let jobs_pointer = table.pointer + jobs_at as u64;
        // SAFETY: both lie within the memory that was just allocated for them, one after the other.
        unsafe {
            table.upload(cuda, table.pointer, &tiles)?;
            table.upload(cuda, jobs_pointer, &jobs)?;
        }
        Ok(Some(Self {
            kernel,
            blocks,
            tiles: table.pointer,
            jobs: jobs_pointer,
            table,
        }))
    }

    /// Gives the launch to `stream`, with the scalars at `step`.
    ///
    /// # Safety
    /// The buffers that the jobs point to, this launch and `step` must live until the work is done;
    /// `stream` must be of the device of `cuda`.
    pub(super) unsafe fn enqueue(
        &self,
        cuda: &Cuda,
        stream: sys::CUstream,
        step: u64,
    ) -> Result<(), KernelError> {
        let function = cuda.device().modules.function(self.kernel)?;
        let (mut tiles, mut jobs, mut step, mut honor_skip) =
            (self.tiles, self.jobs, step, flags::HONOR_SKIP);
        let pointers: [*mut c_void; 4] = [
            (&raw mut tiles).cast(),
            (&raw mut jobs).cast(),
            (&raw mut step).cast(),
            (&raw mut honor_skip).cast(),
        ];
        let mut parameters = pointers;
        let threads = self.kernel.threads();
        // SAFETY: the parameters are those of every kernel (`table`) and are read before the call
        // returns; for what they point to the caller answers.
        let launched = unsafe {
            result::launch_kernel(
                function,
                (self.blocks, 1, 1),
                (threads, 1, 1),
                self.kernel.shared_bytes(),
                stream,
                &mut parameters,
            )
        };
        launched.map_err(failed("cuLaunchKernel"))
    }
}

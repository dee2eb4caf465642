//! Matrices divided by their norms.

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{MOMENTUM_TILE, Normalize};
use super::job::{Job, aligned, cdiv};
use crate::NormalizeJob;

pub(crate) fn job(job: &NormalizeJob<Cuda>) -> Normalize {
    Normalize {
        from: job.from.pointer(),
        sum: job.sum.pointer(),
        out: job.out.pointer(),
        len: job.from.len() as u64,
        ..Normalize::default()
    }
}

impl Job for Normalize {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_normalize")];

    fn lay_out(&mut self) {
        self.vector = u8::from(aligned(self.from | self.out, 0, 16));
    }

    fn tiles(&self) -> u64 {
        cdiv(self.len, MOMENTUM_TILE)
    }
}

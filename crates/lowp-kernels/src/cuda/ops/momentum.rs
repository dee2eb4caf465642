//! The momentum of a gradient.

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{MOMENTUM_TILE, Momentum};
use super::job::{Job, aligned, cdiv, source};
use crate::MomentumJob;

pub(crate) fn job(job: &MomentumJob<Cuda>) -> Momentum {
    let (grad, grad_code, len) = source(&job.grad);
    Momentum {
        grad,
        momentum: job.momentum.pointer(),
        out: job.out.pointer(),
        len,
        group: u32::try_from(job.group).unwrap_or(u32::MAX),
        grad_code,
        ..Momentum::default()
    }
}

impl Job for Momentum {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_momentum")];

    fn lay_out(&mut self) {
        self.vector = u8::from(aligned(self.grad | self.momentum | self.out, 0, 16));
    }

    fn tiles(&self) -> u64 {
        cdiv(self.len, MOMENTUM_TILE)
    }
}

//! The momentum of a gradient.

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{MOMENTUM_TILE, Momentum};
use super::job::{Job, Vector, aligned, cdiv};
use crate::MomentumJob;

pub(crate) fn job(job: &MomentumJob<Cuda>) -> Momentum {
    let grad = Vector::new(&job.grad);
    Momentum {
        grad: grad.pointer,
        momentum: job.momentum.pointer(),
        out: job.out.pointer(),
        len: grad.len,
        group: u32::try_from(job.group).unwrap_or(u32::MAX),
        grad_code: grad.code,
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

//! The momentum of a gradient (docs/numerics.md 22.1).

use half::bf16;

use super::convert::FloatSlice;
use super::stored::Stored;
use super::{Context, for_each, source};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::lanes::{Kernel, LANES, Lanes, Line};
use crate::{KernelError, MomentumJob};

/// Elements of one task.
const TASK: usize = 64 * 1024;

/// The update of consecutive elements.
struct Update<'a, G> {
    grad_scale: f32,
    mu: f32,
    grad: &'a [G],
    momentum: &'a mut [f32],
    out: &'a mut [bf16],
}

impl<G: Stored> Update<'_, G> {
    #[inline(always)]
    fn line<L: Lanes>(
        &self,
        lanes: L,
        grad: &[G; LANES],
        momentum: &mut Line,
        out: &mut [bf16; LANES],
    ) {
        let mu = lanes.splat(self.mu);
        let g = lanes.mul(G::load(lanes, grad), lanes.splat(self.grad_scale));
        let m = lanes.mul_add(mu, lanes.load(momentum), g);
        lanes.store(m, momentum);
        bf16::store(lanes, lanes.mul_add(mu, m, g), out);
    }
}

impl<G: Stored> Kernel for Update<'_, G> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let momentum = std::mem::take(&mut self.momentum);
        let out = std::mem::take(&mut self.out);
        let (gs, g) = self.grad.as_chunks::<LANES>();
        let (ms, m) = momentum.as_chunks_mut::<LANES>();
        let (outs, out) = out.as_chunks_mut::<LANES>();
        for ((g, m), out) in gs.iter().zip(ms).zip(outs) {
            self.line(lanes, g, m, out);
        }
        // The tail is a line of which only the beginning counts.
        let count = m.len();
        let (mut grad, mut momentum) = ([G::default(); LANES], [0.0; LANES]);
        let mut last = [bf16::ZERO; LANES];
        grad[..count].copy_from_slice(g);
        momentum[..count].copy_from_slice(m);
        self.line(lanes, &grad, &mut momentum, &mut last);
        m.copy_from_slice(&momentum[..count]);
        out.copy_from_slice(&last[..count]);
    }
}

/// A range of one job.
struct Task<'v, 'j> {
    job: &'j MomentumJob<Cpu>,
    grad: FloatSlice<'v>,
    momentum: &'v mut [f32],
    out: &'v mut [bf16],
}

impl Task<'_, '_> {
    fn run(self, context: &Context<'_>) {
        match self.grad {
            FloatSlice::F32(grad) => context.isa.run(self.update(grad, context)),
            FloatSlice::Bf16(grad) => context.isa.run(self.update(grad, context)),
        }
    }

    fn update<'a, G>(self, grad: &'a [G], context: &Context<'_>) -> Update<'a, G>
    where
        Self: 'a,
    {
        Update {
            grad_scale: context.scalars.grad_scale,
            mu: context.scalars.groups[self.job.group].beta1,
            grad,
            momentum: self.momentum,
            out: self.out,
        }
    }
}

/// Runs every job of a plan.
pub(crate) fn run(
    jobs: &[MomentumJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let mut tasks = Vec::new();
    for job in jobs {
        let grad = source(&job.grad, views)?;
        let momentum = views.floats.take(&job.momentum)?.chunks_mut(TASK);
        let out = views.halves.take(&job.out)?.chunks_mut(TASK);
        for (index, (momentum, out)) in momentum.zip(out).enumerate() {
            let start = index * TASK;
            let grad = grad.slice(start..start + out.len());
            tasks.push(Task {
                job,
                grad,
                momentum,
                out,
            });
        }
    }
    for_each(context, tasks, |task| {
        task.run(context);
        Ok(())
    })
}

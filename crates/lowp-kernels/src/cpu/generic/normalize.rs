//! Matrices divided by their norms (docs/numerics.md 22.3).

use half::bf16;

use super::stored::Stored;
use super::{Context, for_each};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::lanes::{Kernel, LANES, Lanes};
use crate::reference::inverse_norm;
use crate::{KernelError, NormalizeJob};

/// Elements of one task.
const TASK: usize = 64 * 1024;

/// `out = from * factor`.
struct Scale<'a> {
    factor: f32,
    from: &'a [bf16],
    out: &'a mut [bf16],
}

impl Kernel for Scale<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let factor = lanes.splat(self.factor);
        let (froms, from) = self.from.as_chunks::<LANES>();
        let (outs, out) = self.out.as_chunks_mut::<LANES>();
        for (from, out) in froms.iter().zip(outs) {
            bf16::store(lanes, lanes.mul(bf16::load(lanes, from), factor), out);
        }
        // The tail is a line of which only the beginning counts.
        let (mut last, count) = ([bf16::ZERO; LANES], out.len());
        last[..count].copy_from_slice(from);
        let x = lanes.mul(bf16::load(lanes, &last), factor);
        bf16::store(lanes, x, &mut last);
        out.copy_from_slice(&last[..count]);
    }
}

/// Runs every job of a plan.
pub(crate) fn run(
    jobs: &[NormalizeJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let mut tasks = Vec::new();
    for job in jobs {
        let sum = views.bytes.read(&job.sum)?.as_chunks::<8>().0;
        let sum = sum.first().copied().unwrap_or_default();
        let factor = inverse_norm(f64::from_le_bytes(sum));
        let from = views.halves.read(&job.from)?.chunks(TASK);
        let out = views.halves.take(&job.out)?.chunks_mut(TASK);
        tasks.extend(from.zip(out).map(|(from, out)| Scale { factor, from, out }));
    }
    for_each(context, tasks, |task| {
        context.isa.run(task);
        Ok(())
    })
}

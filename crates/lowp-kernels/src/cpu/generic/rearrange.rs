//! Copying runs of entries in another order.

use half::bf16;

use super::{Context, for_each};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::{KernelError, RearrangeJob, Rearranged, Runs};

/// The source and the destination.
enum Slices<'v> {
    Bytes(&'v [u8], &'v mut [u8]),
    F32(&'v [f32], &'v mut [f32]),
    Bf16(&'v [bf16], &'v mut [bf16]),
}

/// Runs every rearrangement of a plan: one task each, as its runs may lie anywhere in the destination.
pub(crate) fn run(
    jobs: &[RearrangeJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let mut tasks = Vec::new();
    for job in jobs {
        let slices = match &job.buffers {
            Rearranged::Bytes([from, to]) => {
                Slices::Bytes(views.bytes.read(from)?, views.bytes.take(to)?)
            }
            Rearranged::F32([from, to]) => {
                Slices::F32(views.floats.read(from)?, views.floats.take(to)?)
            }
            Rearranged::Bf16([from, to]) => {
                Slices::Bf16(views.halves.read(from)?, views.halves.take(to)?)
            }
        };
        tasks.push((&job.copies[..], slices));
    }
    for_each(context, tasks, |(copies, slices)| {
        match slices {
            Slices::Bytes(from, to) => rearrange(copies, from, to),
            Slices::F32(from, to) => rearrange(copies, from, to),
            Slices::Bf16(from, to) => rearrange(copies, from, to),
        }
        Ok(())
    })
}

fn rearrange<T: Copy>(copies: &[Runs], from: &[T], to: &mut [T]) {
    for copy in copies.iter().filter_map(Runs::normalized) {
        let [outer, middle, inner] = copy.counts;
        for (i, j) in (0..outer).flat_map(|i| (0..middle).map(move |j| (i, j))) {
            let at = |first: usize, pitch: [usize; 3]| first + i * pitch[0] + j * pitch[1];
            let mut source = at(copy.from, copy.from_pitch);
            let mut place = at(copy.to, copy.to_pitch);
            for _ in 0..inner {
                to[place..][..copy.len].copy_from_slice(&from[source..][..copy.len]);
                source += copy.from_pitch[2];
                place += copy.to_pitch[2];
            }
        }
    }
}

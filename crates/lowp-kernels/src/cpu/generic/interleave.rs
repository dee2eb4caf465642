//! Interleaving pieces that arrived one after another.

use super::{Context, for_each};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::{InterleaveJob, KernelError};

/// Bytes of one task, about.
const TASK: usize = 256 * 1024;

/// Runs every interleave of a plan.
pub(crate) fn run(
    jobs: &[InterleaveJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let mut tasks = Vec::new();
    for job in jobs {
        let from = views.bytes.read(&job.from)?;
        let width: usize = job.widths.iter().sum();
        if job.outer * width == 0 {
            continue;
        }
        let rows = (TASK / width).max(1);
        let to = views.bytes.take(&job.to)?;
        for (i, to) in to.chunks_mut(rows * width).enumerate() {
            tasks.push((job, from, i * rows, width, to));
        }
    }
    for_each(context, tasks, |(job, from, first, width, to)| {
        for (i, line) in to.chunks_exact_mut(width).enumerate() {
            let (mut line, mut piece) = (line, 0);
            for &bytes in &job.widths {
                let (head, tail) = line.split_at_mut(bytes);
                let start = piece + (first + i) * bytes;
                head.copy_from_slice(&from[start..start + bytes]);
                line = tail;
                piece += job.outer * bytes;
            }
        }
        Ok(())
    })
}

//! Interleaving pieces.

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
        let width: usize = job.pieces.iter().map(|piece| piece.width).sum();
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
            let mut line = line;
            for piece in &job.pieces {
                let (head, tail) = line.split_at_mut(piece.width);
                if !head.is_empty() {
                    let start = piece.start + (first + i) * piece.pitch;
                    head.copy_from_slice(&from[start..start + piece.width]);
                }
                line = tail;
            }
        }
        Ok(())
    })
}

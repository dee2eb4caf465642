//! Amax histories of delayed scaling (docs/numerics.md 4.2).

use lowp_format::history;

use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::{HistoryJob, KernelError};

/// Runs every history job, in order.
pub(crate) fn run(jobs: &[HistoryJob<Cpu>], views: &mut AllViews<'_>) -> Result<(), KernelError> {
    for job in jobs {
        let observed = std::mem::take(&mut views.floats.shared(&job.observed)?[job.index]);
        // A consumed entry says that nothing was observed since.
        let observed = if observed > 0.0 { observed } else { 0.0 };
        let scale = views.floats.shared(&job.scales)?[job.index];
        let column = views.floats.shared(&job.history)?;
        if let Some(newest) = column.first_mut() {
            *newest = newest.max(observed);
        }
        let (algorithm, margin) = (job.algorithm, job.margin);
        let next = history(
            column,
            scale,
            Some(observed),
            job.element,
            algorithm,
            margin,
        );
        views.floats.shared(&job.scales)?[job.index] = next;
    }
    Ok(())
}

//! From agreed amaxes to what encoding reads (docs/numerics.md 4.2 and 5.2).

use lowp_format::{ScaleSource, history, tensor_scale};

use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::{KernelError, ScaleJob};

/// Runs every scale job, in order.
pub(crate) fn run(jobs: &[ScaleJob<Cpu>], views: &mut AllViews<'_>) -> Result<(), KernelError> {
    for job in jobs {
        let observed = std::mem::take(&mut views.floats.shared(&job.observed)?[job.index]);
        let scale = views.floats.shared(&job.scales)?[job.index];
        let next = match job.rule {
            ScaleSource::None | ScaleSource::BlockAmax => scale,
            ScaleSource::TensorAndBlockAmax => observed,
            ScaleSource::TensorAmax { pow2, epsilon } => {
                tensor_scale(observed, job.element, pow2, epsilon)
            }
            ScaleSource::History {
                algorithm, margin, ..
            } => {
                let Some(buffer) = &job.history else { continue };
                let column = views.floats.shared(buffer)?;
                if let Some(newest) = column.first_mut() {
                    *newest = newest.max(observed);
                }
                history(
                    column,
                    scale,
                    Some(observed),
                    job.element,
                    algorithm,
                    margin,
                )
            }
        };
        views.floats.shared(&job.scales)?[job.index] = next;
    }
    Ok(())
}

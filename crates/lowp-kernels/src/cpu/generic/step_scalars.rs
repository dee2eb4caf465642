//! The scalars of an optimizer step from its sums of squares (docs/numerics.md 12.8).

use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::scalars::canonical;
use crate::{
    GradContribution, GroupScalars, KernelError, StepCounts, StepRecord, StepScalars,
    StepScalarsJob,
};

/// What the ranks have found out together.
struct Gradient {
    squares: f64,
    non_finite: u64,
    consensus: Option<usize>,
    replicas: Option<usize>,
    within: Option<usize>,
}

impl Gradient {
    fn new(parts: &[[u8; GradContribution::BYTES]], shards: usize, replica: usize) -> Self {
        let parts: Vec<GradContribution> = parts.iter().map(GradContribution::from_bytes).collect();
        let replicas: Vec<f64> = parts.chunks_exact(shards).map(squares).collect();
        let count = |sum: u64, part: &GradContribution| sum.wrapping_add(part.non_finite);
        let non_finite = parts.iter().fold(0, count);
        let differs = |part: &GradContribution| part.consensus != parts[0].consensus;
        let alone = |(rank, part): (usize, &GradContribution)| {
            part.within != parts[rank / shards * shards].within
        };
        let other = |squares: &f64| squares.to_bits() != replicas[0].to_bits();
        Self {
            squares: replicas[replica],
            non_finite,
            consensus: parts.iter().position(differs),
            // One replica's NaN may be spelled unlike another's.
            replicas: match non_finite {
                0 => replicas.iter().position(other),
                _ => None,
            },
            within: parts.iter().enumerate().position(alone),
        }
    }
}

/// The sum over the shards of a replica, in order.
fn squares(parts: &[GradContribution]) -> f64 {
    let sums = parts.iter().map(|part| part.sum_squares);
    sums.reduce(|sum, next| sum + next).unwrap_or(0.0)
}

/// The scalars of a step, and what becomes of it; `counts` are updated.
fn step(
    gradient: &Gradient,
    options: &StepScalars,
    counts: &mut StepCounts,
) -> (StepScalars, StepRecord) {
    let &Gradient {
        squares,
        non_finite,
        consensus,
        replicas,
        within,
    } = gradient;
    let norm = squares.sqrt() * f64::from(options.grad_scale.abs());
    // The smaller one, also of a NaN and 1.
    let clip = (f64::from(options.max_norm) / (norm + 1e-6)).min(1.0) as f32;
    let fits = norm * f64::from(clip) <= f64::from(f32::MAX);
    let agreed = consensus.is_none() && replicas.is_none() && within.is_none();
    let good = non_finite == 0 && options.grad_scale.is_finite() && fits && agreed;
    let applied = good && !options.skip;
    let step = counts.applied.wrapping_add(1);
    let group = |group: &GroupScalars| match group.bias_correction {
        true => group.at_step(step),
        false => GroupScalars {
            correction1: 1.0,
            correction2: 1.0,
            ..*group
        },
    };
    let scalars = StepScalars {
        groups: options.groups.iter().map(group).collect(),
        grad_scale: canonical(options.grad_scale * clip),
        skip: !applied,
        ..*options
    };
    if applied {
        counts.applied = step;
    } else if !options.skip {
        counts.skipped = counts.skipped.wrapping_add(1);
    }
    let report = StepRecord {
        norm: if norm.is_nan() { f64::NAN } else { norm },
        non_finite,
        steps: counts.applied,
        skipped: counts.skipped,
        clip,
        applied,
        consensus,
        replicas,
        within,
    };
    (scalars, report)
}

/// Runs every job of a plan.
pub(crate) fn run(
    jobs: &[StepScalarsJob<Cpu>],
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    for job in jobs {
        let parts = views.bytes.read(&job.parts)?.as_chunks().0;
        let options = StepScalars::from_bytes(views.bytes.read(&job.options)?)?;
        let gradient = Gradient::new(parts, job.shards, job.replica);
        let record = views.bytes.take(&job.counts)?;
        let mut counts = record
            .first_chunk()
            .map_or_else(StepCounts::default, StepCounts::from_bytes);
        let (scalars, report) = step(&gradient, &options, &mut counts);
        record.copy_from_slice(&counts.to_bytes());
        views
            .bytes
            .take(&job.out)?
            .copy_from_slice(&scalars.to_bytes());
        let record = views.bytes.take(&job.report)?;
        record.copy_from_slice(&report.to_bytes());
    }
    Ok(())
}

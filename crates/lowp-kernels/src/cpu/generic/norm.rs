//! Sums of squares in binary64, in the order of [`crate::SumSquaresJob`]. Squares of binary32 values
//! are exact in binary64.

use super::convert::FloatSlice;
use super::{Context, map, source};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::{KernelError, SumSquaresJob};
use lowp_format::SourceRounding;

/// Values of a run.
const RUN: usize = 4096;
/// Sums of a run.
const SUMS: usize = 256;
/// Runs of one task.
const TASK: usize = 16;

/// The sum of squares of one run, and how many of its values are not finite.
struct Squares<'a>(&'a [f32]);

impl Kernel for Squares<'_> {
    type Out = (f64, u64);
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) -> (f64, u64) {
        let (rows, rest) = self.0.as_chunks::<SUMS>();
        let mut sums = [0f64; SUMS];
        // The sums stay in the first-level cache: in registers, a few at a time, rows would be walked in
        // strides, which memory does not like (10 GB/s instead of 30).
        for row in rows {
            for i in 0..SUMS {
                let x = f64::from(row[i]);
                sums[i] += x * x;
            }
        }
        for (sum, &x) in sums.iter_mut().zip(rest) {
            *sum += f64::from(x) * f64::from(x);
        }
        let sum = halve(sums);
        // No finite values have a sum that is not finite.
        let non_finite = if sum.is_finite() {
            0
        } else {
            self.0.iter().filter(|x| !x.is_finite()).count() as u64
        };
        (sum, non_finite)
    }
}

/// Adds the upper half to the lower half until one is left.
#[inline(always)]
fn halve(mut sums: [f64; SUMS]) -> f64 {
    let mut half = SUMS / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}

/// The sum of sums of runs.
fn total(mut sums: Vec<f64>) -> f64 {
    while sums.len() > 1 {
        let runs = sums.chunks(RUN).map(|run| {
            let mut sums = [0f64; SUMS];
            for (i, &x) in run.iter().enumerate() {
                sums[i % SUMS] += x;
            }
            halve(sums)
        });
        sums = runs.collect();
    }
    sums.first().copied().unwrap_or(0.0)
}

fn run_sums(isa: Isa, values: FloatSlice<'_>) -> Vec<(f64, u64)> {
    let mut scratch = Vec::new();
    (0..values.len())
        .step_by(RUN)
        .map(|start| {
            let len = RUN.min(values.len() - start);
            let rounding = SourceRounding::F32;
            let rect = values.rect(isa, rounding, start, len, [1, len], &mut scratch);
            isa.run(Squares(rect.values))
        })
        .collect()
}

/// Runs every sum of a plan.
pub(crate) fn run(
    jobs: &[SumSquaresJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let mut tasks = Vec::new();
    for (index, job) in jobs.iter().enumerate() {
        let values = source(&job.source, views)?;
        for start in (0..values.len()).step_by(RUN * TASK) {
            let end = (start + RUN * TASK).min(values.len());
            tasks.push((index, values.slice(start..end)));
        }
    }
    let partials = map(context, tasks, |(job, values)| {
        (job, run_sums(context.isa, values))
    })?;
    let mut totals = vec![(Vec::new(), 0u64); jobs.len()];
    for (job, runs) in partials {
        for (sum, count) in runs {
            totals[job].0.push(sum);
            totals[job].1 += count;
        }
    }
    for (job, (sums, count)) in jobs.iter().zip(totals) {
        let sum = total(sums);
        let [old_sum, old_count, ..] = views.bytes.shared(&job.out)?.as_chunks_mut::<8>().0 else {
            continue;
        };
        *old_sum = (f64::from_le_bytes(*old_sum) + sum).to_le_bytes();
        *old_count = u64::from_le_bytes(*old_count)
            .wrapping_add(count)
            .to_le_bytes();
    }
    Ok(())
}

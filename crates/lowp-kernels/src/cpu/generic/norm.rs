//! Sums of squares in binary64, in a fixed order.
//!
//! A source is cut into chunks of 4096 elements. Within a chunk, lane `l` of 32 adds the squares
//! of elements `l`, `l + 32`, `l + 64`, ...; then the upper half of the lanes is added to the
//! lower half until one is left. The chunks' sums are added in order. Squares of binary32 values
//! are exact in binary64.

use super::convert::Values;
use super::{Context, map, source};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::lanes::Lanes;
use crate::{KernelError, SumSquaresJob};
use lowp_format::SourceRounding;

/// Elements per chunk.
const CHUNK: usize = 4096;
/// Lanes per chunk.
const LANES: usize = 32;
/// Chunks of one task.
const TASK: usize = 16;

/// The sum of squares of one chunk, and how many of its values are not finite.
struct Chunk<'a>(&'a [f32]);

impl Kernel for Chunk<'_> {
    type Out = (f64, u64);
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) -> (f64, u64) {
        let (rows, rest) = self.0.as_chunks::<LANES>();
        let mut sums = [0f64; LANES];
        let mut odd = [0u32; LANES];
        for row in rows {
            for lane in 0..LANES {
                let x = f64::from(row[lane]);
                sums[lane] += x * x;
                odd[lane] += u32::from(row[lane].to_bits() & 0x7F80_0000 == 0x7F80_0000);
            }
        }
        for (lane, &x) in rest.iter().enumerate() {
            sums[lane] += f64::from(x) * f64::from(x);
            odd[lane] += u32::from(!x.is_finite());
        }
        let mut half = LANES / 2;
        while half > 0 {
            for lane in 0..half {
                sums[lane] += sums[lane + half];
            }
            half /= 2;
        }
        (sums[0], odd.iter().map(|&n| u64::from(n)).sum())
    }
}

fn chunk_sums(isa: Isa, values: Values<'_>) -> Vec<(f64, u64)> {
    let mut scratch = Vec::new();
    (0..values.len())
        .step_by(CHUNK)
        .map(|start| {
            let len = CHUNK.min(values.len() - start);
            let rounding = SourceRounding::F32;
            let rect = values.rect(isa, rounding, start, len, [1, len], &mut scratch);
            isa.run(Chunk(rect.values))
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
        for start in (0..values.len()).step_by(CHUNK * TASK) {
            let end = (start + CHUNK * TASK).min(values.len());
            tasks.push((index, values.slice(start..end)));
        }
    }
    let partials = map(context, tasks, |(job, values)| {
        (job, chunk_sums(context.isa, values))
    });
    let mut totals = vec![(0f64, 0u64); jobs.len()];
    for (job, sums) in partials {
        for (sum, count) in sums {
            totals[job].0 += sum;
            totals[job].1 += count;
        }
    }
    for (job, (sum, count)) in jobs.iter().zip(totals) {
        let [old_sum, old_count] = views.bytes.shared(&job.out)?.as_chunks_mut::<8>().0 else {
            continue;
        };
        *old_sum = (f64::from_le_bytes(*old_sum) + sum).to_le_bytes();
        *old_count = u64::from_le_bytes(*old_count)
            .wrapping_add(count)
            .to_le_bytes();
    }
    Ok(())
}

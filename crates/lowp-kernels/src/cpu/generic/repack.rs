//! Converting a buffer between its Compact, Padded and Swizzled forms (docs/scale-layouts.md).

use lowp_format::ScaleLayout;
use lowp_format::codec::e2m1;

use super::{Context, for_each};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::{KernelError, RepackJob};

/// Outer entries of one task: one row of swizzle tiles, contiguous in every form.
const ROWS: usize = 128;

struct Part<'a> {
    from_layout: &'a ScaleLayout,
    to_layout: &'a ScaleLayout,
    first: usize,
    from: &'a [u8],
    to: &'a mut [u8],
}

/// Fills outer entries `first..first + ROWS`.
fn repack(part: Part<'_>) {
    let Part {
        from_layout,
        to_layout,
        first,
        from,
        to,
    } = part;
    to.fill(0);
    let base = to_layout.offset(first, 0);
    let rows = first..(first + ROWS).min(to_layout.entries()[0]);
    let bits = to_layout.code().bits();
    for i in rows {
        for j in 0..to_layout.entries()[1] {
            let source = to_layout.source(from_layout, i, j);
            let at = to_layout.offset(i, j) - base;
            if bits == 4 {
                e2m1::set_nibble(to, at, e2m1::nibble(from, source));
            } else {
                let size = bits / 8;
                to[at * size..][..size].copy_from_slice(&from[source * size..][..size]);
            }
        }
    }
}

/// Runs every repack of a plan.
pub(crate) fn run(
    jobs: &[RepackJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let mut tasks = Vec::new();
    for RepackJob {
        from_layout,
        to_layout,
        from,
        to,
    } in jobs
    {
        let from = views.bytes.read(from)?;
        let to = views.bytes.take(to)?;
        let bytes = ROWS * to_layout.code().bytes(to_layout.padded()[1]);
        for (i, to) in to.chunks_mut(bytes.max(1)).enumerate() {
            tasks.push(Part {
                from_layout,
                to_layout,
                first: i * ROWS,
                from,
                to,
            });
        }
    }
    for_each(context, tasks, |part| {
        repack(part);
        Ok(())
    })
}

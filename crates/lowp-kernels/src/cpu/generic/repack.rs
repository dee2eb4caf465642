//! Converting a buffer between its Compact, Padded and Swizzled forms (docs/scale-layouts.md).

use lowp_format::codec::e2m1;
use lowp_format::{Form, ScaleLayout};

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
    let row_of = |layout: &ScaleLayout| layout.code().bytes(layout.padded()[1]);
    let rows_stay = [from_layout, to_layout]
        .iter()
        .all(|l| l.form() != Form::Swizzled)
        && from_layout.axes() == to_layout.axes()
        && from_layout.tile()[1] == to_layout.tile()[1];
    for i in rows {
        // Padding and repetition keep the order within a row. One by one, scales took half of what `lowp quantize` mxfp8 computes.
        if bits >= 8 && rows_stay {
            let row = to_layout.code().bytes(to_layout.entries()[1]);
            let source = i * to_layout.tile()[0] / from_layout.tile()[0] * row_of(from_layout);
            let at = (i - first) * row_of(to_layout);
            to[at..][..row].copy_from_slice(&from[source..][..row]);
            continue;
        }
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

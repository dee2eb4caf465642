//! Amaxes of tensors and blocks (docs/numerics.md 2.2).

use lowp_format::{BufferSpec, HADAMARD_ROWS, Shape, SourceRounding, magnitude};

use super::convert::FloatSlice;
use super::hadamard::transform;
use super::maxima::Amax;
use super::{Context, map, source, threads};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::lanes::Lanes;
use crate::lanes::{Isa, Kernel};
use crate::rounding::round_bf16;
use crate::{AmaxJob, BlockAmax, KernelError};

/// Elements of one task.
const TASK: usize = 64 * 1024;
/// Elements of one task, at least, where each has maxima of all columns.
const COLUMNS_TASK: usize = 16 * TASK;
/// Such tasks of a thread, at most: all maxima are there at once, and those of a task of one row are as many as its elements.
const COLUMNS_TASKS: usize = 4;
/// Elements widened at a time.
const CHUNK: usize = 4096;

/// The amax of `values`, as bits. Rounding is monotonic, so it may follow the maximum.
fn tensor_amax(isa: Isa, values: FloatSlice<'_>, rounding: SourceRounding) -> u32 {
    let mut scratch = Vec::new();
    let mut bits = 0;
    for start in (0..values.len()).step_by(CHUNK) {
        let cols = CHUNK.min(values.len() - start);
        let rect = values.rect(
            isa,
            SourceRounding::F32,
            start,
            cols,
            [1, cols],
            &mut scratch,
        );
        bits = bits.max(isa.run(Amax(rect)).to_bits());
    }
    round_bits(bits, rounding)
}

/// `bits`, an amax, as the amax of rounded values.
pub(super) fn round_bits(bits: u32, rounding: SourceRounding) -> u32 {
    match rounding {
        SourceRounding::F32 => bits,
        SourceRounding::ViaBf16 => round_bf16(f32::from_bits(bits)).to_bits(),
    }
}

/// Block amaxes of the elements `start..start + values.len()` of a matrix of `cols` columns.
struct Blocks<'a> {
    values: &'a [f32],
    start: usize,
    cols: usize,
    block: [usize; 2],
    across: usize,
    /// Maxima as bits, of block rows from `first_group` on.
    first_group: usize,
    out: &'a mut [u32],
}

impl Kernel for Blocks<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let Self {
            mut values,
            start,
            cols,
            block: [height, width],
            across,
            first_group,
            out,
        } = self;
        let mut at = start;
        while !values.is_empty() {
            let (row, col) = (at / cols, at % cols);
            let (line, rest) = values.split_at((cols - col).min(values.len()));
            let out = &mut out[(row / height - first_group) * across..][..across];
            if width == 1 {
                for (out, &x) in out[col..].iter_mut().zip(line) {
                    *out = (*out).max(magnitude(x));
                }
            } else {
                let (mut left, mut col) = (line, col);
                while !left.is_empty() {
                    let (part, rest) = left.split_at((width - col % width).min(left.len()));
                    let out = &mut out[col / width];
                    *out = part.iter().fold(*out, |a, &x| a.max(magnitude(x)));
                    col += part.len();
                    left = rest;
                }
            }
            at += line.len();
            values = rest;
        }
    }
}

enum Task<'v> {
    /// Whole groups of rows, after the Hadamard transform.
    Transformed {
        job: usize,
        values: FloatSlice<'v>,
    },
    Tensor {
        job: usize,
        values: FloatSlice<'v>,
    },
    Blocks {
        job: usize,
        part: BlockAmax,
        start: usize,
        cols: usize,
        values: FloatSlice<'v>,
    },
}

/// Instead of the maximum of a block of which no element is there: its entry stays what it is.
const UNTOUCHED: u32 = u32::MAX;

/// Marks the blocks without elements in `bits`, the maxima of one block row, of which the elements
/// `range` are there.
fn mark_untouched(bits: &mut [u32], range: std::ops::Range<usize>, cols: usize, width: usize) {
    if range.len() >= cols {
        return;
    }
    // Less than a row: one run of columns, or the end of one row and the beginning of the next.
    let first = range.start % cols;
    let end = first + range.len();
    for (block, bits) in bits.iter_mut().enumerate() {
        let (left, right) = (block * width, (block * width + width).min(cols));
        let touched = left < end && right > first || left + cols < end;
        if !touched {
            *bits = UNTOUCHED;
        }
    }
}

enum Partial {
    Tensor {
        job: usize,
        bits: u32,
    },
    Blocks {
        job: usize,
        start: usize,
        bits: Vec<u32>,
    },
}

fn run_task(isa: Isa, jobs: &[AmaxJob<Cpu>], task: Task<'_>) -> Partial {
    match task {
        Task::Transformed { job, values } => {
            let AmaxJob {
                shape,
                source_rounding,
                ..
            } = &jobs[job];
            let (cols, mut scratch) = (shape.cols, [Vec::new(), Vec::new()]);
            let [rounded, transformed] = &mut scratch;
            let size = [values.len() / cols, cols];
            let rect = values.rect(isa, *source_rounding, 0, cols, size, rounded);
            let bits = isa.run(Amax(transform(isa, rect, transformed))).to_bits();
            Partial::Tensor { job, bits }
        }
        Task::Tensor { job, values } => {
            let bits = tensor_amax(isa, values, jobs[job].source_rounding);
            Partial::Tensor { job, bits }
        }
        Task::Blocks {
            job,
            part,
            start,
            cols,
            values,
        } => {
            let [height, width] = clipped(part.block, jobs[job].shape);
            let across = cols.div_ceil(width);
            let first_group = start / cols / height;
            let groups = ((start + values.len() - 1) / cols / height) - first_group + 1;
            let mut bits = vec![0; groups * across];
            let mut scratch = Vec::new();
            for from in (0..values.len()).step_by(CHUNK) {
                let len = CHUNK.min(values.len() - from);
                let rounding = SourceRounding::F32;
                let rect = values.rect(isa, rounding, from, len, [1, len], &mut scratch);
                isa.run(Blocks {
                    values: rect.values,
                    start: start + from,
                    cols,
                    block: [height, width],
                    across,
                    first_group,
                    out: &mut bits,
                });
            }
            bits.iter_mut()
                .for_each(|b| *b = round_bits(*b, jobs[job].source_rounding));
            let (unit, end) = (height * cols, start + values.len());
            for (group, bits) in bits.chunks_exact_mut(across).enumerate() {
                let row = (first_group + group) * unit;
                mark_untouched(bits, start.max(row)..end.min(row + unit), cols, width);
            }
            Partial::Blocks {
                job,
                start: part.start + first_group * across,
                bits,
            }
        }
    }
}

/// Rows of a task that has maxima of all columns, of a matrix of `shape`.
pub(super) fn rows_of_columns_task(shape: Shape) -> usize {
    let most = COLUMNS_TASKS * threads::available();
    let rows = COLUMNS_TASK / shape.cols.max(1);
    rows.max(shape.rows.div_ceil(most)).max(1)
}

/// `block` within a matrix of `shape`.
fn clipped(block: [usize; 2], shape: Shape) -> [usize; 2] {
    let side = |side: usize, len: usize| match side {
        BufferSpec::WHOLE => len.max(1),
        side => side,
    };
    [side(block[0], shape.rows), side(block[1], shape.cols)]
}

/// The amaxes of lines of a matrix of `shape` from its rows from `first` on, which hold `values`: their first entry, and their bits.
pub(super) fn raise_lines(
    isa: Isa,
    shape: Shape,
    part: BlockAmax,
    first: usize,
    values: &[f32],
    rounding: SourceRounding,
) -> (usize, Vec<u32>) {
    let block = clipped(part.block, shape);
    let across = shape.cols.div_ceil(block[1]);
    let first_group = first / block[0];
    let groups = (first + values.len() / shape.cols).div_ceil(block[0]) - first_group;
    let mut bits = vec![0; groups * across];
    isa.run(Blocks {
        values,
        start: first * shape.cols,
        cols: shape.cols,
        block,
        across,
        first_group,
        out: &mut bits,
    });
    bits.iter_mut().for_each(|b| *b = round_bits(*b, rounding));
    (part.start + first_group * across, bits)
}

/// Runs every amax job of a plan.
pub(crate) fn run(
    jobs: &[AmaxJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let mut tasks = Vec::new();
    for (index, job) in jobs.iter().enumerate() {
        let values = source(&job.source, views)?;
        if values.len() == 0 {
            continue;
        }
        if job.hadamard {
            let unit = HADAMARD_ROWS * job.shape.cols;
            let unit = unit * (TASK / unit).max(1);
            tasks.extend(
                (0..values.len())
                    .step_by(unit)
                    .map(|start| Task::Transformed {
                        job: index,
                        values: values.slice(start..(start + unit).min(values.len())),
                    }),
            );
            continue;
        }
        if job.tensor.is_some() {
            for start in (0..values.len()).step_by(TASK) {
                let end = (start + TASK).min(values.len());
                tasks.push(Task::Tensor {
                    job: index,
                    values: values.slice(start..end),
                });
            }
        }
        let cols = job.shape.cols;
        for &part in &job.blocks {
            // Tasks are cut at block rows of the full matrix, so that no two share a block; or, of columns, at rows.
            let unit = match part.block[0] {
                BufferSpec::WHOLE => cols * rows_of_columns_task(job.shape),
                rows => rows * cols * (TASK / (rows * cols)).max(1),
            };
            let (mut at, end) = (job.start, job.start + values.len());
            while at < end {
                let next = ((at / unit + 1) * unit).min(end);
                let values = values.slice(at - job.start..next - job.start);
                tasks.push(Task::Blocks {
                    job: index,
                    part,
                    start: at,
                    cols,
                    values,
                });
                at = next;
            }
        }
    }
    let partials = map(context, tasks, |task| run_task(context.isa, jobs, task))?;
    for partial in partials {
        match partial {
            Partial::Tensor { job, bits } => {
                if let Some(entry) = jobs[job].tensor {
                    raise(&mut views.floats.shared(&jobs[job].out)?[entry], bits);
                }
            }
            Partial::Blocks { job, start, bits } => {
                raise_all(&mut views.floats.shared(&jobs[job].out)?[start..], &bits);
            }
        }
    }
    Ok(())
}

/// Raises entries by maxima as bits, but for those of blocks without elements.
pub(super) fn raise_all(out: &mut [f32], bits: &[u32]) {
    for (out, &bits) in out.iter_mut().zip(bits) {
        if bits != UNTOUCHED {
            raise(out, bits);
        }
    }
}

/// `out = max(out, amax)`; an entry that is negative (consumed) or NaN is replaced.
pub(super) fn raise(out: &mut f32, bits: u32) {
    let amax = f32::from_bits(bits);
    let keep = out.is_sign_positive() && *out >= amax;
    if !keep {
        *out = amax;
    }
}

//! Decoding to f32 (docs/numerics.md 5.3, 6.4 and 7.4).

use lowp_format::{Axis, Shape};

use super::turn::Turn;
use super::{Context, for_each};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::isa::{Isa, Kernel};
use crate::table::{ElementCode, ScaleEntry, ScaleKernel, Visit, dispatch};
use crate::{DecodeJob, KernelError};

/// Rows of a task; a multiple of 2.
const ROWS: usize = 64;
/// Columns decoded at a time; even.
const COLS: usize = 256;

/// Bytes of an orientation and where its entries lie.
#[derive(Clone, Copy)]
struct Codes<'v> {
    bytes: &'v [u8],
    transposed: bool,
    row_bytes: usize,
}

struct Task<'v> {
    isa: Isa,
    shape: Shape,
    data: Codes<'v>,
    scales: Option<(Codes<'v>, [usize; 2])>,
    first: usize,
    out: &'v mut [f32],
}

impl Visit for Task<'_> {
    type Out = ();

    fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) {
        let Self {
            isa,
            shape,
            data,
            scales,
            first,
            out,
        } = self;
        let rows = out.len() / shape.cols;
        let mut codes = vec![E::Bits::default(); rows * COLS.min(shape.cols)];
        let mut columns = codes.clone();
        let mut factors = vec![1f32; COLS.min(shape.cols)];
        for col in (0..shape.cols).step_by(COLS) {
            let cols = COLS.min(shape.cols - col);
            let codes = &mut codes[..rows * cols];
            if data.transposed {
                let columns = &mut columns[..rows * cols];
                isa.run(LoadColumns::<E> {
                    data,
                    first,
                    col,
                    rows,
                    codes: columns,
                });
                isa.run(Turn {
                    from: columns,
                    rows: cols,
                    cols: rows,
                    to: codes,
                });
            } else {
                isa.run(LoadRows::<E> {
                    data,
                    first,
                    col,
                    cols,
                    codes,
                });
            }
            let mut row = 0;
            while row < rows {
                // Rows up to the next block row share their factors.
                let mut end = rows;
                if let Some((scales, [height, width])) = scales.filter(|_| R::BLOCKS) {
                    let group = (first + row) / height;
                    end = ((group + 1) * height - first).min(rows);
                    fill_factors(rule, scales, group, width, col, &mut factors[..cols]);
                } else if row == 0 {
                    factors[..cols].fill(rule.decode(R::Entry::default()));
                }
                isa.run(Apply::<E> {
                    codes: &codes[row * cols..end * cols],
                    factors: &factors[..cols],
                    scaled: R::SCALED,
                    stride: shape.cols,
                    out: &mut out[row * shape.cols + col..],
                });
                row = end;
            }
        }
    }
}

/// The factors of columns `col..col + factors.len()` of block row `group`.
fn fill_factors<R: ScaleKernel>(
    rule: R,
    scales: Codes<'_>,
    group: usize,
    width: usize,
    col: usize,
    factors: &mut [f32],
) {
    let entry = |across: usize| {
        let (row, index) = if scales.transposed {
            (across, group)
        } else {
            (group, across)
        };
        R::Entry::load(
            &scales.bytes[row * scales.row_bytes..][..scales.row_bytes],
            index,
        )
    };
    let (mut at, end) = (col, col + factors.len());
    while at < end {
        let next = ((at / width + 1) * width).min(end);
        factors[at - col..next - col].fill(rule.decode(entry(at / width)));
        at = next;
    }
}

struct LoadRows<'a, E: ElementCode> {
    data: Codes<'a>,
    first: usize,
    col: usize,
    cols: usize,
    codes: &'a mut [E::Bits],
}

impl<E: ElementCode> Kernel for LoadRows<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let [start, len] = [E::CODE.bytes(self.col), E::CODE.bytes(self.cols)];
        for (row, codes) in self.codes.chunks_exact_mut(self.cols).enumerate() {
            let at = (self.first + row) * self.data.row_bytes + start;
            E::unpack(&self.data.bytes[at..at + len], codes);
        }
    }
}

struct LoadColumns<'a, E: ElementCode> {
    data: Codes<'a>,
    first: usize,
    col: usize,
    rows: usize,
    codes: &'a mut [E::Bits],
}

impl<E: ElementCode> Kernel for LoadColumns<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let [start, len] = [E::CODE.bytes(self.first), E::CODE.bytes(self.rows)];
        for (i, codes) in self.codes.chunks_exact_mut(self.rows).enumerate() {
            let at = (self.col + i) * self.data.row_bytes + start;
            E::unpack(&self.data.bytes[at..at + len], codes);
        }
    }
}

struct Apply<'a, E: ElementCode> {
    codes: &'a [E::Bits],
    factors: &'a [f32],
    scaled: bool,
    stride: usize,
    out: &'a mut [f32],
}

impl<E: ElementCode> Kernel for Apply<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let cols = self.factors.len();
        for (row, codes) in self.codes.chunks_exact(cols).enumerate() {
            let out = &mut self.out[row * self.stride..][..cols];
            if self.scaled {
                for ((out, &code), &factor) in out.iter_mut().zip(codes).zip(self.factors) {
                    *out = E::decode(code) * factor;
                }
            } else {
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = E::decode(code);
                }
            }
        }
    }
}

/// Runs every decode of a plan.
pub(crate) fn run(
    jobs: &[DecodeJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let mut tasks = Vec::new();
    for job in jobs {
        let shape = job.shape;
        let mut codes = |target: &crate::Target<Cpu>| {
            let transposed = target.spec.axes[0] == Axis::Cols;
            let row_bytes = target.spec.row_bytes(shape);
            views.bytes.read(&target.bytes).map(|bytes| Codes {
                bytes,
                transposed,
                row_bytes,
            })
        };
        let data = codes(&job.data)?;
        let scales = match &job.block_scale {
            Some(target) => Some((codes(target)?, target.spec.block())),
            None => None,
        };
        let tensor = match &job.tensor_scale {
            Some(buffer) => f32::load(views.bytes.read(buffer)?, 0),
            None => 1.0,
        };
        let out = views.floats.take(&job.out)?;
        for (i, out) in out.chunks_mut((ROWS * shape.cols).max(1)).enumerate() {
            let first = i * ROWS;
            let task = Task {
                isa: context.isa,
                shape,
                data,
                scales,
                first,
                out,
            };
            tasks.push((job, tensor, task));
        }
    }
    for_each(context, tasks, |(job, tensor, task)| {
        dispatch(&job.kernel, tensor, task)
    })
}

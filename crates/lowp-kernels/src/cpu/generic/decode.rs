//! Decoding to f32 (docs/numerics.md 5.3, 6.4 and 7.4).

use lowp_format::{Axis, Shape};

use super::maxima::one_by_one;
use super::turn::Turn;
use super::{Context, for_each};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::lanes::Lanes;
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
                isa.run(LoadCodes::<E> {
                    data,
                    row: col,
                    first,
                    len: rows,
                    codes: columns,
                });
                isa.run(Turn {
                    from: columns,
                    stride: rows,
                    rows: cols,
                    cols: rows,
                    to: codes,
                });
            } else {
                isa.run(LoadCodes::<E> {
                    data,
                    row: first,
                    first: col,
                    len: cols,
                    codes,
                });
            }
            let Some((scales, [height, width])) = scales.filter(|_| R::BLOCKS) else {
                factors[..cols].fill(rule.decode(R::Entry::default()));
                let (factors, out) = (&factors[..cols], &mut out[col..]);
                isa.run(Apply::<E> {
                    codes,
                    factors,
                    scaled: R::SCALED,
                    stride: shape.cols,
                    out,
                });
                continue;
            };
            let mut row = 0;
            while row < rows {
                // Rows up to the next block row share their factors.
                let group = (first + row) / height;
                let end = ((group + 1) * height - first).min(rows);
                let factors = &mut factors[..cols];
                isa.run(Factors {
                    rule,
                    scales,
                    group,
                    width,
                    col,
                    factors,
                });
                isa.run(Apply::<E> {
                    codes: &codes[row * cols..end * cols],
                    factors,
                    scaled: true,
                    stride: shape.cols,
                    out: &mut out[row * shape.cols + col..],
                });
                row = end;
            }
        }
    }
}

/// The factors of columns `col..col + factors.len()` of block row `group`.
struct Factors<'a, R> {
    rule: R,
    scales: Codes<'a>,
    group: usize,
    width: usize,
    col: usize,
    factors: &'a mut [f32],
}

impl<R: ScaleKernel> Factors<'_, R> {
    /// The factor of block column `across`.
    #[inline(always)]
    fn factor(rule: R, scales: Codes<'_>, group: usize, across: usize) -> f32 {
        let (row, index) = if scales.transposed {
            (across, group)
        } else {
            (group, across)
        };
        let line = &scales.bytes[row * scales.row_bytes..][..scales.row_bytes];
        rule.decode(R::Entry::load(line, index))
    }

    /// Factors of blocks of `N` columns, from block column `first` on.
    #[inline(always)]
    fn fill<const N: usize>(
        rule: R,
        scales: Codes<'_>,
        group: usize,
        first: usize,
        out: &mut [f32],
    ) {
        let (blocks, rest) = out.as_chunks_mut::<N>();
        one_by_one!(i in blocks.len() => {
            blocks[i] = [Self::factor(rule, scales, group, first + i); N];
        });
        if !rest.is_empty() {
            rest.fill(Self::factor(rule, scales, group, first + blocks.len()));
        }
    }
}

impl<R: ScaleKernel> Kernel for Factors<'_, R> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let Self {
            rule,
            scales,
            group,
            width,
            col,
            factors,
        } = self;
        // A chunk may begin within a block.
        let before = col.next_multiple_of(width) - col;
        let (head, tail) = factors.split_at_mut(before.min(factors.len()));
        if !head.is_empty() {
            head.fill(Self::factor(rule, scales, group, col / width));
        }
        let first = col.div_ceil(width);
        match width {
            1 if !scales.transposed => {
                let line = &scales.bytes[group * scales.row_bytes..][..scales.row_bytes];
                for (i, factor) in tail.iter_mut().enumerate() {
                    *factor = rule.decode(R::Entry::load(line, first + i));
                }
            }
            16 => Self::fill::<16>(rule, scales, group, first, tail),
            32 => Self::fill::<32>(rule, scales, group, first, tail),
            _ => {
                for (i, part) in tail.chunks_mut(width).enumerate() {
                    part.fill(Self::factor(rule, scales, group, first + i));
                }
            }
        }
    }
}

/// Unpacks `len` entries, from entry `first` on, of consecutive physical rows from `row` on.
struct LoadCodes<'a, E: ElementCode> {
    data: Codes<'a>,
    row: usize,
    first: usize,
    len: usize,
    codes: &'a mut [E::Bits],
}

impl<E: ElementCode> Kernel for LoadCodes<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let [start, bytes] = [E::CODE.bytes(self.first), E::CODE.bytes(self.len)];
        for (i, codes) in self.codes.chunks_exact_mut(self.len).enumerate() {
            let at = (self.row + i) * self.data.row_bytes + start;
            E::unpack(&self.data.bytes[at..at + bytes], codes);
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
    fn run<L: Lanes>(self, _: L) {
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

//! Decoding (docs/numerics.md 5.3, 6.4 and 7.4).

use std::marker::PhantomData;

use half::bf16;
use lowp_format::{Axis, KernelKey, Orientation, Shape};
use smallvec::SmallVec;

use super::codes::{Ahead, Codes};
use super::factors::{Factor, Factors, NoFactor, Scales, Scratch};
use super::lines::Lines;
use super::{Context, for_each};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::ingredients::{ElementCode, ScaleKernel, Visit, dispatch};
use crate::lanes::TransposeDense;
use crate::lanes::{Isa, Kernel};
use crate::lanes::{LANES, Lanes, Out, Stored};
use crate::{DecodeJob, KernelError, Source as Values};

/// Rows of a task, in cells: of transposed bytes one cache line of every column.
const ROWS: usize = 64;
/// Columns of transposed data that are transposed at a time. The lines of the panel after them are
/// fetched while they are decoded: `decode fp8-delayed columnwise` gains half.
const PANEL: usize = 64;
/// Columns of row-major data that are decoded at a time: their factors stay in the first-level
/// cache.
const COLS: usize = 4096;
/// Elements of a plan from which values are written past the caches, which would not hold them.
pub(crate) const STREAMED: usize = 4 << 20;

/// What a job's tasks have in common.
#[derive(Clone, Copy)]
struct Known<'v> {
    isa: Isa,
    /// Whether to write past the caches.
    stream: bool,
    shape: Shape,
    data: Codes<'v>,
    scales: Option<Scales<'v>>,
    /// The orientation, whose lines may have scales or amaxes.
    orientation: Orientation,
    key: &'v KernelKey,
    outer: Outer<'v>,
}

struct Task<'v, T> {
    known: Known<'v>,
    first: usize,
    out: &'v mut [T],
}

/// Scales or amaxes of the tensor or its lines, as bytes of f32.
#[derive(Clone, Copy)]
struct Outer<'v>(&'v [u8]);

impl Outer<'_> {
    /// Entry `index`; 1 where there is none.
    fn get(self, index: usize) -> f32 {
        let entry = self.0.as_chunks().0.get(index).copied();
        entry.map_or(1.0, f32::from_le_bytes)
    }
}

impl<T: Stored> Visit for Task<'_, T> {
    type Out = ();

    fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) {
        let Self { known, first, out } = self;
        let Known {
            isa,
            stream,
            shape,
            data,
            scales,
            orientation,
            key,
            outer,
        } = known;
        let rows = out.len() / shape.cols;
        let mut lines = SmallVec::new();
        let rules = Lines::new(
            orientation,
            key,
            rule,
            |line| outer.get(line),
            [first, 0],
            [rows, shape.cols],
            &mut lines,
        );
        let step = if data.transposed { PANEL } else { COLS }.min(shape.cols);
        let mut panel = Panel::<E>::new(data, first, rows);
        let mut scratch = Scratch::new(rules, step);
        let mut out = Out::new(out);
        let strip = E::CODE.bytes(first)..E::CODE.bytes(first) + E::CODE.bytes(rows);
        for col in (0..shape.cols).step_by(step) {
            let cols = step.min(shape.cols - col);
            if data.transposed {
                panel.load(isa, col, cols);
            }
            let next = col + cols..(col + cols + PANEL).min(shape.cols);
            let ahead = [
                Some(Ahead::new(data, strip.clone(), next.clone())),
                scratch.ahead(scales, first..first + rows, next),
            ];
            let mut row = 0;
            while row < rows {
                // Rows up to the next block row share their factors.
                let (group, end) = match scales {
                    Some(Scales { block, .. }) if R::BLOCKS => {
                        let group = (first + row) / block[0];
                        (group, ((group + 1) * block[0] - first).min(rows))
                    }
                    _ => (0, rows),
                };
                let end = match rules {
                    Lines::Rows(_) => row + 1,
                    _ => end,
                };
                let source = if data.transposed {
                    Source::Cells {
                        cells: &panel.transposed,
                        row,
                        ahead: &ahead,
                    }
                } else {
                    let start = (first + row) * data.row_bytes + E::CODE.bytes(col);
                    Source::Rows {
                        bytes: &data.bytes[start..],
                        stride: data.row_bytes,
                    }
                };
                isa.run(Apply::<E, T> {
                    source,
                    stream,
                    factors: scratch.fill(isa, scales, group, row, [col, cols]),
                    size: [end - row, cols],
                    at: row * shape.cols + col,
                    stride: shape.cols,
                    out: &mut out,
                });
                row = end;
            }
        }
    }
}

/// Columns of transposed data, transposed to rows of cells.
struct Panel<'v, E: ElementCode> {
    data: Codes<'v>,
    /// The first row, and how many.
    rows: [usize; 2],
    columns: Vec<E::Bits>,
    /// Rows of the panel's columns, and a vector more, which the last row may read.
    transposed: Vec<E::Bits>,
}

impl<'v, E: ElementCode> Panel<'v, E> {
    fn new(data: Codes<'v>, first: usize, rows: usize) -> Self {
        let cells = rows.div_ceil(E::CODE.entries_per_byte());
        let len = if data.transposed { cells * PANEL } else { 0 };
        Self {
            data,
            rows: [first, rows],
            columns: vec![E::Bits::default(); len],
            transposed: vec![E::Bits::default(); len + LANES],
        }
    }

    /// Turns `cols` columns from `col` on.
    fn load(&mut self, isa: Isa, col: usize, cols: usize) {
        let [first, rows] = self.rows;
        let cells = rows.div_ceil(E::CODE.entries_per_byte());
        let columns = &mut self.columns[..cells * cols];
        isa.run(LoadColumns::<E> {
            bytes: &self.data.bytes[col * self.data.row_bytes + E::CODE.bytes(first)..],
            stride: self.data.row_bytes,
            rows,
            cells: &mut columns[..],
        });
        isa.run(TransposeDense {
            from: columns,
            stride: cells,
            rows: cols,
            cols: cells,
            to: &mut self.transposed,
        });
    }
}

/// Reads columns of `rows` rows to dense cells.
struct LoadColumns<'a, E: ElementCode> {
    bytes: &'a [u8],
    stride: usize,
    rows: usize,
    cells: &'a mut [E::Bits],
}

impl<E: ElementCode> Kernel for LoadColumns<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let cells = self.rows.div_ceil(E::CODE.entries_per_byte());
        let bytes = E::CODE.bytes(self.rows);
        for (i, cells) in self.cells.chunks_exact_mut(cells).enumerate() {
            E::load_cells(&self.bytes[i * self.stride..][..bytes], cells);
        }
    }
}

/// Where rows of codes come from.
#[derive(Clone, Copy)]
enum Source<'a, E: ElementCode> {
    /// Row-major bytes.
    Rows { bytes: &'a [u8], stride: usize },
    /// A panel, from `row` on.
    Cells {
        cells: &'a [E::Bits],
        row: usize,
        ahead: &'a [Option<Ahead>; 2],
    },
}

/// Decodes rows that share their factors.
struct Apply<'a, 'v, E: ElementCode, T> {
    source: Source<'a, E>,
    /// Whether to write past the caches.
    stream: bool,
    factors: Factors<'a>,
    /// Rows and columns.
    size: [usize; 2],
    at: usize,
    stride: usize,
    out: &'a mut Out<'v, T>,
}

impl<E: ElementCode, T: Stored> Kernel for Apply<'_, '_, E, T> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        // Constants first: the compiler makes no loop for what there is not.
        if T::STREAMS && L::STREAMS && self.stream {
            self.write::<true, L>(lanes);
        } else {
            self.write::<false, L>(lanes);
        }
    }
}

impl<E: ElementCode, T: Stored> Apply<'_, '_, E, T> {
    #[inline(always)]
    fn write<const STREAM: bool, L: Lanes>(self, lanes: L) {
        if !E::SCALED {
            return self.rows::<STREAM, L>(lanes, NoFactor);
        }
        match self.factors {
            Factors::Columns(factors) => self.rows::<STREAM, L>(lanes, factors),
            Factors::Blocks(factors) => self.rows::<STREAM, L>(lanes, factors),
        }
    }

    #[inline(always)]
    fn rows<const STREAM: bool, L: Lanes>(self, lanes: L, factors: impl Factor) {
        let Self {
            source,
            size: [rows, cols],
            at,
            stride,
            out,
            ..
        } = self;
        let per_cell = E::CODE.entries_per_byte();
        for i in 0..rows {
            let at = at + i * stride;
            match source {
                Source::Rows { bytes, stride } => {
                    let bytes = &bytes[i * stride..][..E::CODE.bytes(cols)];
                    let row = Bytes::<E>(bytes, PhantomData);
                    write_row::<STREAM, L, _, T>(lanes, row, factors, out, at, cols);
                }
                Source::Cells { cells, row, ahead } => {
                    let (cell, index) = ((row + i) / per_cell, (row + i) % per_cell);
                    if index == 0 {
                        for ahead in ahead.iter().flatten() {
                            ahead.fetch(lanes, cell);
                        }
                    }
                    let cells = &cells[cell * cols..];
                    if E::PACKED && index == 1 {
                        let row = Cells::<E, 1>(cells);
                        write_row::<STREAM, L, _, T>(lanes, row, factors, out, at, cols);
                    } else {
                        let row = Cells::<E, 0>(cells);
                        write_row::<STREAM, L, _, T>(lanes, row, factors, out, at, cols);
                    }
                }
            }
        }
    }
}

/// A row of codes.
trait Row: Copy {
    /// The values of vector `i`.
    fn vector<L: Lanes>(self, lanes: L, i: usize) -> L::F;
}

/// Row-major codes.
#[derive(Clone, Copy)]
struct Bytes<'a, E>(&'a [u8], PhantomData<E>);

impl<E: ElementCode> Row for Bytes<'_, E> {
    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L, i: usize) -> L::F {
        E::values(lanes, &self.0[i * E::CODE.bytes(LANES)..])
    }
}

/// Code `INDEX` of every cell.
#[derive(Clone, Copy)]
struct Cells<'a, E: ElementCode, const INDEX: usize>(&'a [E::Bits]);

impl<E: ElementCode, const INDEX: usize> Row for Cells<'_, E, INDEX> {
    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L, i: usize) -> L::F {
        match self.0[i * LANES..].first_chunk() {
            Some(cells) => E::cell_values(lanes, cells, INDEX),
            None => lanes.splat(0.0),
        }
    }
}

/// Writes a row of `cols` values from index `at` on.
#[inline(always)]
fn write_row<const STREAM: bool, L: Lanes, R: Row, T: Stored>(
    lanes: L,
    row: R,
    factors: impl Factor,
    out: &mut Out<'_, T>,
    at: usize,
    cols: usize,
) {
    if cols == PANEL {
        // Known to the compiler: a row of a panel is short, and its loop costs as much as its work.
        for i in 0..PANEL / LANES {
            let x = factors.scale(lanes, i, row.vector(lanes, i));
            out.put::<STREAM, L>(lanes, at + i * LANES, x);
        }
        return;
    }
    let (full, rest) = (cols / LANES, cols % LANES);
    for i in 0..full {
        let x = factors.scale(lanes, i, row.vector(lanes, i));
        out.put::<STREAM, L>(lanes, at + i * LANES, x);
    }
    if rest > 0 {
        let x = factors.scale(lanes, full, row.vector(lanes, full));
        out.put_some(lanes, at + full * LANES, rest, x);
    }
}

impl<'v> Known<'v> {
    /// Tasks of `rows` rows each.
    fn tasks<T>(self, rows: usize, out: &'v mut [T]) -> impl Iterator<Item = Task<'v, T>> {
        let strips = out.chunks_mut((rows * self.shape.cols).max(1)).enumerate();
        strips.map(move |(i, out)| Task {
            known: self,
            first: i * rows,
            out,
        })
    }
}

/// A task, by what it writes.
enum Write<'v> {
    F32(Task<'v, f32>),
    Bf16(Task<'v, bf16>),
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
            Some(target) => Some(Scales {
                codes: codes(target)?,
                block: target.spec.block(),
            }),
            None => None,
        };
        let outer = match &job.tensor_scale {
            Some(buffer) => Outer(views.bytes.read(buffer)?),
            None => Outer(&[]),
        };
        let usage = job.data.spec.key.usage;
        let known = Known {
            isa: context.isa,
            stream: context.elements >= context.streamed,
            shape,
            data,
            scales,
            orientation: usage.orientations().next().unwrap_or(Orientation::Rowwise),
            key: &job.kernel,
            outer,
        };
        let rows = ROWS * job.data.spec.code.entries_per_byte();
        match &job.out {
            Values::F32(out) => {
                let out = views.floats.take(out)?;
                tasks.extend(known.tasks(rows, out).map(Write::F32));
            }
            Values::Bf16(out) => {
                let out = views.halves.take(out)?;
                tasks.extend(known.tasks(rows, out).map(Write::Bf16));
            }
        }
    }
    for_each(context, tasks, |task| match task {
        Write::F32(task) => dispatch(task.known.key, task.known.outer.get(0), task),
        Write::Bf16(task) => dispatch(task.known.key, task.known.outer.get(0), task),
    })
}

//! How an encode walks a matrix: row tiles, column chunks, and which outputs share a quantization.

use lowp_format::{Axis, Code, HADAMARD_ROWS, KernelKey, Orientation, Part, Shape, lcm};
use smallvec::SmallVec;

use super::Cpu;
use crate::EncodeJob;
use crate::check::encode::{filled_by, share_pass};

/// Rows of a tile, at least, in bytes of a transposed output: whole cache lines.
const TILE_BYTES: usize = 64;
/// Elements of a chunk of many rows, about: its values are packed without gaps, and stay in the
/// second-level cache from the amax to the last store. Long rows stream; short ones, a power of two
/// apart in the source, would evict each other.
const PACKED: usize = 512 * 1024;
/// Elements of a chunk of single rows: its values stay in the second-level cache.
/// Longer runs stream better: AdamW with MXFP8 runs at 4.4 GB/s in chunks of 4096, at 5.3 in these.
const CHUNK: usize = 32 * 1024;

/// One buffer that a quantization fills.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    /// The buffer's index among the job's targets.
    pub(crate) target: usize,
    /// Data or block scales.
    pub(crate) part: Part,
    /// Whether its physical rows follow the matrix's columns.
    pub(crate) transposed: bool,
    code: Code,
    /// Matrix rows per entry.
    unit: usize,
    /// Bytes of a physical row.
    pub(crate) row_bytes: usize,
    /// Physical rows.
    physical_rows: usize,
}

impl Output {
    fn new(target: usize, spec: &lowp_format::BufferSpec, shape: Shape) -> Self {
        Self {
            target,
            part: spec.key.part,
            transposed: spec.axes[0] == Axis::Cols,
            code: spec.code,
            unit: spec.block()[0],
            row_bytes: spec.row_bytes(shape),
            physical_rows: spec.entries(shape)[0],
        }
    }

    /// Rows of the byte matrix that tiles are column ranges of. A row-major buffer is one row: its
    /// tiles are contiguous.
    pub(crate) fn band_rows(&self) -> usize {
        if self.transposed {
            self.physical_rows
        } else {
            1
        }
    }

    /// Where matrix row `row` begins in that byte matrix.
    pub(crate) fn cut(&self, row: usize) -> usize {
        let entries = row.div_ceil(self.unit);
        if self.transposed {
            self.code.bytes(entries)
        } else {
            entries * self.row_bytes
        }
    }
}

/// Outputs that one quantization fills.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    /// The orientation whose ingredients the pass has.
    pub(crate) orientation: Orientation,
    /// The ingredients.
    pub(crate) key: KernelKey,
    /// The buffers that the pass fills.
    pub(crate) outputs: SmallVec<[Output; 4]>,
}

/// The walk of one encode.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layout {
    /// One per orientation, or one for both.
    pub(crate) passes: SmallVec<[Pass; 2]>,
    /// Rows of a tile: a multiple of every block's rows, and even.
    pub(crate) tile_rows: usize,
    /// Rows of a chunk: a divisor of the tile's rows and a multiple of every block's rows.
    pub(crate) chunk_rows: usize,
    /// Columns of a chunk: a multiple of every block's columns, and even.
    pub(crate) chunk_cols: usize,
}

impl Layout {
    /// The walk of `job`, which was checked.
    pub(crate) fn new(job: &EncodeJob<Cpu>) -> Self {
        let EncodeJob {
            shape,
            kernels,
            targets,
            ..
        } = job;
        let shape = *shape;
        let share = share_pass(&Cpu, kernels, &job.tensor);
        let mut passes: SmallVec<[Pass; 2]> = SmallVec::new();
        for (index, target) in targets.iter().enumerate() {
            let spec = &target.spec;
            if spec.key.part.is_outer() {
                continue;
            }
            let orientation = filled_by(spec.key.usage, share);
            let output = Output::new(index, spec, shape);
            match passes
                .iter_mut()
                .find(|pass| pass.orientation == orientation)
            {
                Some(pass) => pass.outputs.push(output),
                None => passes.push(Pass {
                    orientation,
                    key: kernels[orientation as usize],
                    outputs: [output].into_iter().collect(),
                }),
            }
        }
        // Rows and columns that are quantized together.
        let blocks = || {
            passes.iter().flat_map(|pass| {
                let groups = pass.key.hadamard.then_some([HADAMARD_ROWS, 1]);
                pass.key.block.into_iter().chain(groups)
            })
        };
        let rows = blocks().fold(2, |unit, block| lcm(unit, block[0]));
        let cols = blocks().fold(2, |unit, block| lcm(unit, block[1]));
        let transposed = || {
            let outputs = passes.iter().flat_map(|pass| &pass.outputs);
            outputs.filter(|output| output.transposed)
        };
        let per_byte = transposed()
            .map(|output| output.code.entries_per_byte())
            .max();
        let tile_rows = (TILE_BYTES * per_byte.unwrap_or(1)).next_multiple_of(rows);
        let unit = blocks().fold(1, |unit, block| lcm(unit, block[0]));
        let packed = |rows: usize| (rows, (PACKED / rows).max(1).next_multiple_of(cols));
        let (chunk_rows, chunk_cols) = if per_byte.is_some() {
            packed(tile_rows)
        } else if unit > 1 {
            packed(unit)
        } else {
            let chunk_cols = CHUNK.min(shape.cols).max(1).next_multiple_of(cols);
            // The largest divisor of the tile that keeps a chunk small.
            let fits = |n: &usize| tile_rows.is_multiple_of(*n) && n * chunk_cols <= CHUNK;
            ((1..=tile_rows).rev().find(fits).unwrap_or(1), chunk_cols)
        };
        Self {
            passes,
            tile_rows,
            chunk_rows,
            chunk_cols,
        }
    }

    /// The layout with chunks of whole blocks of `len` elements, a power of two as the columns of all blocks: where the columns are no multiple of
    /// `len`, tiles have whole blocks.
    pub(crate) fn of_blocks(self, len: usize) -> Self {
        Self {
            tile_rows: lcm(self.tile_rows, len),
            chunk_cols: self.chunk_cols.next_multiple_of(len),
            ..self
        }
    }

    /// Where `rows` rows are cut into tiles.
    pub(crate) fn row_cuts(&self, rows: usize) -> impl Iterator<Item = usize> {
        let tile = self.tile_rows;
        (0..=rows.div_ceil(tile)).map(move |i| (i * tile).min(rows))
    }
}

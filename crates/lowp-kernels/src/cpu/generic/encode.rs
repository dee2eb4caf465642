//! Encoding: row tiles run in parallel; within a tile, column chunks are quantized once per
//! distinct block and stored to every buffer, in either orientation.

use std::sync::Arc;

use lowp_format::{Philox, Shape, SourceRounding};
use smallvec::SmallVec;

use super::convert::{FloatSlice, Rect, Stream};
use super::hadamard::transform;
use super::lines::Lines;
use super::quantize::{Quantize, Random, RectRandom, Scratch};
use super::store::{Chunk, GAP, direct};
use super::{Context, for_each, source, tensor};
use crate::check::encode::{input_of, share_pass};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::bands::{self, Band};
use crate::cpu::element::{CodeBits, CodeScratch};
use crate::cpu::ingredients::{ElementCode, ScaleEntry, ScaleKernel, Visit, dispatch};
use crate::cpu::layout::{Layout, Pass};
use crate::cpu::scaling::EntryScratch;
use crate::lanes::Isa;
use crate::{EncodeJob, KernelError, StochasticKey};

/// What every tile of one encode shares.
#[derive(Clone, Debug)]
pub(crate) struct Encoder<'a> {
    pub(crate) shape: Shape,
    job: &'a EncodeJob<Cpu>,
    layout: &'a Layout,
    /// Scales or amaxes of the tensor or its lines, by pass.
    outer: SmallVec<[Vec<f32>; 2]>,
    random: Option<Random>,
    pub(crate) isa: Isa,
}

/// One row tile of one encode, with its part of every output: per pass, in the order of outputs.
#[derive(Debug)]
pub(crate) struct Tile<'v> {
    pub(crate) first: usize,
    pub(crate) rows: usize,
    bands: SmallVec<[Band<'v>; 4]>,
}

impl<'a> Encoder<'a> {
    /// Reads what `job` knows of its tensor.
    pub(crate) fn new(
        job: &'a EncodeJob<Cpu>,
        layout: &'a Layout,
        context: &Context<'_>,
        views: &mut AllViews<'_>,
    ) -> Result<Arc<Self>, KernelError> {
        let shape = job.shape;
        let share = share_pass(&Cpu, &job.kernels, &job.tensor);
        let known = |pass: &Pass| {
            let input = input_of(&job.tensor, pass.orientation, share);
            tensor::values(shape, pass.orientation, &pass.key, input, views)
        };
        let outer = layout.passes.iter().map(known).collect::<Result<_, _>>()?;
        let random = job.stochastic.map(
            |StochasticKey {
                 seed,
                 stream,
                 first,
             }| Random {
                philox: Philox::new(seed, stream.wrapping_add(context.scalars.random_step << 32)),
                first,
            },
        );
        Ok(Arc::new(Self {
            shape,
            job,
            layout,
            outer,
            random,
            isa: context.isa,
        }))
    }

    /// Cuts the outputs into row tiles and writes what there is one of for the tensor or its lines.
    pub(crate) fn tiles<'v>(&self, views: &mut AllViews<'v>) -> Result<Vec<Tile<'v>>, KernelError> {
        let EncodeJob {
            shape,
            kernels,
            targets,
            ..
        } = self.job;
        tensor::write(*shape, kernels, &self.job.tensor, targets, views)?;
        if self.shape.elements() == 0 {
            // Any number of rows of nothing.
            return Ok(Vec::new());
        }
        let cuts: Vec<usize> = self.layout.row_cuts(self.shape.rows).collect();
        let mut tiles: Vec<Tile<'v>> = cuts
            .windows(2)
            .map(|c| Tile {
                first: c[0],
                rows: c[1] - c[0],
                bands: SmallVec::new(),
            })
            .collect();
        for output in self.layout.passes.iter().flat_map(|pass| &pass.outputs) {
            let bytes = views.bytes.take(&targets[output.target].bytes)?;
            let cuts: Vec<usize> = cuts.iter().map(|&row| output.cut(row)).collect();
            let bands = bands::split(bytes, output.band_rows(), &cuts);
            for (tile, band) in tiles.iter_mut().zip(bands) {
                tile.bands.push(band);
            }
        }
        Ok(tiles)
    }

    /// Fills one tile from `load(first column, columns)`.
    pub(crate) fn encode(
        &self,
        mut tile: Tile<'_>,
        load: &mut dyn Load,
    ) -> Result<(), KernelError> {
        let Self {
            shape, layout, isa, ..
        } = *self;
        let widest = layout.chunk_cols.min(shape.cols);
        let mut scratch = TileScratch::default();
        for row in (0..tile.rows).step_by(layout.chunk_rows) {
            let rows = layout.chunk_rows.min(tile.rows - row);
            for col in (0..shape.cols).step_by(layout.chunk_cols) {
                let cols = widest.min(shape.cols - col);
                let (at, size) = ([row, col], [rows, cols]);
                let ahead = load.ahead(at, size);
                let rect = load.load(at, size);
                let mut bands = tile.bands.as_mut_slice();
                for (number, pass) in layout.passes.iter().enumerate() {
                    let (own, rest) = bands.split_at_mut(pass.outputs.len());
                    bands = rest;
                    let outer = &self.outer[number];
                    let first = outer.first().copied().unwrap_or(1.0);
                    let TileScratch {
                        codes,
                        entries,
                        quantize,
                        transformed,
                    } = &mut scratch;
                    let rect = match pass.key.hadamard {
                        true => transform(isa, rect, transformed),
                        false => rect,
                    };
                    let chunk = EncodeChunk {
                        encoder: self,
                        pass,
                        bands: own,
                        first: [tile.first + row, col],
                        chunk: Chunk { at, size },
                        outer,
                        rect,
                        ahead: ahead.filter(|_| number == 0),
                        codes,
                        entries,
                        scratch: quantize,
                    };
                    dispatch(&pass.key, first, chunk)?;
                }
            }
        }
        Ok(())
    }
}

/// Memory of a tile.
#[derive(Debug, Default)]
struct TileScratch {
    codes: CodeScratch,
    entries: EntryScratch,
    quantize: Scratch,
    transformed: Vec<f32>,
}

/// Gives the values of a tile chunk by chunk, each once.
pub(crate) trait Load {
    /// What is read after the chunk of `size` at row and column `at` of the tile.
    fn ahead(&self, at: [usize; 2], size: [usize; 2]) -> Option<Stream>;
    /// The `rows x cols` values from row `row` (of the tile) and column `col` on.
    fn load(&mut self, at: [usize; 2], size: [usize; 2]) -> Rect<'_>;
}

/// One pass of one chunk.
struct EncodeChunk<'a, 'v> {
    encoder: &'a Encoder<'a>,
    pass: &'a Pass,
    bands: &'a mut [Band<'v>],
    /// Row and column of the first value.
    first: [usize; 2],
    chunk: Chunk,
    outer: &'a [f32],
    rect: Rect<'a>,
    ahead: Option<Stream>,
    codes: &'a mut CodeScratch,
    entries: &'a mut EntryScratch,
    scratch: &'a mut Scratch,
}

impl Visit for EncodeChunk<'_, '_> {
    type Out = ();

    fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) {
        let Self {
            encoder,
            pass,
            bands,
            first,
            chunk,
            outer,
            rect,
            ahead,
            codes,
            entries,
            scratch,
        } = self;
        let (isa, [rows, cols]) = (encoder.isa, chunk.size);
        // Codes that are packed or written in place need room for one row at most.
        let room = if direct(pass).is_some() { 1 } else { rows };
        let [codes, transposed] = E::Bits::scratch(codes);
        let entries = R::Entry::scratch(entries);
        codes.resize(room * (cols + GAP), E::Bits::default());
        let block = pass.key.block.unwrap_or([1, 1]);
        let blocks = rows.div_ceil(block[0]) * cols.div_ceil(block[1]);
        entries.resize(if R::BLOCKS { blocks } else { 0 }, R::Entry::default());
        let mut lines = SmallVec::new();
        let rules = Lines::new(
            pass.orientation,
            &pass.key,
            rule,
            |line| outer[line],
            first,
            chunk.size,
            &mut lines,
        );
        let stride = encoder.shape.cols;
        let start = first[0] * stride + first[1];
        isa.run(Quantize::<E, R> {
            rules,
            block,
            rect,
            random: encoder.random.map(|matrix| RectRandom {
                matrix,
                start,
                stride,
            }),
            codes: chunk.codes::<E>(pass, bands, codes),
            entries,
            scratch,
            ahead,
        });
        chunk.store::<E, R>(isa, pass, bands, codes, entries, transposed);
    }
}

/// Values of a source matrix.
struct SourceRows<'a> {
    values: FloatSlice<'a>,
    rounding: SourceRounding,
    isa: Isa,
    start: usize,
    stride: usize,
    scratch: Vec<f32>,
}

impl Load for SourceRows<'_> {
    fn ahead(&self, [row, col]: [usize; 2], size: [usize; 2]) -> Option<Stream> {
        let start = self.start + row * self.stride + col;
        Some(self.values.after(start, self.stride, size))
    }

    fn load(&mut self, [row, col]: [usize; 2], size: [usize; 2]) -> Rect<'_> {
        let Self {
            values,
            rounding,
            isa,
            start,
            stride,
            ref mut scratch,
        } = *self;
        values.rect(
            isa,
            rounding,
            start + row * stride + col,
            stride,
            size,
            scratch,
        )
    }
}

/// Runs every encode of a plan.
pub(crate) fn run(
    jobs: &[EncodeJob<Cpu>],
    layouts: &[Layout],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    for job in jobs {
        tensor::consume(job.shape, &job.kernels, &job.tensor, views)?;
    }
    let mut tasks = Vec::new();
    for (job, layout) in jobs.iter().zip(layouts) {
        let encoder = Encoder::new(job, layout, context, views)?;
        let values = source(&job.source, views)?;
        for tile in encoder.tiles(views)? {
            tasks.push((Arc::clone(&encoder), values, job.source_rounding, tile));
        }
    }
    for_each(context, tasks, |(encoder, values, rounding, tile)| {
        let stride = encoder.shape.cols;
        let (start, isa, scratch) = (tile.first * stride, encoder.isa, Vec::new());
        let mut load = SourceRows {
            values,
            rounding,
            isa,
            start,
            stride,
            scratch,
        };
        encoder.encode(tile, &mut load)
    })
}

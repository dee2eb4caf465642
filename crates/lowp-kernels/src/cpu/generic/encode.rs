//! Encoding: row tiles run in parallel; within a tile, column chunks are quantized once per
//! distinct block and stored to every buffer, in either orientation.

use lowp_format::{KernelKey, Philox, Shape, SourceRounding};
use smallvec::SmallVec;

use super::convert::{Rect, Stream, Values};
use super::quantize::{Quantize, Random, Scratch};
use super::store::{Chunk, GAP, direct};
use super::{Context, for_each, source, tensor};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::bands::{self, Band};
use crate::cpu::ingredients::{ElementCode, ScaleKernel, Visit, dispatch};
use crate::cpu::layout::Layout;
use crate::lanes::Isa;
use crate::{EncodeJob, KernelError, StochasticKey, Target};

/// What every tile of one encode shares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoder<'a> {
    pub(crate) shape: Shape,
    pub(crate) key: &'a KernelKey,
    pub(crate) layout: &'a Layout,
    /// Tensor-level scale or amax, where the rule has one.
    pub(crate) tensor: f32,
    pub(crate) random: Option<Random>,
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
    /// Reads the tensor input of `job`.
    pub(crate) fn new(
        job: &'a EncodeJob<Cpu>,
        layout: &'a Layout,
        context: &Context<'_>,
        views: &mut AllViews<'_>,
    ) -> Result<Self, KernelError> {
        let tensor = tensor::value(job.tensor.as_ref(), &job.kernel, views)?;
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
        let EncodeJob {
            shape, kernel: key, ..
        } = job;
        Ok(Self {
            shape: *shape,
            key,
            layout,
            tensor,
            random,
            isa: context.isa,
        })
    }

    /// Cuts the outputs of `targets` into row tiles and writes the tensor scale.
    pub(crate) fn tiles<'v>(
        &self,
        targets: &[Target<Cpu>],
        views: &mut AllViews<'v>,
    ) -> Result<Vec<Tile<'v>>, KernelError> {
        write_tensor_scale(self.key, self.tensor, targets, views)?;
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
    pub(crate) fn encode(&self, tile: Tile<'_>, load: &mut dyn Load) -> Result<(), KernelError> {
        dispatch(
            self.key,
            self.tensor,
            EncodeTile {
                encoder: self,
                tile,
                load,
            },
        )
    }
}

/// Writes the tensor-scale buffers among `targets`.
pub(super) fn write_tensor_scale(
    key: &KernelKey,
    tensor: f32,
    targets: &[Target<Cpu>],
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    struct Entry;
    impl Visit for Entry {
        type Out = f32;
        fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) -> f32 {
            rule.tensor_entry()
        }
    }
    for target in targets.iter().filter(|t| t.spec.key.part.is_per_tensor()) {
        let entry = dispatch(key, tensor, Entry)?;
        views
            .bytes
            .take(&target.bytes)?
            .copy_from_slice(&entry.to_le_bytes());
    }
    Ok(())
}

/// Gives the values of a tile chunk by chunk, each once.
pub(crate) trait Load {
    /// What is read after the chunk of `size` at row and column `at` of the tile.
    fn ahead(&self, at: [usize; 2], size: [usize; 2]) -> Option<Stream>;
    /// The `rows x cols` values from row `row` (of the tile) and column `col` on.
    fn load(&mut self, at: [usize; 2], size: [usize; 2]) -> Rect<'_>;
}

struct EncodeTile<'a, 'v> {
    encoder: &'a Encoder<'a>,
    tile: Tile<'v>,
    load: &'a mut dyn Load,
}

impl Visit for EncodeTile<'_, '_> {
    type Out = ();

    fn visit<E: ElementCode, R: ScaleKernel>(self, rule: R) {
        let Self {
            encoder,
            mut tile,
            load,
        } = self;
        let &Encoder {
            shape,
            layout,
            random,
            isa,
            ..
        } = encoder;
        let widest = layout.chunk_cols.min(shape.cols);
        // Codes that are packed or written in place need room for one row at most.
        let in_place = layout.passes.iter().all(|pass| direct(pass).is_some());
        let room = if in_place {
            1
        } else {
            layout.chunk_rows.min(tile.rows)
        };
        let mut codes = vec![E::Bits::default(); room * (widest + GAP)];
        let mut transposed = Vec::new();
        let mut entries: Vec<R::Entry> = Vec::new();
        let mut scratch = Scratch::default();
        for row in (0..tile.rows).step_by(layout.chunk_rows) {
            let rows = layout.chunk_rows.min(tile.rows - row);
            for col in (0..shape.cols).step_by(layout.chunk_cols) {
                let cols = widest.min(shape.cols - col);
                let (at, size) = ([row, col], [rows, cols]);
                let ahead = load.ahead(at, size);
                let rect = load.load(at, size);
                let start = (tile.first + row) * shape.cols + col;
                let mut bands = tile.bands.as_mut_slice();
                for (number, pass) in layout.passes.iter().enumerate() {
                    let (own, rest) = bands.split_at_mut(pass.outputs.len());
                    bands = rest;
                    let block = pass.block.unwrap_or([1, 1]);
                    let [down, across] = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
                    entries.resize(
                        if R::BLOCKS { down * across } else { 0 },
                        R::Entry::default(),
                    );
                    let chunk = Chunk { at, size };
                    isa.run(Quantize::<E, R> {
                        rule,
                        block,
                        rect,
                        random: random.map(|random| (random, start, shape.cols)),
                        codes: chunk.codes::<E>(pass, own, &mut codes),
                        entries: &mut entries,
                        scratch: &mut scratch,
                        ahead: ahead.filter(|_| number == 0),
                    });
                    chunk.store::<E, R>(isa, pass, own, &codes, &entries, &mut transposed);
                }
            }
        }
    }
}

/// Values of a source matrix.
struct SourceRows<'a> {
    values: Values<'a>,
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
        tensor::consume(job.tensor.as_ref(), views)?;
    }
    let mut tasks = Vec::new();
    for (job, layout) in jobs.iter().zip(layouts) {
        let encoder = Encoder::new(job, layout, context, views)?;
        let values = source(&job.source, views)?;
        for tile in encoder.tiles(&job.targets, views)? {
            tasks.push((encoder, values, job.source_rounding, tile));
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

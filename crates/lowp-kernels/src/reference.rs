//! The naive reference: every definition of docs/numerics.md written out element by element over
//! buffer geometry, with the scalar functions of `lowp-format`. No tiles, no threads, no tables.
//!
//! It is the oracle of every conformance suite.

use lowp_format::codec::{e2m1, e4m3, e5m2, e8m0};
use lowp_format::{
    Axis, Buffer, BufferSpec, Code, Extent, FourOverSix, HADAMARD_ROWS, KernelKey, Orientation,
    Part, Philox, ScaleLayout, ScaleRule, Shape, SourceRounding, chooses_four, four_over_six_error,
    four_over_six_rows, four_over_six_scales, hadamard_rows, magnitude, tensor_scale,
    two_level_block_scale, two_level_decode_factor, two_level_encode_scale, two_level_multiplier,
};

use crate::KernelError;

mod step;

pub use step::{
    StepOutput, inverse_norm, momentum, step_scalars, sum_bf16, sum_f32, sum_of_squares, sum_parts,
    update,
};

/// A matrix and how one orientation of it is quantized.
#[derive(Clone, Copy, Debug)]
pub struct Reference<'a> {
    /// Rows x columns.
    pub shape: Shape,
    /// Which lines have amaxes, where lines have them.
    pub orientation: Orientation,
    /// Ingredients.
    pub kernel: KernelKey,
    /// `shape.elements()` source values, row-major, not yet rounded.
    pub values: &'a [f32],
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
    /// Encode scales (of [`ScaleRule::Delayed`] and [`ScaleRule::Current`]) or amaxes (of two-level scales, of which
    /// the magnitude counts: a consumed entry is negative), of the tensor or of its lines; otherwise unused.
    pub tensor: &'a [f32],
    /// Of stochastic rounding.
    pub random: Option<RandomBytes>,
}

/// The random bytes of a matrix, one for each element.
#[derive(Clone, Copy, Debug)]
pub struct RandomBytes {
    /// The generator: seed, and stream with the step.
    pub philox: Philox,
    /// The byte of the stream that belongs to the first element; those of the others follow, row-major.
    pub first: u64,
}

/// Agreed amaxes of the blocks of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct BlockAmaxes<'a> {
    /// Block rows x columns.
    pub block: [usize; 2],
    /// One amax for each block, row-major, of which the magnitude counts: a consumed one is negative.
    pub amaxes: &'a [f32],
}

/// The amax of `values`: NaN ignored, infinity kept, 0 for no values (docs/numerics.md 2.2).
pub fn amax(values: impl IntoIterator<Item = f32>) -> f32 {
    f32::from_bits(values.into_iter().map(magnitude).max().unwrap_or(0))
}

/// Rows x columns of the blocks that tile a matrix of `shape`: their first elements, row-major.
fn blocks_of(shape: Shape, [height, width]: [usize; 2]) -> impl Iterator<Item = [usize; 2]> {
    let rows = (0..shape.rows).step_by(height);
    rows.flat_map(move |r| (0..shape.cols).step_by(width).map(move |c| [r, c]))
}

/// A stored scale and what the values of its block are multiplied by.
type Scaled = (u32, Option<f32>);

impl Reference<'_> {
    /// The values that are quantized: rounded, then transformed where the ingredients say so.
    pub fn quantized_values(&self) -> Vec<f32> {
        let rounded = self.values.iter().map(|&x| self.source_rounding.apply(x));
        let mut values: Vec<f32> = rounded.collect();
        if self.kernel.hadamard {
            hadamard_rows(&mut values, self.shape.cols);
        }
        values
    }

    /// The amax of the whole matrix.
    pub fn tensor_amax(&self) -> f32 {
        amax(self.quantized_values())
    }

    /// The amaxes of the tensor or of its lines, as the rule has them; empty where it has none.
    pub fn outer_amaxes(&self) -> Vec<f32> {
        match self.kernel.scale.outer() {
            None => Vec::new(),
            Some((Extent::Tensor, _)) => vec![self.tensor_amax()],
            Some((Extent::Line, _)) => {
                let values = self.quantized_values();
                let Shape { rows, cols } = self.shape;
                match self.orientation {
                    Orientation::Rowwise => (0..rows)
                        .map(|r| amax(values[r * cols..][..cols].iter().copied()))
                        .collect(),
                    Orientation::Columnwise => (0..cols)
                        .map(|c| amax((0..rows).map(|r| values[r * cols + c])))
                        .collect(),
                }
            }
        }
    }

    /// Encode scales of amaxes, where the rule makes scales of them; else the amaxes.
    pub fn encode_scales(&self, amaxes: &[f32]) -> Vec<f32> {
        let scale = |&amax: &f32| match self.kernel.scale {
            ScaleRule::Current { pow2, epsilon, .. } => {
                tensor_scale(amax, self.kernel.element, pow2, epsilon)
            }
            _ => amax,
        };
        amaxes.iter().map(scale).collect()
    }

    /// Elements of the block that begins at `[top, left]`, row by row.
    fn rows_of(
        &self,
        [height, width]: [usize; 2],
        [top, left]: [usize; 2],
    ) -> impl Iterator<Item = impl Iterator<Item = [usize; 2]> + use<>> + use<> {
        let bottom = top.saturating_add(height).min(self.shape.rows);
        let right = left.saturating_add(width).min(self.shape.cols);
        (top..bottom).map(move |r| (left..right).map(move |c| [r, c]))
    }

    /// All block amaxes, row-major.
    pub fn block_amaxes(&self, block: [usize; 2]) -> Vec<f32> {
        let values = self.quantized_values();
        let value = |[r, c]: [usize; 2]| values[r * self.shape.cols + c];
        blocks_of(self.shape, block)
            .map(|at| amax(self.rows_of(block, at).flatten().map(value)))
            .collect()
    }

    /// The content of the buffer `spec`, Compact form.
    ///
    /// # Errors
    /// Ingredients outside the definition.
    pub fn encode(&self, spec: &BufferSpec) -> Result<Vec<u8>, KernelError> {
        let mut bytes = vec![0; spec.bytes(self.shape)];
        if spec.key.part.is_outer() {
            return Ok(self.outer_entries());
        }
        if self.shape.elements() == 0 {
            return Ok(bytes);
        }
        let values = self.quantized_values();
        let cols = self.shape.cols;
        let block = self.kernel.block.unwrap_or([1, 1]);
        let across = cols.div_ceil(block[1]);
        let scaled: Vec<Scaled> = match self.kernel.block {
            None => Vec::new(),
            Some(block) => {
                let scale = |at| self.block_scale(&values, block, at);
                blocks_of(self.shape, block).map(scale).collect()
            }
        };
        let [outer, inner] = spec.entries(self.shape);
        for i in 0..outer {
            for j in 0..inner {
                let [a, b] = [i * spec.tile[0], j * spec.tile[1]];
                let (row, col) = if spec.axes[0] == Axis::Rows {
                    (a, b)
                } else {
                    (b, a)
                };
                let (scale, multiplier) = match scaled.get(row / block[0] * across + col / block[1])
                {
                    Some(&scaled) if !scaled_by_line(&self.kernel) => scaled,
                    _ => self.scale(0.0, [row, col]),
                };
                let entry = match spec.key.part {
                    Part::BlockScale => scale,
                    _ => {
                        let index = row * cols + col;
                        self.element(values[index], index, multiplier)
                    }
                };
                put(
                    &mut bytes[i * spec.row_bytes(self.shape)..],
                    spec.code,
                    j,
                    entry,
                );
            }
        }
        Ok(bytes)
    }

    /// What a flat encode (docs/numerics.md 11) makes of `bytes`, the content of a target of `spec`:
    /// the values are those from flat index `start` on, `agreed` the amaxes of the target's blocks, where it has blocks.
    ///
    /// # Errors
    /// Ingredients outside the definition.
    pub fn flat_encode(
        &self,
        spec: &BufferSpec,
        start: usize,
        agreed: Option<BlockAmaxes<'_>>,
        bytes: &mut [u8],
    ) -> Result<(), KernelError> {
        let cols = self.shape.cols;
        match spec.key.part {
            Part::DecodeScale | Part::Amax => bytes.copy_from_slice(&self.outer_entries()),
            Part::BlockScale => {
                let BlockAmaxes {
                    block: [height, width],
                    amaxes,
                } = agreed.unwrap_or(BlockAmaxes {
                    block: [1, 1],
                    amaxes: &[],
                });
                let [down, across] = [self.shape.rows.div_ceil(height), cols.div_ceil(width)];
                for (at, amax) in amaxes.iter().enumerate().take(down * across) {
                    let (row, col) = (at / across, at % across);
                    let (i, j) = match spec.axes[0] {
                        Axis::Rows => (row, col),
                        Axis::Cols => (col, row),
                    };
                    let (entry, _) = self.scale(amax.abs(), [row * height, col * width]);
                    let line = &mut bytes[i * spec.row_bytes(self.shape)..];
                    put(line, spec.code, j, entry);
                }
            }
            Part::Data => {
                let first = start / spec.code.entries_per_byte() * spec.code.entries_per_byte();
                for (at, &x) in (start..).zip(self.values) {
                    let (row, col) = (at / cols, at % cols);
                    let amax = agreed.map_or(0.0, |BlockAmaxes { block, amaxes }| {
                        let [height, width] = block;
                        amaxes[row / height * cols.div_ceil(width) + col / width]
                    });
                    let (_, multiplier) = self.scale(amax.abs(), [row, col]);
                    let x = self.source_rounding.apply(x);
                    let entry = self.element(x, at, multiplier);
                    put(bytes, spec.code, at - first, entry);
                }
            }
        }
        Ok(())
    }

    /// The content of a buffer of the tensor or its lines.
    fn outer_entries(&self) -> Vec<u8> {
        let entry = |&value: &f32| match self.kernel.scale {
            ScaleRule::Delayed { .. } | ScaleRule::Current { .. } => 1.0 / value,
            _ => value.abs(),
        };
        self.tensor
            .iter()
            .flat_map(|v| entry(v).to_le_bytes())
            .collect()
    }

    /// What the tensor, or the line of element `[row, col]`, is scaled by.
    fn outer(&self, at: [usize; 2]) -> f32 {
        let line = self.kernel.scale.line(self.orientation, at);
        self.tensor.get(line).copied().unwrap_or(1.0)
    }

    /// The stored scale and the multiplier of the block that begins at `at`.
    fn block_scale(&self, values: &[f32], block: [usize; 2], at: [usize; 2]) -> Scaled {
        let value = |[r, c]: [usize; 2]| values[r * self.shape.cols + c];
        let amax = amax(self.rows_of(block, at).flatten().map(value));
        match self.kernel.scale {
            ScaleRule::TwoLevel { four_over_six, .. } if four_over_six.is_on() => {
                let rows = self
                    .rows_of(block, at)
                    .map(|row| row.map(value).collect())
                    .collect();
                let (scale, multiplier) =
                    choose(rows, amax, self.outer(at).abs(), four_over_six, block);
                (u32::from(scale), Some(multiplier))
            }
            _ => self.scale(amax, at),
        }
    }

    /// The stored entry and the multiplier of a block with this amax, without a choice of four over six.
    fn scale(&self, amax: f32, at: [usize; 2]) -> Scaled {
        let element = self.kernel.element;
        match self.kernel.scale {
            ScaleRule::None => (0, None),
            ScaleRule::Delayed { .. } | ScaleRule::Current { .. } => (0, Some(self.outer(at))),
            ScaleRule::E8M0(mode) => {
                let entry = mode.block_scale(amax, element);
                (u32::from(entry), Some(e8m0::inverse(entry)))
            }
            ScaleRule::TwoLevel { four_over_six, .. } => {
                let encode_scale = two_level_encode_scale(self.outer(at).abs(), four_over_six);
                let entry = two_level_block_scale(amax, encode_scale);
                (
                    u32::from(entry),
                    Some(two_level_multiplier(entry, encode_scale)),
                )
            }
            ScaleRule::BlockF32 { pow2, epsilon } => {
                let scale = tensor_scale(amax, element, pow2, epsilon);
                ((1.0 / scale).to_bits(), Some(scale))
            }
        }
    }

    /// The code of the value `x` of element `index`.
    fn element(&self, x: f32, index: usize, multiplier: Option<f32>) -> u32 {
        let x = multiplier.map_or(x, |m| x * m);
        match (self.kernel.element, self.random) {
            (Code::E2M1, Some(RandomBytes { philox, first })) => {
                let index = first.wrapping_add(index as u64);
                u32::from(e2m1::encode_stochastic(x, philox.byte(index)))
            }
            (Code::E2M1, None) => u32::from(e2m1::encode(x)),
            (Code::E4M3, _) => u32::from(e4m3::encode(x)),
            (Code::E5M2, _) => u32::from(e5m2::encode(x)),
            (Code::E8M0, _) => u32::from(e8m0::encode_ceil(x)),
            (Code::Bf16, _) => u32::from(half::bf16::from_f32(x).to_bits()),
            (Code::F32, _) => x.to_bits(),
        }
    }
}

/// Whether values are multiplied by the scale of their line, and not of a block.
fn scaled_by_line(key: &KernelKey) -> bool {
    key.block.is_none()
}

/// The scale of a block, given by its rows, that four over six chooses (docs/numerics.md 20.1), and its multiplier.
fn choose(
    rows: Vec<Vec<f32>>,
    block_amax: f32,
    amax: f32,
    choice: FourOverSix,
    [height, width]: [usize; 2],
) -> (u8, f32) {
    let encode_scale = two_level_encode_scale(amax, choice);
    let scales = four_over_six_scales(block_amax, encode_scale);
    let errors = scales.map(|scale| {
        let term = |x: f32| four_over_six_error(x, scale, encode_scale, amax, choice);
        let sum = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0, |sum, x| sum + term(x));
        if height == HADAMARD_ROWS && width == HADAMARD_ROWS {
            let mut of_rows = [0.0; 16];
            for (error, row) in of_rows.iter_mut().zip(&rows) {
                *error = sum(&mut row.iter().copied());
            }
            four_over_six_rows(of_rows)
        } else {
            sum(&mut rows.iter().flatten().copied())
        }
    });
    let scale = scales[usize::from(chooses_four(errors))];
    (scale, two_level_multiplier(scale, encode_scale))
}

/// The content of a buffer in another form: every entry of `to` from the entry of `from` that covers
/// the same element, padding zero.
pub fn in_form(from: &ScaleLayout, to: &ScaleLayout, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![0; to.bytes()];
    let [outer, inner] = to.entries();
    for i in 0..if inner == 0 { 0 } else { outer } {
        for j in 0..inner {
            let entry = get(bytes, to.code(), to.source(from, i, j));
            put(&mut out, to.code(), to.offset(i, j), entry);
        }
    }
    out
}

/// Decodes one orientation to f32, row-major: codes in `data`, block scales in `scales` where there are some. `tensor` are decode scales, or
/// the amaxes of two-level scales: of the tensor, or of its lines.
pub fn decode<S: AsRef<[u8]>>(
    shape: Shape,
    orientation: Orientation,
    kernel: &KernelKey,
    data: &Buffer<S>,
    scales: Option<&Buffer<S>>,
    tensor: &[f32],
) -> Vec<f32> {
    let entry = |Buffer { spec, storage }: &Buffer<S>, row: usize, col: usize| {
        let [a, b] = if spec.axes[0] == Axis::Rows {
            [row, col]
        } else {
            [col, row]
        };
        let line = &storage.as_ref()[a / spec.tile[0] * spec.row_bytes(shape)..];
        get(line, spec.code, b / spec.tile[1])
    };
    let value = |row, col| {
        let code = entry(data, row, col);
        let byte = code as u8;
        let x = match kernel.element {
            Code::E4M3 => e4m3::decode(byte),
            Code::E5M2 => e5m2::decode(byte),
            Code::E2M1 => e2m1::decode(byte),
            Code::E8M0 => e8m0::decode(byte),
            Code::Bf16 => f32::from_bits(code << 16),
            Code::F32 => f32::from_bits(code),
        };
        let scale = scales.map_or(0, |scales| entry(scales, row, col));
        let line = kernel.scale.line(orientation, [row, col]);
        let tensor = tensor.get(line).copied().unwrap_or(1.0);
        match kernel.scale {
            ScaleRule::None => x,
            ScaleRule::Delayed { .. } | ScaleRule::Current { .. } => x * tensor,
            ScaleRule::E8M0(_) => e8m0::decode(scale as u8) * x,
            ScaleRule::TwoLevel { four_over_six, .. } => {
                x * two_level_decode_factor(scale as u8, tensor, four_over_six)
            }
            ScaleRule::BlockF32 { .. } => x * f32::from_bits(scale),
        }
    };
    (0..if shape.cols == 0 { 0 } else { shape.rows })
        .flat_map(|r| (0..shape.cols).map(move |c| (r, c)))
        .map(|(r, c)| value(r, c))
        .collect()
}

/// Writes entry `index` of a physical row.
fn put(line: &mut [u8], code: Code, index: usize, entry: u32) {
    match code.bits() {
        4 => e2m1::set_nibble(line, index, entry as u8),
        bits => {
            let size = bits / 8;
            line[index * size..][..size].copy_from_slice(&entry.to_le_bytes()[..size]);
        }
    }
}

/// Reads entry `index` of a physical row.
fn get(line: &[u8], code: Code, index: usize) -> u32 {
    match code.bits() {
        4 => u32::from(e2m1::nibble(line, index)),
        bits => {
            let size = bits / 8;
            let mut entry = [0; 4];
            entry[..size].copy_from_slice(&line[index * size..][..size]);
            u32::from_le_bytes(entry)
        }
    }
}

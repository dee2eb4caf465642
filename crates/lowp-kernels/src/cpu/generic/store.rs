//! Storing the codes and scales of one chunk to every buffer, in either orientation.

use lowp_format::Part;

use super::quantize::Codes;
use crate::cpu::bands::Band;
use crate::cpu::ingredients::{ElementCode, ScaleEntry, ScaleKernel};
use crate::cpu::layout::{Output, Pass};
use crate::lanes::Lanes;
use crate::lanes::TransposeDense;
use crate::lanes::{Isa, Kernel};

/// Rows x columns `size` from row `at[0]` of the tile and column `at[1]` on.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    pub(super) at: [usize; 2],
    pub(super) size: [usize; 2],
}

/// Columns transposed at a time: both sides stay in the first-level cache.
const TRANSPOSED_COLS: usize = 128;

/// The row-major data output of `pass` that codes are written to as they are made, if no output is
/// transposed. With a transposed output the codes go to scratch: rows of an output, a power of two
/// apart, would evict each other while they are transposed.
pub(super) fn direct(pass: &Pass) -> Option<usize> {
    let data = |output: &Output| output.part == Part::Data;
    let transposed = |output: &Output| data(output) && output.transposed;
    let first = pass.outputs.iter().position(data)?;
    (!pass.outputs.iter().any(transposed)).then_some(first)
}

/// Codes between the rows of the scratch matrix: its rows lie in different sets of the cache.
pub(super) const GAP: usize = 64;

impl Chunk {
    /// Where the codes of `pass` go first: straight into a row-major output of theirs, or into
    /// `scratch`.
    pub(super) fn codes<'c, E: ElementCode>(
        self,
        pass: &Pass,
        bands: &'c mut [Band<'_>],
        scratch: &'c mut [E::Bits],
    ) -> Codes<'c, E::Bits> {
        let Some(index) = direct(pass) else {
            return Codes::Matrix {
                values: scratch,
                stride: self.size[1] + GAP,
            };
        };
        let stride = pass.outputs[index].row_bytes;
        let start = self.at[0] * stride + E::CODE.bytes(self.at[1]);
        let bytes = &mut bands[index].row_mut(0)[start..];
        if E::codes(&mut []).is_none() {
            let row = &mut scratch[..self.size[1]];
            return Codes::Packed { row, bytes, stride };
        }
        Codes::Matrix {
            values: E::codes(bytes).unwrap_or_default(),
            stride,
        }
    }

    /// Stores the codes, which are where [`Chunk::codes`] said, and the scales to all outputs of
    /// `pass`.
    pub(super) fn store<E: ElementCode, R: ScaleKernel>(
        self,
        isa: Isa,
        pass: &Pass,
        bands: &mut [Band<'_>],
        scratch: &[E::Bits],
        entries: &[R::Entry],
        transposed: &mut Vec<E::Bits>,
    ) {
        let direct = direct(pass);
        for (index, output) in pass.outputs.iter().enumerate() {
            match (output.part, pass.key.block, direct) {
                (Part::Data, _, Some(first)) if first == index => {}
                (Part::Data, _, Some(first)) => {
                    let (before, after) = bands.split_at_mut(index);
                    self.copy::<E>(&mut before[first], &mut after[0], output.row_bytes);
                }
                (Part::Data, _, None) if output.transposed => {
                    self.store_columns::<E>(isa, &mut bands[index], scratch, transposed);
                }
                (Part::Data, _, None) => {
                    isa.run(StoreRows::<E> {
                        codes: scratch,
                        output,
                        band: &mut bands[index],
                        chunk: self,
                    });
                }
                (_, Some(block), _) => {
                    store_scales(output, &mut bands[index], block, self, entries);
                }
                (_, None, _) => {}
            }
        }
    }

    /// Copies the chunk between two row-major outputs.
    fn copy<E: ElementCode>(self, from: &mut Band<'_>, to: &mut Band<'_>, row_bytes: usize) {
        let [row, col] = self.at;
        let [start, len] = [E::CODE.bytes(col), E::CODE.bytes(self.size[1])];
        for i in row..row + self.size[0] {
            let range = i * row_bytes + start..i * row_bytes + start + len;
            to.row_mut(0)[range.clone()].copy_from_slice(&from.row_mut(0)[range]);
        }
    }

    /// Stores the codes to a transposed output.
    fn store_columns<E: ElementCode>(
        self,
        isa: Isa,
        band: &mut Band<'_>,
        scratch: &[E::Bits],
        transposed: &mut Vec<E::Bits>,
    ) {
        let [rows, cols] = self.size;
        for sub in (0..cols).step_by(TRANSPOSED_COLS) {
            let width = TRANSPOSED_COLS.min(cols - sub);
            transposed.resize(rows * width, E::Bits::default());
            isa.run(TransposeDense {
                from: &scratch[sub..],
                stride: cols + GAP,
                rows,
                cols: width,
                to: transposed,
            });
            let [row, col] = self.at;
            isa.run(StoreColumns::<E> {
                codes: transposed,
                band,
                at: [row, col + sub],
                rows,
            });
        }
    }
}

struct StoreRows<'a, 'v, E: ElementCode> {
    codes: &'a [E::Bits],
    output: &'a Output,
    band: &'a mut Band<'v>,
    chunk: Chunk,
}

impl<E: ElementCode> Kernel for StoreRows<'_, '_, E> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self {
            codes,
            output,
            band,
            chunk:
                Chunk {
                    at: [row, col],
                    size: [rows, cols],
                },
        } = self;
        let [start, len] = [E::CODE.bytes(col), E::CODE.bytes(cols)];
        let bytes = &mut band.row_mut(0)[row * output.row_bytes + start..];
        for i in 0..rows {
            let codes = &codes[i * (cols + GAP)..][..cols];
            E::pack(lanes, codes, &mut bytes[i * output.row_bytes..][..len]);
        }
    }
}

struct StoreColumns<'a, 'v, E: ElementCode> {
    codes: &'a [E::Bits],
    band: &'a mut Band<'v>,
    at: [usize; 2],
    rows: usize,
}

impl<E: ElementCode> Kernel for StoreColumns<'_, '_, E> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self {
            codes,
            band,
            at: [row, col],
            rows,
        } = self;
        let [start, len] = [E::CODE.bytes(row), E::CODE.bytes(rows)];
        for (i, codes) in codes.chunks_exact(rows).enumerate() {
            E::pack(lanes, codes, &mut band.row_mut(col + i)[start..start + len]);
        }
    }
}

fn store_scales<T: ScaleEntry>(
    output: &Output,
    band: &mut Band<'_>,
    block: [usize; 2],
    chunk: Chunk,
    entries: &[T],
) {
    let Chunk {
        at: [row, col],
        size: [_, cols],
    } = chunk;
    let [top, left, across] = [row / block[0], col / block[1], cols.div_ceil(block[1])];
    let size = T::BYTES;
    for (i, entries) in entries.chunks_exact(across).enumerate() {
        let group = top + i;
        if output.transposed {
            for (j, entry) in entries.iter().enumerate() {
                let bytes = &mut band.row_mut(left + j)[group * size..][..size];
                T::store(std::slice::from_ref(entry), bytes);
            }
        } else {
            let bytes = &mut band.row_mut(0)[group * output.row_bytes + left * size..];
            T::store(entries, &mut bytes[..across * size]);
        }
    }
}

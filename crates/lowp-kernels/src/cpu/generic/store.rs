//! Storing the codes and scales of one chunk to every buffer, in either orientation.

use lowp_format::Part;

use super::quantize::Codes;
use super::turn::Turn;
use crate::cpu::bands::Band;
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::lanes::Lanes;
use crate::cpu::layout::{Output, Pass};
use crate::table::{ElementCode, ScaleEntry, ScaleKernel};

/// Rows x columns `size` from row `at[0]` of the tile and column `at[1]` on.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    pub(super) at: [usize; 2],
    pub(super) size: [usize; 2],
}

/// Columns transposed at a time: both sides stay in the first-level cache.
const TURNED: usize = 128;

/// The output whose bytes are the codes in row-major order, if `pass` has one. With a transposed
/// output the codes are in scratch: rows of an output, a power of two apart, would evict each other
/// while they are turned.
fn plain<E: ElementCode>(pass: &Pass) -> Option<usize> {
    let data = || pass.outputs.iter().filter(|o| o.part == Part::Data);
    let index = pass
        .outputs
        .iter()
        .position(|output| output.part == Part::Data)?;
    E::codes(&mut [])
        .is_some()
        .then_some(index)
        .filter(|_| data().all(|output| !output.transposed))
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
        if let Some(index) = plain::<E>(pass) {
            let stride = pass.outputs[index].row_bytes;
            let bytes = &mut bands[index].row_mut(0)[self.at[0] * stride + self.at[1]..];
            if let Some(values) = E::codes(bytes) {
                return Codes { values, stride };
            }
        }
        let stride = self.size[1] + GAP;
        Codes {
            values: scratch,
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
        scratch: &mut [E::Bits],
        entries: &[R::Entry],
        turned: &mut Vec<E::Bits>,
    ) {
        let plain = plain::<E>(pass);
        for (index, output) in pass.outputs.iter().enumerate() {
            match (output.part, pass.block) {
                (Part::Data, _) if Some(index) == plain => {}
                (Part::Data, _) if output.transposed => {
                    self.store_columns::<E>(isa, pass, bands, index, scratch, turned);
                }
                (Part::Data, _) => {
                    // Two row-major outputs of byte codes: one is a copy of the other.
                    let copy: Vec<_>;
                    let (codes, stride) = if plain.is_some() {
                        let from = self.codes::<E>(pass, bands, scratch);
                        copy = from.values.to_vec();
                        (&copy[..], from.stride)
                    } else {
                        (&*scratch, self.size[1] + GAP)
                    };
                    isa.run(StoreRows::<E> {
                        codes,
                        stride,
                        output,
                        band: &mut bands[index],
                        chunk: self,
                    });
                }
                (_, Some(block)) => {
                    store_scales(output, &mut bands[index], block, self, entries);
                }
                (_, None) => {}
            }
        }
    }

    /// Stores the codes to a transposed output.
    fn store_columns<E: ElementCode>(
        self,
        isa: Isa,
        pass: &Pass,
        bands: &mut [Band<'_>],
        index: usize,
        scratch: &mut [E::Bits],
        turned: &mut Vec<E::Bits>,
    ) {
        let [rows, cols] = self.size;
        for sub in (0..cols).step_by(TURNED) {
            let width = TURNED.min(cols - sub);
            turned.resize(rows * width, E::Bits::default());
            let from = self.codes::<E>(pass, bands, scratch);
            isa.run(Turn {
                from: &from.values[sub..],
                stride: from.stride,
                rows,
                cols: width,
                to: turned,
            });
            let [row, col] = self.at;
            isa.run(StoreColumns::<E> {
                codes: turned,
                band: &mut bands[index],
                at: [row, col + sub],
                rows,
            });
        }
    }
}

struct StoreRows<'a, 'v, E: ElementCode> {
    codes: &'a [E::Bits],
    stride: usize,
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
            stride,
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
            let codes = &codes[i * stride..][..cols];
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

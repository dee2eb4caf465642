//! Storing the codes and scales of one chunk to every buffer, in either orientation.

use lowp_format::Part;

use super::turn::Turn;
use crate::cpu::bands::Band;
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::layout::{Output, Pass};
use crate::table::{ElementCode, ScaleEntry, ScaleKernel};

/// Codes and scales of `size` = rows x columns from row `at[0]` of the tile and column `at[1]` on.
#[derive(Clone, Copy)]
pub(super) struct Chunk<'a, T, S> {
    pub(super) at: [usize; 2],
    pub(super) size: [usize; 2],
    pub(super) codes: &'a [T],
    pub(super) entries: &'a [S],
}

/// Columns transposed at a time: both sides stay in the first-level cache.
const TURNED: usize = 256;

/// Stores one chunk to all outputs of `pass`.
pub(super) fn store<'b, 'v: 'b, E: ElementCode, R: ScaleKernel>(
    isa: Isa,
    pass: &Pass,
    bands: &mut impl Iterator<Item = &'b mut Band<'v>>,
    chunk: Chunk<'_, E::Bits, R::Entry>,
    turned: &mut Vec<E::Bits>,
) {
    let Chunk {
        at,
        size: [rows, cols],
        codes,
        entries,
    } = chunk;
    for (output, band) in pass.outputs.iter().zip(bands) {
        match (output.part, pass.block) {
            (Part::Data, _) if output.transposed => {
                for sub in (0..cols).step_by(TURNED) {
                    let width = TURNED.min(cols - sub);
                    turned.resize(rows * width, E::Bits::default());
                    let from = &codes[sub..];
                    isa.run(Turn {
                        from,
                        stride: cols,
                        rows,
                        cols: width,
                        to: turned,
                    });
                    let at = [at[0], at[1] + sub];
                    isa.run(StoreColumns::<E> {
                        codes: turned,
                        band,
                        at,
                        rows,
                    });
                }
            }
            (Part::Data, _) => isa.run(StoreRows::<E> {
                codes,
                output,
                band,
                at,
                cols,
            }),
            (_, Some(block)) => store_scales(output, band, block, at, cols, entries),
            (_, None) => {}
        }
    }
}

struct StoreRows<'a, 'v, E: ElementCode> {
    codes: &'a [E::Bits],
    output: &'a Output,
    band: &'a mut Band<'v>,
    at: [usize; 2],
    cols: usize,
}

impl<E: ElementCode> Kernel for StoreRows<'_, '_, E> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Self {
            codes,
            output,
            band,
            at: [row, col],
            cols,
        } = self;
        let [start, len] = [E::CODE.bytes(col), E::CODE.bytes(cols)];
        let bytes = &mut band.row_mut(0)[row * output.row_bytes + start..];
        for (i, codes) in codes.chunks_exact(cols).enumerate() {
            E::pack(codes, &mut bytes[i * output.row_bytes..][..len]);
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
    fn run(self) {
        let Self {
            codes,
            band,
            at: [row, col],
            rows,
        } = self;
        let [start, len] = [E::CODE.bytes(row), E::CODE.bytes(rows)];
        for (i, codes) in codes.chunks_exact(rows).enumerate() {
            E::pack(codes, &mut band.row_mut(col + i)[start..start + len]);
        }
    }
}

fn store_scales<T: ScaleEntry>(
    output: &Output,
    band: &mut Band<'_>,
    block: [usize; 2],
    [row, col]: [usize; 2],
    cols: usize,
    entries: &[T],
) {
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

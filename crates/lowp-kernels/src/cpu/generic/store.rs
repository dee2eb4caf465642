//! Storing the codes and scales of one chunk to every buffer, in either orientation.

use lowp_format::Part;

use crate::cpu::bands::Band;
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::layout::{Output, Pass};
use crate::table::{ElementCode, ScaleEntry, ScaleKernel};

/// Stores codes and scales of one chunk to all outputs of `pass`.
pub(super) fn store<'b, 'v: 'b, E: ElementCode, R: ScaleKernel>(
    isa: Isa,
    pass: &Pass,
    bands: &mut impl Iterator<Item = &'b mut Band<'v>>,
    [col, rows, cols]: [usize; 3],
    codes: &[E::Bits],
    entries: &[R::Entry],
    turned: &mut Vec<E::Bits>,
) {
    for (output, band) in pass.outputs.iter().zip(bands) {
        match (output.part, pass.block) {
            (Part::Data, _) if output.transposed => {
                turned.resize(rows * cols, E::Bits::default());
                isa.run(Turn {
                    from: codes,
                    rows,
                    cols,
                    to: turned,
                });
                isa.run(StoreColumns::<E> {
                    codes: turned,
                    band,
                    col,
                    rows,
                });
            }
            (Part::Data, _) => isa.run(StoreRows::<E> {
                codes,
                output,
                band,
                col,
                cols,
            }),
            (_, Some(block)) => store_scales(output, band, block, [col, cols], entries),
            (_, None) => {}
        }
    }
}

struct StoreRows<'a, 'v, E: ElementCode> {
    codes: &'a [E::Bits],
    output: &'a Output,
    band: &'a mut Band<'v>,
    col: usize,
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
            col,
            cols,
        } = self;
        let bytes = band.row_mut(0);
        let [start, len] = [E::CODE.bytes(col), E::CODE.bytes(cols)];
        for (row, codes) in codes.chunks_exact(cols).enumerate() {
            E::pack(codes, &mut bytes[row * output.row_bytes + start..][..len]);
        }
    }
}

struct StoreColumns<'a, 'v, E: ElementCode> {
    codes: &'a [E::Bits],
    band: &'a mut Band<'v>,
    col: usize,
    rows: usize,
}

impl<E: ElementCode> Kernel for StoreColumns<'_, '_, E> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (i, codes) in self.codes.chunks_exact(self.rows).enumerate() {
            E::pack(codes, self.band.row_mut(self.col + i));
        }
    }
}

/// Transposes a dense matrix of unpacked codes.
pub(super) struct Turn<'a, T> {
    pub(super) from: &'a [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) to: &'a mut [T],
}

impl<T: Copy> Kernel for Turn<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        const SIDE: usize = 16;
        let Self {
            from,
            rows,
            cols,
            to,
        } = self;
        let (full_rows, full_cols) = (rows / SIDE * SIDE, cols / SIDE * SIDE);
        for col in (0..full_cols).step_by(SIDE) {
            for row in (0..full_rows).step_by(SIDE) {
                let mut block = [[from[0]; SIDE]; SIDE];
                for (r, line) in block.iter_mut().enumerate() {
                    line.copy_from_slice(&from[(row + r) * cols + col..][..SIDE]);
                }
                for c in 0..SIDE {
                    let out = &mut to[(col + c) * rows + row..][..SIDE];
                    for r in 0..SIDE {
                        out[r] = block[r][c];
                    }
                }
            }
            for row in full_rows..rows {
                for c in col..col + SIDE {
                    to[c * rows + row] = from[row * cols + c];
                }
            }
        }
        for c in full_cols..cols {
            for row in 0..rows {
                to[c * rows + row] = from[row * cols + c];
            }
        }
    }
}

fn store_scales<T: ScaleEntry>(
    output: &Output,
    band: &mut Band<'_>,
    block: [usize; 2],
    [col, cols]: [usize; 2],
    entries: &[T],
) {
    let [first, across] = [col / block[1], cols.div_ceil(block[1])];
    if across == 0 {
        return;
    }
    let size = T::BYTES;
    for (group, entries) in entries.chunks_exact(across).enumerate() {
        if output.transposed {
            for (i, entry) in entries.iter().enumerate() {
                let bytes = &mut band.row_mut(first + i)[group * size..][..size];
                T::store(std::slice::from_ref(entry), bytes);
            }
        } else {
            let bytes = &mut band.row_mut(0)[group * output.row_bytes + first * size..];
            T::store(entries, &mut bytes[..across * size]);
        }
    }
}

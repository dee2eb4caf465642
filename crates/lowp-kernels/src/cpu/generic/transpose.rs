//! Transposing matrices of entries of 4, 8, 16 or 32 bits (docs/numerics.md 9).

use lowp_format::Code;

use super::{Context, for_each};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::cpu::ingredients::{Bf16, E2M1, E4M3, ElementCode, F32};
use crate::lanes::Lanes;
use crate::lanes::TransposeDense;
use crate::lanes::{Isa, Kernel};
use crate::{KernelError, TransposeJob};

/// Output rows of one task; even.
const ROWS: usize = 64;
/// Output columns transposed at a time; even.
const COLS: usize = 256;

/// Output rows `first..` of a transpose. `E` names the width of an entry only.
struct Part<'a> {
    from: &'a [u8],
    entries: [usize; 2],
    first: usize,
    to: &'a mut [u8],
}

struct LoadRows<'a, E: ElementCode> {
    from: &'a [u8],
    stride: usize,
    codes: &'a mut [E::Bits],
    cols: usize,
}

impl<E: ElementCode> Kernel for LoadRows<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let len = E::CODE.bytes(self.cols);
        for (row, codes) in self.codes.chunks_exact_mut(self.cols).enumerate() {
            E::unpack(&self.from[row * self.stride..][..len], codes);
        }
    }
}

struct StoreRows<'a, E: ElementCode> {
    codes: &'a [E::Bits],
    cols: usize,
    to: &'a mut [u8],
    stride: usize,
}

impl<E: ElementCode> Kernel for StoreRows<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let len = E::CODE.bytes(self.cols);
        for (row, codes) in self.codes.chunks_exact(self.cols).enumerate() {
            E::pack(lanes, codes, &mut self.to[row * self.stride..][..len]);
        }
    }
}

fn transpose<E: ElementCode>(isa: Isa, part: Part<'_>) {
    let Part {
        from,
        entries: [outer, inner],
        first,
        to,
    } = part;
    let (from_stride, to_stride) = (E::CODE.bytes(inner), E::CODE.bytes(outer));
    let rows = to.len() / to_stride;
    let mut codes = vec![E::Bits::default(); rows * COLS];
    let mut transposed = codes.clone();
    for col in (0..outer).step_by(COLS) {
        let cols = COLS.min(outer - col);
        let (codes, transposed) = (&mut codes[..rows * cols], &mut transposed[..rows * cols]);
        let from = &from[col * from_stride + E::CODE.bytes(first)..];
        isa.run(LoadRows::<E> {
            from,
            stride: from_stride,
            codes,
            cols: rows,
        });
        isa.run(TransposeDense {
            from: codes,
            stride: rows,
            rows: cols,
            cols: rows,
            to: transposed,
        });
        let to = &mut to[E::CODE.bytes(col)..];
        isa.run(StoreRows::<E> {
            codes: transposed,
            cols,
            to,
            stride: to_stride,
        });
    }
}

/// Runs every transpose of a plan.
pub(crate) fn run(
    jobs: &[TransposeJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let mut tasks = Vec::new();
    for job in jobs {
        let from = views.bytes.read(&job.from)?;
        let to = views.bytes.take(&job.to)?;
        let stride = job.code.bytes(job.entries[0]);
        for (i, to) in to.chunks_mut((ROWS * stride).max(1)).enumerate() {
            let part = Part {
                from,
                entries: job.entries,
                first: i * ROWS,
                to,
            };
            tasks.push((job.code, part));
        }
    }
    for_each(context, tasks, |(code, part)| {
        match code {
            Code::E2M1 => transpose::<E2M1>(context.isa, part),
            Code::E4M3 | Code::E5M2 | Code::E8M0 => transpose::<E4M3>(context.isa, part),
            Code::Bf16 => transpose::<Bf16>(context.isa, part),
            Code::F32 => transpose::<F32>(context.isa, part),
        }
        Ok(())
    })
}

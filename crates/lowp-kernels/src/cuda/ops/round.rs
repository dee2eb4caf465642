//! Roundings: values as codes hold them, in the pass that would encode them.

use lowp_format::{Orientation, Part};

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{
    Encode, LONG_ROUND_FP4_BYTES, Pass, RING_COLS, ROUND_FP4_BYTES, ROUND_RING_BYTES, Round,
    TRANSPOSED_COLS, TRANSPOSED_ROWS, WIDE_COLS, WIDE_RING_COLS, WIDE_ROWS, code,
};
use super::encode_ring::{MANY_TILES, WIDE_TILES};
use super::ingredients::{known, outers, put_outer};
use super::job::{Job, Vector, aligned, cdiv, of_one_kind, sides, transposed};
use crate::check::encode::{outer_kernel_of, share_pass};
use crate::{KernelError, RoundJob, Target};

const ROUND: Kernel = Kernel::with_shared("lowp_round", LONG_ROUND_FP4_BYTES);
pub(crate) const E8M0_FP8: Kernel = Kernel::with_shared("lowp_round_e8m0_fp8", ROUND_RING_BYTES);
const TWO_LEVEL: Kernel = Kernel::with_shared("lowp_round_two_level", ROUND_FP4_BYTES);
const TWO_LEVEL_RANDOM: Kernel =
    Kernel::with_shared("lowp_round_two_level_random", LONG_ROUND_FP4_BYTES);

/// Bytes that accesses to values and codes are aligned to.
const ALIGNED: u64 = 16;

pub(crate) fn job(backend: &Cuda, job: &RoundJob<Cuda>) -> Result<Round, KernelError> {
    let RoundJob { encode: of, values } = job;
    let source = Vector::new(&of.source);
    let share = share_pass(backend, &of.kernels, &of.tensor);
    let known = known(&of.kernels, &of.tensor, share);
    let mut encode = Encode {
        source: source.pointer,
        rows: of.shape.rows as u64,
        cols: of.shape.cols as u64,
        outer: outers(&known, &of.tensor, share),
        source_code: source.code,
        passes: 2,
        ..Encode::default()
    };
    if let Some(key) = of.stochastic {
        encode.stochastic = 1;
        encode.seed = key.seed;
        encode.stream = key.stream;
        encode.first = key.first;
    }
    for orientation in Orientation::ALL {
        let at = orientation as usize;
        let [block_rows, block_cols] = sides(of.kernels[at].block);
        encode.pass[at] = Pass {
            ingredients: known[at],
            block_rows,
            block_cols,
            ..Pass::default()
        };
    }
    for target in &of.targets {
        let Target { spec, bytes, .. } = target;
        if spec.key.part.is_outer() {
            let (orientation, _) = outer_kernel_of(&of.kernels, spec.key.usage)?;
            put_outer(&mut encode.outer, &known, orientation, bytes.pointer());
            continue;
        }
        for orientation in spec.key.usage.orientations() {
            let pass = &mut encode.pass[orientation as usize];
            let slots = match spec.key.part {
                Part::Data => &mut pass.data,
                _ => &mut pass.scale,
            };
            slots[transposed(target)] = bytes.pointer();
        }
    }
    let values = [0, 1].map(|at| values[at].as_ref().map_or(0, |values| values.pointer()));
    let data = encode.pass.iter().flat_map(|pass| pass.data);
    for pointer in data.chain(values).chain([source.pointer]) {
        if !aligned(pointer, 0, ALIGNED) {
            let size = ALIGNED as usize;
            return Err(KernelError::Misaligned { pointer, size });
        }
    }
    Ok(Round { encode, values })
}

impl Round {
    fn is_fp4(&self) -> bool {
        self.encode.pass[0].ingredients.element == code::E2M1
    }
}

impl Job for Round {
    const KERNELS: &'static [Kernel] = &[ROUND, E8M0_FP8, TWO_LEVEL, TWO_LEVEL_RANDOM];

    fn kernel(jobs: &[Self]) -> Kernel {
        let kind = |job: &Self| match (job.is_fp4(), job.encode.stochastic) {
            (false, _) => E8M0_FP8,
            (true, 0) => TWO_LEVEL,
            (true, _) => TWO_LEVEL_RANDOM,
        };
        of_one_kind(jobs, |job| Some(kind(job))).unwrap_or(ROUND)
    }

    fn lay_out(&mut self) {
        let Encode { rows, cols, .. } = self.encode;
        let tiles = cdiv(rows, TRANSPOSED_ROWS.into()) * cdiv(cols, TRANSPOSED_COLS.into());
        let many = WIDE_TILES.get() || tiles >= MANY_TILES;
        let [height, width] = match (self.is_fp4(), many) {
            (false, false) => [WIDE_ROWS, WIDE_COLS],
            (false, true) => [WIDE_ROWS, WIDE_RING_COLS],
            (true, false) => [TRANSPOSED_ROWS, TRANSPOSED_COLS],
            (true, true) => [TRANSPOSED_ROWS, RING_COLS],
        };
        [self.encode.tile_rows, self.encode.tile_cols] = [height, width];
        self.encode.tiles_across = cdiv(cols, width.into());
    }

    /// Where there is nothing to round, one tile does what is left of the tensor.
    fn tiles(&self) -> u64 {
        let Encode {
            rows,
            tile_rows,
            tiles_across,
            ..
        } = self.encode;
        (cdiv(rows, tile_rows.into()) * tiles_across).max(1)
    }
}

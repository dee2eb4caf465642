//! Flat encodes.

use lowp_format::Part;

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{
    FLAT_ENCODE_RUN, FLAT_SCALES_DOWN, FLAT_WARP_COLS, FLAT_WARP_ROWS, FlatEncode, FlatPass, Outer,
    THREADS, code, extent, flat_walk, rule,
};
use super::ingredients::{filling, known, outers};
use super::job::{Job, Vector, aligned, bits, cdiv, place, put, sides, transposed, via_bf16};
use crate::check::encode::share_pass;
use crate::{FlatEncodeJob, KernelError};

pub(crate) fn jobs(
    backend: &Cuda,
    job: &FlatEncodeJob<Cuda>,
) -> Result<Vec<FlatEncode>, KernelError> {
    let source = Vector::new(&job.source);
    let share = share_pass(backend, &job.kernels, &job.tensor);
    let known = known(&job.kernels, &job.tensor, share);
    let base = FlatEncode {
        source: source.pointer,
        rows: job.shape.rows as u64,
        cols: job.shape.cols as u64,
        start: job.start as u64,
        len: job.len as u64,
        outer: outers(&known, &job.tensor, share),
        source_code: source.code,
        via_bf16: via_bf16(job.source_rounding),
        ..FlatEncode::default()
    };
    let agreed = |block: [usize; 2]| {
        let flat = job.blocks.as_ref()?;
        let part = flat.blocks.iter().find(|part| part.block == block)?;
        Some(flat.amaxes.at(part.start))
    };
    let mut rows = vec![base];
    for target in &job.targets {
        let orientation = filling(
            &mut rows,
            base,
            &job.kernels,
            &known,
            share,
            target,
            |row| &mut row.outer,
        )?;
        let Some(orientation) = orientation else {
            continue;
        };
        let (pointer, part) = (target.bytes.pointer(), target.spec.key.part);
        let block = job.kernels[orientation as usize].block;
        let made = known[orientation as usize];
        let amaxes = block.and_then(agreed).unwrap_or(0);
        let [block_rows, block_cols] = sides(block);
        let side = transposed(target);
        place(&mut rows, base, |row| {
            let used = usize::from(row.passes);
            let same = |pass: &FlatPass| {
                pass.ingredients == made
                    && [pass.block_rows, pass.block_cols] == [block_rows, block_cols]
            };
            let at = row.pass[..used].iter().position(same).unwrap_or(used);
            let Some(pass) = row.pass.get_mut(at) else {
                return false;
            };
            let slot = match part {
                Part::Data => &mut pass.data,
                _ => &mut pass.scale[side],
            };
            let free = put(slot, pointer);
            if free && at == used {
                pass.ingredients = made;
                pass.amaxes = amaxes;
                [pass.block_rows, pass.block_cols] = [block_rows, block_cols];
                row.passes += 1;
            }
            free
        })?;
    }
    // Amaxes of blocks that no target has are consumed, too.
    for part in job.blocks.iter().flat_map(|flat| &flat.blocks) {
        let [block_rows, block_cols] = sides(Some(part.block));
        let amaxes = agreed(part.block).unwrap_or(0);
        place(&mut rows, base, |row| {
            let used = usize::from(row.passes);
            let same = |pass: &FlatPass| {
                let sides = [pass.block_rows, pass.block_cols];
                pass.amaxes == amaxes && sides == [block_rows, block_cols]
            };
            if row.pass[..used].iter().any(same) {
                return true;
            }
            let Some(pass) = row.pass.get_mut(used) else {
                return false;
            };
            pass.amaxes = amaxes;
            [pass.block_rows, pass.block_cols] = [block_rows, block_cols];
            row.passes += 1;
            true
        })?;
    }
    Ok(rows)
}

impl FlatPass {
    fn choose_walk(&self) -> u8 {
        let made = &self.ingredients;
        let plain = matches!(made.element, code::BF16 | code::F32);
        if plain || made.rule == rule::NONE {
            let plain = plain && made.rule == rule::NONE;
            return if plain {
                flat_walk::PLAIN
            } else {
                flat_walk::ANY
            };
        }
        let side = |side| matches!(side, 16 | 32 | 128);
        match (made.extent, [self.block_rows, self.block_cols]) {
            (extent::TENSOR, [0, 0]) => flat_walk::ONE,
            (extent::TENSOR, [rows, cols]) if rows == cols && side(rows) => flat_walk::ONE,
            (extent::ROWS, [0, 0]) => flat_walk::BY_ROW,
            (extent::ROWS | extent::TENSOR, [1, cols]) if side(cols) => flat_walk::BY_ROW,
            (extent::COLUMNS, [0, 0]) => flat_walk::BY_COLUMN,
            (extent::COLUMNS | extent::TENSOR, [rows, 1]) if side(rows) => flat_walk::BY_COLUMN,
            _ => flat_walk::ANY,
        }
    }
}

impl Job for FlatEncode {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_flat_encode")];

    fn lay_out(&mut self) {
        let (rows, cols, end) = (self.rows, self.cols, self.start + self.len);
        let chunks = cols.is_multiple_of(4);
        let size = bits(self.source_code) / 8;
        let first = self.source.wrapping_sub(self.start.wrapping_mul(size));
        self.vector = u8::from(chunks && aligned(first, 0, 4 * size));
        self.tiled = 1;
        let mut any = false;
        for pass in self.pass.iter_mut().filter(|pass| pass.data != 0) {
            let bits = bits(pass.ingredients.element);
            let first = pass.data.wrapping_sub(self.start * bits / 8);
            pass.walk = pass.choose_walk();
            pass.aligned = u8::from(chunks && aligned(first, 0, bits / 2));
            // Of a row that begins within a byte, two warps would have the byte.
            let apart = bits != 4 || cols.is_multiple_of(2);
            let known = match pass.walk {
                flat_walk::ANY => false,
                flat_walk::PLAIN => pass.aligned != 0,
                _ => true,
            };
            self.tiled &= u8::from(known && apart);
            any = true;
        }
        self.first_row =
            self.start / cols.max(1) / u64::from(FLAT_WARP_ROWS) * u64::from(FLAT_WARP_ROWS);
        self.tiles_across = cdiv(cols, FLAT_WARP_COLS.into());
        let runs = match any && self.len > 0 {
            true => cdiv(end, FLAT_ENCODE_RUN) - self.start / FLAT_ENCODE_RUN,
            false => 0,
        };
        let down = cdiv(cdiv(end, cols) - self.first_row, FLAT_WARP_ROWS.into());
        let tiles = cdiv(down * self.tiles_across, THREADS as u64 / 32);
        // A range of little of a long row would have more tiles than elements.
        self.tiled &= u8::from(tiles <= 8 * runs);
        self.data_tiles = if self.tiled == 0 { runs } else { tiles };
        for (tiles, pass) in self.scale_tiles.iter_mut().zip(&self.pass) {
            let [height, width] = [pass.block_rows, pass.block_cols].map(u64::from);
            let [down, across] = [cdiv(rows, height), cdiv(cols, width)];
            // Amaxes are consumed with or without scales.
            *tiles = if pass.amaxes == 0 {
                0
            } else if pass.scale[1] != 0 {
                cdiv(down, FLAT_SCALES_DOWN.into()) * cdiv(across, THREADS as u64)
            } else {
                cdiv(down * across, FLAT_ENCODE_RUN)
            };
        }
    }

    fn tiles(&self) -> u64 {
        let tiles = self.data_tiles + self.scale_tiles[0] + self.scale_tiles[1];
        let writes = |outer: &Outer| outer.to != 0 || outer.ingredients.observed != 0;
        tiles.max(u64::from(self.outer.iter().any(writes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(element: u8, rule: u8, [block_rows, block_cols]: [u32; 2]) -> FlatEncode {
        let mut job = FlatEncode {
            source: 256,
            rows: 256,
            cols: 512,
            len: 256 * 512,
            source_code: code::F32,
            passes: 1,
            ..FlatEncode::default()
        };
        let pass = &mut job.pass[0];
        pass.ingredients.element = element;
        pass.ingredients.rule = rule;
        [pass.block_rows, pass.block_cols] = [block_rows, block_cols];
        pass.data = 512;
        job
    }

    fn laid_out(mut job: FlatEncode) -> FlatEncode {
        job.lay_out();
        job
    }

    #[test]
    fn known_ingredients_are_tiled() {
        let walk = |element, rule, block| {
            let job = laid_out(job(element, rule, block));
            (job.pass[0].walk, job.tiled, job.data_tiles)
        };
        for (rule, block, expected) in [
            (rule::TENSOR, [0, 0], flat_walk::ONE),
            (rule::E8M0_TE, [32, 32], flat_walk::ONE),
            (rule::E8M0_TE, [1, 32], flat_walk::BY_ROW),
            (rule::E8M0_TE, [32, 1], flat_walk::BY_COLUMN),
            (rule::BLOCK_F32, [1, 128], flat_walk::BY_ROW),
        ] {
            assert_eq!(walk(code::E4M3, rule, block), (expected, 1, 4));
        }
        assert_eq!(walk(code::BF16, rule::NONE, [0, 0]).0, flat_walk::PLAIN);
        // Eight rows of blocks among sixteen of elements have no number of their own.
        let any = (flat_walk::ANY, 0, 16);
        assert_eq!(walk(code::E4M3, rule::E8M0_TE, [8, 1]), any);
        assert_eq!(walk(code::E4M3, rule::E8M0_TE, [16, 32]), any);
    }

    #[test]
    fn bytes_that_two_rows_share_are_not_tiled() {
        let tiled = |cols| {
            let mut job = job(code::E2M1, rule::TWO_LEVEL, [16, 1]);
            [job.cols, job.len] = [cols, 256 * cols];
            let job = laid_out(job);
            (job.tiled, job.pass[0].aligned, job.vector)
        };
        assert_eq!(tiled(512), (1, 1, 1));
        assert_eq!(tiled(510), (1, 0, 0));
        assert_eq!(tiled(511), (0, 0, 0));
    }

    #[test]
    fn tiles_cover_the_rows_of_a_range() {
        let tiles = |start, len| {
            let mut job = job(code::E4M3, rule::TENSOR, [0, 0]);
            [job.start, job.len] = [start, len];
            let job = laid_out(job);
            (job.first_row, job.data_tiles)
        };
        // Eight warps are two rows of tiles.
        assert_eq!(tiles(0, 512), (0, 1));
        assert_eq!(tiles(31 * 512, 1024), (0, 1));
        assert_eq!(tiles(33 * 512, 64 * 512), (32, 2));
        assert_eq!(tiles(33 * 512, 0), (32, 0));
        // Few elements of a long row.
        let mut long = job(code::E4M3, rule::TENSOR, [0, 0]);
        [long.rows, long.cols, long.len] = [2, 1 << 40, 512];
        let long = laid_out(long);
        assert_eq!((long.tiled, long.data_tiles), (0, 1));
    }
}

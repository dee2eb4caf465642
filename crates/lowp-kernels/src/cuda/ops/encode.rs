//! Encodes: jobs of up to two passes, the paths that they take, and the kernels that know these.

use lowp_format::{Axis, Form, Part, Shape};

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{
    BLOCKS_SIDE, Encode, FLAT_COLS, FLAT_TILE, Outer, Pass, STREAM_RUN, Scales, TRANSPOSED_COLS,
    TRANSPOSED_ROWS, UNIT_BLOCKS, WIDE_COLS, WIDE_ROWS, code, extent, forms, path, rule, vector,
};
use super::ingredients::{filling, known, outers};
use super::job::{Job, Vector, aligned, bits, cdiv, of_one_kind, place, put, sides, via_bf16};
use crate::check::encode::share_pass;
use crate::{EncodeJob, KernelError, Target};

const ENCODE: Kernel = Kernel::new("lowp_encode");
const WIDE_BF16: Kernel = Kernel::new("lowp_encode_wide_bf16");
const TRANSPOSED_BF16: Kernel = Kernel::new("lowp_encode_transposed_bf16");
const TRANSPOSED_F32: Kernel = Kernel::new("lowp_encode_transposed_f32");
const E8M0_FP4_F32: Kernel = Kernel::new("lowp_encode_e8m0_fp4_f32");
const MIXED_BF16: Kernel = Kernel::new("lowp_encode_mixed_bf16");
const MIXED_F32: Kernel = Kernel::new("lowp_encode_mixed_f32");
const BLOCKS_BF16: Kernel = Kernel::new("lowp_encode_blocks_bf16");
const BLOCKS_F32: Kernel = Kernel::new("lowp_encode_blocks_f32");
const STREAM_BF16: Kernel = Kernel::new("lowp_encode_stream_bf16");
const STREAM_F32: Kernel = Kernel::new("lowp_encode_stream_f32");

/// Elements of a generic unit, about.
const UNIT: u64 = 4096;

/// Tiles of a launch from which fewer and larger ones keep a device as busy.
const MANY_TILES: u64 = 16384;

/// One row, unless two targets of a part lie the same way.
pub(crate) fn jobs(backend: &Cuda, job: &EncodeJob<Cuda>) -> Result<Vec<Encode>, KernelError> {
    let source = Vector::new(&job.source);
    let share = share_pass(backend, &job.kernels, &job.tensor);
    let known = known(&job.kernels, &job.tensor, share);
    let mut base = Encode {
        source: source.pointer,
        rows: job.shape.rows as u64,
        cols: job.shape.cols as u64,
        outer: outers(&known, &job.tensor, share),
        source_code: source.code,
        via_bf16: via_bf16(job.source_rounding),
        ..Encode::default()
    };
    if let Some(key) = job.stochastic {
        base.stochastic = 1;
        base.seed = key.seed;
        base.stream = key.stream;
        base.first = key.first;
    }
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
        let [block_rows, block_cols] = sides(job.kernels[orientation as usize].block);
        let (side, scales) = scales(target, job.shape)?;
        let compact = target.is_compact();
        place(&mut rows, base, |row| {
            let used = usize::from(row.passes);
            let made = known[orientation as usize];
            let same = |pass: &Pass| {
                pass.ingredients == made
                    && pass.block_rows == block_rows
                    && pass.block_cols == block_cols
            };
            let at = row.pass[..used].iter().position(same).unwrap_or(used);
            let Some(pass) = row.pass.get_mut(at) else {
                return false;
            };
            let free = match part {
                Part::Data => put(&mut pass.data[side], pointer),
                _ if compact => put(&mut pass.scale[side], pointer),
                _ => {
                    let slot = &mut pass.form[side];
                    let free = slot.to == 0;
                    if free {
                        *slot = scales;
                    }
                    free
                }
            };
            if free && at == used {
                pass.ingredients = made;
                [pass.block_rows, pass.block_cols] = [block_rows, block_cols];
                row.passes += 1;
            }
            free
        })?;
    }
    Ok(rows)
}

/// Block scales of a matrix of `shape`, and their order: 1 where physical rows follow the columns.
fn scales(target: &Target<Cuda>, shape: Shape) -> Result<(usize, Scales), KernelError> {
    let layout = target.layout(shape)?;
    let side = usize::from(layout.axes()[0] == Axis::Cols);
    // Along the rows, then along the columns.
    let logical = |physical: [usize; 2]| [physical[side], physical[1 - side]];
    let [rows, cols] = logical(layout.padded()).map(|n| n as u64);
    let [tile_rows, tile_cols] = sides(Some(logical(layout.tile())));
    let scales = Scales {
        to: target.bytes.pointer(),
        rows,
        cols,
        tile_rows,
        tile_cols,
        swizzled: u32::from(layout.form() == Form::Swizzled),
        reserved: 0,
    };
    Ok((side, scales))
}

/// Least common multiple of sides of blocks, which are small.
fn lcm(a: u64, b: u64) -> u64 {
    lowp_format::lcm(a as usize, b as usize) as u64
}

/// Whether the blocks of `pass` are `1 x side`, `side x 1` or `side x side`; 0: have no scale.
pub(super) fn has_side(pass: &Pass, side: u32) -> bool {
    let sides = [pass.block_rows, pass.block_cols];
    sides == [side; 2] || (side != 0 && (sides == [1, side] || sides == [side, 1]))
}

/// Rows and columns that a generic pass does at a time: whole blocks, even, few enough that their
/// multipliers fit shared memory.
fn unit(pass: &Pass) -> [u64; 2] {
    let [height, width] = [pass.block_rows, pass.block_cols].map(|side| u64::from(side.max(1)));
    let [rows, cols] = [lcm(height, 2), lcm(width, 2)];
    let rows = rows * (32 / rows).max(1);
    let blocks = (rows / height) * (cols / width);
    let times = (UNIT / (rows * cols)).min(u64::from(UNIT_BLOCKS) / blocks.max(1));
    [rows, cols * times.max(1)]
}

impl Pass {
    /// Whether a pass has the ingredients and blocks of `other`.
    fn is_of(other: &Self) -> impl Fn(&Self) -> bool {
        move |pass| {
            let blocks = |pass: &Self| [pass.block_rows, pass.block_cols];
            pass.ingredients == other.ingredients && blocks(pass) == blocks(other)
        }
    }

    /// Whether it has FP8 codes, and no scale of an observed amax.
    fn is_known_fp8(&self) -> bool {
        let made = &self.ingredients;
        made.observed == 0 && matches!(made.element, code::E4M3 | code::E5M2)
    }

    /// Whether PATH_MIXED knows its ingredients.
    fn fits_mixed(&self) -> bool {
        let fp8 = matches!(self.ingredients.element, code::E4M3 | code::E5M2);
        match self.ingredients.rule {
            rule::TENSOR => fp8 && has_side(self, 0),
            rule::E8M0_TE | rule::E8M0_FLOOR | rule::E8M0_EVEN => {
                (fp8 || self.ingredients.element == code::E2M1) && has_side(self, 32)
            }
            rule::TWO_LEVEL | rule::FOUR_OVER_SIX => has_side(self, 16),
            _ => false,
        }
    }

    /// Whether PATH_BLOCKS knows its ingredients, and its scales are f32 at their addresses.
    pub(super) fn fits_blocks(&self) -> bool {
        let made = &self.ingredients;
        let fp8 = matches!(made.element, code::E4M3 | code::E5M2);
        let scales = self
            .scale
            .iter()
            .chain(self.form.iter().map(|form| &form.to));
        let scales = scales.copied().all(|to| aligned(to, 0, 4));
        let known = made.rule == rule::BLOCK_F32 && made.hadamard == 0;
        fp8 && known && has_side(self, 128) && scales
    }
}

impl Encode {
    fn passes_mut(&mut self) -> &mut [Pass] {
        let passes = usize::from(self.passes);
        &mut self.pass[..passes.min(2)]
    }

    fn passes(&self) -> &[Pass] {
        &self.pass[..usize::from(self.passes).min(2)]
    }

    /// Whether it has E2M1 codes of binary32 with E8M0 scales, which are Compact: a tile is narrower than those of swizzled ones.
    pub(super) fn is_e8m0_fp4(&self) -> bool {
        let made = &self.pass[0].ingredients;
        let e8m0 = matches!(
            made.rule,
            rule::E8M0_TE | rule::E8M0_FLOOR | rule::E8M0_EVEN
        );
        let compact = self
            .passes()
            .iter()
            .all(|pass| pass.form.iter().all(|form| form.to == 0));
        made.element == code::E2M1 && e8m0 && compact && self.source_code == code::F32
    }

    fn choose_path(&self) -> u8 {
        let passes = self.passes();
        let [first, ..] = passes else {
            return path::FLAT;
        };
        let made = first.ingredients;
        let repeated = passes[1..].iter().any(Pass::is_of(first));
        if repeated {
            return path::GENERIC;
        }
        let alike = passes.iter().all(|pass| pass.ingredients == made);
        let plain =
            alike && self.stochastic == 0 && made.hadamard == 0 && made.extent == extent::TENSOR;
        // Scales in another form than Compact follow no order of data.
        let transposed = passes
            .iter()
            .any(|pass| pass.data[1] != 0 || pass.scale[1] != 0);
        let sides = |side| passes.iter().all(|pass| has_side(pass, side));
        let once = |order: usize| passes.iter().filter(|pass| pass.data[order] != 0).count() <= 1;
        let fp8 = matches!(made.element, code::E4M3 | code::E5M2);
        match made.rule {
            rule::TENSOR if plain && fp8 && sides(0) && passes.len() == 1 => {
                return if transposed {
                    path::TRANSPOSED
                } else {
                    path::WIDE
                };
            }
            rule::E8M0_TE | rule::E8M0_FLOOR if plain && fp8 && sides(32) && !transposed => {
                return path::WIDE;
            }
            rule::TWO_LEVEL
                if plain && made.element == code::E2M1 && sides(16) && once(0) && once(1) =>
            {
                return path::TRANSPOSED;
            }
            rule::E8M0_TE | rule::E8M0_FLOOR | rule::E8M0_EVEN
                if plain && self.is_e8m0_fp4() && sides(32) && once(0) && once(1) =>
            {
                return path::TRANSPOSED;
            }
            // The generic path writes entries at any address.
            rule::NONE
                if plain
                    && passes.len() == 1
                    && first.data[0] != 0
                    && !transposed
                    && aligned(first.data[0], 0, bits(made.element) / 8) =>
            {
                return path::WIDE;
            }
            rule::BLOCK_F32 if self.stochastic == 0 && self.fits(Pass::fits_blocks) => {
                return path::BLOCKS;
            }
            _ => {}
        }
        if self.fits(Pass::fits_mixed) {
            path::MIXED
        } else {
            path::GENERIC
        }
    }

    /// Whether every pass has ingredients that `fits`, and together they fill one order of data each.
    fn fits(&self, fits: impl Fn(&Pass) -> bool) -> bool {
        let passes = self.passes();
        let one_order = |pass: &Pass| pass.data.iter().filter(|data| **data != 0).count() <= 1;
        let orders = passes.len() == 1 || passes.iter().all(one_order);
        // What is transformed is done last.
        let first = passes.split_last().map_or(&[][..], |(_, first)| first);
        let last = first.iter().all(|pass| pass.ingredients.hadamard == 0);
        orders && last && passes.iter().all(fits)
    }

    fn choose_forms(&self) -> u8 {
        let form = |pass: &Pass, order: usize| {
            let scales = &pass.form[order];
            let [inner, outer] = [
                [pass.block_cols, scales.tile_rows],
                [pass.block_rows, scales.tile_cols],
            ][order];
            let known = scales.swizzled != 0 && inner != 1 && outer == 1;
            match scales.to {
                0 => forms::NONE,
                to if known && aligned(to, 0, 4) => forms::SWIZZLED,
                _ => forms::ANY,
            }
        };
        let all = self
            .passes()
            .iter()
            .map(|pass| form(pass, 0).max(form(pass, 1)));
        all.max().unwrap_or(forms::NONE)
    }

    /// Makes tiles so large that what they write of scales is whole sectors: rows of 32 bytes of
    /// Compact ones, tiles of 128 x 4 of swizzled ones.
    fn enlarge(&mut self) {
        let rule = self.pass[0].ingredients.rule;
        let mx = matches!(rule, rule::E8M0_TE | rule::E8M0_FLOOR);
        if !mx || self.path != path::WIDE {
            return;
        }
        [self.tile_rows, self.tile_cols] = if self.forms == forms::SWIZZLED {
            [128, WIDE_COLS]
        } else {
            [WIDE_ROWS, 1024]
        };
        self.tiles_across = cdiv(self.cols, u64::from(self.tile_cols));
    }

    /// Whether PATH_STREAM does what PATH_WIDE would.
    fn streams(&self) -> bool {
        let [pass] = self.passes() else { return false };
        let known = match pass.ingredients.rule {
            rule::TENSOR => true,
            rule::E8M0_TE | rule::E8M0_FLOOR => {
                let blocks = [pass.block_rows, pass.block_cols] == [1, 32];
                let scales = pass.scale[0] != 0 && aligned(pass.scale[0], 0, 4);
                blocks && scales && self.cols.is_multiple_of(32) && self.forms == forms::NONE
            }
            _ => false,
        };
        let fp8 = matches!(pass.ingredients.element, code::E4M3 | code::E5M2);
        let whole = aligned(self.source, 0, 16) && aligned(pass.data[0], 0, 16);
        let asked = self.via_bf16 == 0 && pass.data[0] != 0;
        self.path == path::WIDE && known && fp8 && whole && asked
    }

    fn vector_outputs(&self) -> u8 {
        let mut found = 0;
        for (i, pass) in self.passes().iter().enumerate() {
            let bits = bits(pass.ingredients.element);
            if aligned(pass.data[0], cdiv(self.cols * bits, 8), 16) {
                found |= [vector::ROWS_0, vector::ROWS_1][i];
            }
            if aligned(pass.data[1], cdiv(self.rows * bits, 8), 16) {
                found |= [vector::COLUMNS_0, vector::COLUMNS_1][i];
            }
        }
        found
    }

    /// Paths and tiles; `source` says whether whole chunks of the input are aligned.
    pub(super) fn lay_out_with(&mut self, source: bool) {
        self.path = self.choose_path();
        let [rows, cols] = match self.path {
            path::WIDE => [WIDE_ROWS, WIDE_COLS].map(u64::from),
            path::TRANSPOSED | path::MIXED => [TRANSPOSED_ROWS, TRANSPOSED_COLS].map(u64::from),
            path::BLOCKS => [u64::from(BLOCKS_SIDE); 2],
            path::FLAT => [FLAT_TILE / FLAT_COLS, FLAT_COLS],
            _ => {
                let mut tile = [2, 2];
                for pass in self.passes_mut() {
                    let unit = unit(pass);
                    [pass.unit_rows, pass.unit_cols] = unit.map(|side| side as u32);
                    tile = [lcm(tile[0], unit[0]), lcm(tile[1], unit[1])];
                }
                tile
            }
        };
        [self.tile_rows, self.tile_cols] = [rows as u32, cols as u32];
        self.tiles_across = if self.path == path::FLAT {
            1
        } else {
            cdiv(self.cols, cols)
        };
        self.forms = self.choose_forms();
        self.vector = self.vector_outputs() | if source { vector::SOURCE } else { 0 };
    }
}

impl Job for Encode {
    const KERNELS: &'static [Kernel] = &[
        ENCODE,
        WIDE_BF16,
        TRANSPOSED_BF16,
        TRANSPOSED_F32,
        E8M0_FP4_F32,
        MIXED_BF16,
        MIXED_F32,
        BLOCKS_BF16,
        BLOCKS_F32,
        STREAM_BF16,
        STREAM_F32,
    ];

    fn kernel(jobs: &[Self]) -> Kernel {
        let kind = |job: &Self| {
            Some(match (job.path, job.source_code) {
                (path::RING, _) => return job.ring(),
                (path::TRANSPOSED, code::BF16) => TRANSPOSED_BF16,
                (path::TRANSPOSED, _) if job.is_e8m0_fp4() => E8M0_FP4_F32,
                (path::TRANSPOSED, _) => TRANSPOSED_F32,
                (path::MIXED, code::BF16) => MIXED_BF16,
                (path::MIXED, _) => MIXED_F32,
                (path::BLOCKS, code::BF16) => BLOCKS_BF16,
                (path::BLOCKS, _) => BLOCKS_F32,
                (path::STREAM, code::BF16) => STREAM_BF16,
                (path::STREAM, _) => STREAM_F32,
                (path::WIDE, code::BF16) if job.pass[0].is_known_fp8() => WIDE_BF16,
                _ => return None,
            })
        };
        of_one_kind(jobs, kind).unwrap_or(ENCODE)
    }

    fn lay_out(&mut self) {
        let pitch = self.cols * bits(self.source_code) / 8;
        self.lay_out_with(aligned(self.source, pitch, 16));
    }

    fn lay_out_together(jobs: &mut [Self]) {
        let [first, ..] = *jobs else { return };
        let tiles = jobs.iter().map(Job::tiles).sum::<u64>();
        let streams = jobs
            .iter()
            .all(|job| job.streams() && job.source_code == first.source_code);
        // One scale and rows alone are faster in the order of memory.
        let known = |job: &Self| job.pass[0].ingredients.rule == rule::TENSOR;
        if !(streams && jobs.iter().all(known)) && Self::through_ring(jobs) {
            return;
        }
        if streams {
            jobs.iter_mut().for_each(|job| job.path = path::STREAM);
        } else if Self::kernel(jobs) == WIDE_BF16 && tiles >= MANY_TILES {
            jobs.iter_mut().for_each(Encode::enlarge);
        }
    }

    /// Where no pass has anything to fill, as in an empty matrix, one tile writes the tensor scale and
    /// consumes the amax, if there is either.
    fn tiles(&self) -> u64 {
        let writes = |outer: &Outer| outer.to != 0 || outer.ingredients.observed != 0;
        let least = u64::from(self.outer.iter().any(writes));
        if self.passes == 0 {
            return least;
        }
        let tiles = if self.path == path::STREAM {
            cdiv(self.rows * self.cols, STREAM_RUN)
        } else {
            cdiv(self.rows, u64::from(self.tile_rows)) * self.tiles_across
        };
        tiles.max(least)
    }
}

#[cfg(test)]
mod tests;

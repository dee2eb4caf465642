//! Decodes.

use lowp_format::Orientation;

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{
    DECODE_EIGHT_COLS, DECODE_LINES, DECODE_NIBBLES_COLS, DECODE_NIBBLES_ROWS, DECODE_SIDE,
    DECODE_WIDE_COLS, Decode, Ingredients, code, decode_path, extent, rule,
};
use super::ingredients::ingredients;
use super::job::{Job, Vector, aligned, bits, cdiv, sides, transposed};
use crate::{DecodeJob, Target};

const DECODE: Kernel = Kernel::new("lowp_decode");
const DECODE_BF16: Kernel = Kernel::new("lowp_decode_bf16");

pub(crate) fn job(job: &DecodeJob<Cuda>) -> Decode {
    let usage = job.data.spec.key.usage;
    let orientation = usage.orientations().next().unwrap_or(Orientation::Rowwise);
    let tensor = job.tensor_scale.as_ref().map_or(0, |t| t.pointer());
    let [block_rows, block_cols] = sides(job.kernel.block);
    let pitch = |target: &Target<Cuda>| target.spec.row_bytes(job.shape) as u64;
    let scale = job.block_scale.as_ref();
    let out = Vector::new(&job.out);
    Decode {
        data: job.data.bytes.pointer(),
        scale: scale.map_or(0, |scale| scale.bytes.pointer()),
        ingredients: ingredients(orientation, &job.kernel, tensor, false),
        out: out.pointer,
        out_code: out.code,
        rows: job.shape.rows as u64,
        cols: job.shape.cols as u64,
        data_pitch: pitch(&job.data),
        scale_pitch: scale.map_or(0, pitch),
        block_rows,
        block_cols,
        data_transposed: transposed(&job.data) as u8,
        scale_transposed: scale.map_or(0, |scale| transposed(scale) as u8),
        ..Decode::default()
    }
}

impl Decode {
    fn choose_path(&self) -> u8 {
        let Ingredients {
            element,
            rule,
            extent,
            ..
        } = self.ingredients;
        let known = match rule {
            rule::TENSOR | rule::E8M0_TE | rule::E8M0_FLOOR | rule::E8M0_EVEN => {
                matches!(element, code::E4M3 | code::E5M2 | code::E2M1)
            }
            rule::TWO_LEVEL | rule::FOUR_OVER_SIX => element == code::E2M1,
            rule::BLOCK_F32 => {
                matches!(element, code::E4M3 | code::E5M2)
                    && aligned(self.scale, self.scale_pitch, 4)
            }
            _ => false,
        };
        let [height, width] = [self.block_rows, self.block_cols];
        let whole = height == 0 && width == 0;
        let powers = whole || height.is_power_of_two() && width.is_power_of_two();
        if !known || !powers || self.vector == 0 {
            return decode_path::GENERIC;
        }
        let aligned = |bytes| aligned(self.data, self.data_pitch, bytes);
        if self.data_transposed != 0 {
            if aligned(16) && (whole || height >= 16) && extent != extent::ROWS {
                return decode_path::TRANSPOSED;
            }
        } else if self.has_eights() {
            return decode_path::EIGHT;
        } else if element == code::E2M1
            && rule != rule::TENSOR
            && extent == extent::TENSOR
            && width >= if self.out_code == code::BF16 { 8 } else { 4 }
            && aligned(4)
            && self.cols.is_multiple_of(8)
            && self.out.is_multiple_of(16)
        {
            return decode_path::NIBBLES;
        } else if aligned(bits(element) / 2) && (whole || width >= 4 || height >= 8) {
            return decode_path::WIDE;
        }
        decode_path::GENERIC
    }

    /// Whether lanes do eight columns each: blocks of powers of two hold them, or their eight rows.
    fn has_eights(&self) -> bool {
        let Ingredients { element, rule, .. } = self.ingredients;
        let [height, width] = [self.block_rows, self.block_cols];
        let powers = matches!(rule, rule::E8M0_TE | rule::E8M0_FLOOR | rule::E8M0_EVEN);
        let fp8 = matches!(element, code::E4M3 | code::E5M2);
        let entries = width == 1
            && height >= 8
            && self.scale_transposed == 0
            && aligned(self.scale, self.scale_pitch, 8);
        self.out_code == code::BF16
            && powers
            && fp8
            && (width >= 8 || entries)
            && aligned(self.data, self.data_pitch, 8)
            && aligned(self.out, 2 * self.cols, 16)
    }

    /// Rows and columns of a tile.
    fn tile(&self) -> [u64; 2] {
        let sides = match self.path {
            decode_path::WIDE => [DECODE_SIDE, DECODE_WIDE_COLS],
            decode_path::EIGHT => [DECODE_SIDE, DECODE_EIGHT_COLS],
            decode_path::NIBBLES => [DECODE_NIBBLES_ROWS, DECODE_NIBBLES_COLS],
            decode_path::TRANSPOSED => [DECODE_LINES; 2],
            _ => [DECODE_SIDE; 2],
        };
        sides.map(u64::from)
    }
}

impl Job for Decode {
    const KERNELS: &'static [Kernel] = &[DECODE, DECODE_BF16];

    fn kernel(jobs: &[Self]) -> Kernel {
        let narrow = |job: &Self| job.out_code == code::BF16;
        match !jobs.is_empty() && jobs.iter().all(narrow) {
            true => DECODE_BF16,
            false => DECODE,
        }
    }

    /// The kernel of f32 writes bfloat16 in its general path alone.
    fn lay_out_together(jobs: &mut [Self]) {
        if Self::kernel(jobs) == DECODE {
            for job in jobs.iter_mut().filter(|job| job.out_code == code::BF16) {
                job.path = decode_path::GENERIC;
                job.tiles_across = cdiv(job.cols, job.tile()[1]);
            }
        }
    }

    fn lay_out(&mut self) {
        let bytes = bits(self.out_code) / 8;
        self.vector = u8::from(aligned(self.out, self.cols * bytes, 4 * bytes));
        self.path = self.choose_path();
        self.tiles_across = cdiv(self.cols, self.tile()[1]);
    }

    fn tiles(&self) -> u64 {
        cdiv(self.rows, self.tile()[0]) * self.tiles_across
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_of_known_ingredients_are_tiled() {
        let path = |element, rule, [block_rows, block_cols]: [u32; 2], data_transposed| {
            let mut job = Decode {
                data: 256,
                out: 512,
                rows: 256,
                cols: 512,
                data_pitch: 256,
                block_rows,
                block_cols,
                ingredients: Ingredients {
                    element,
                    rule,
                    ..Ingredients::default()
                },
                data_transposed,
                out_code: code::F32,
                ..Decode::default()
            };
            job.lay_out();
            (job.path, job.tiles())
        };
        let wide = (decode_path::WIDE, 16);
        let transposed = (decode_path::TRANSPOSED, 8);
        let generic = (decode_path::GENERIC, 32);
        // Each rule for the elements that have it.
        for order in [0, 1] {
            let expected = [wide, transposed][usize::from(order)];
            for element in [code::E4M3, code::E5M2] {
                assert_eq!(path(element, rule::TENSOR, [0, 0], order), expected);
                assert_eq!(path(element, rule::E8M0_TE, [32, 32], order), expected);
                assert_eq!(path(element, rule::BLOCK_F32, [128, 128], order), expected);
                assert_eq!(path(element, rule::TWO_LEVEL, [16, 16], order), generic);
            }
            let nibbles = [(decode_path::NIBBLES, 16), transposed][usize::from(order)];
            assert_eq!(path(code::E2M1, rule::TWO_LEVEL, [16, 16], order), nibbles);
            assert_eq!(path(code::E2M1, rule::TENSOR, [0, 0], order), expected);
            assert_eq!(path(code::E2M1, rule::BLOCK_F32, [16, 16], order), generic);
            assert_eq!(path(code::BF16, rule::NONE, [0, 0], order), generic);
        }
        // A lane has one factor for its columns or for its rows, a warp of transposed codes one for its rows.
        for (blocks, order, expected) in [
            ([1, 4], 0, wide),
            ([8, 1], 0, wide),
            ([4, 2], 0, generic),
            ([24, 32], 0, generic),
            ([16, 1], 1, transposed),
            ([8, 8], 1, generic),
        ] {
            assert_eq!(path(code::E4M3, rule::E8M0_TE, blocks, order), expected);
        }
    }

    #[test]
    fn lanes_do_eight_columns_of_blocks_that_hold_them() {
        let path = |out, out_code, [block_rows, block_cols]: [u32; 2]| {
            let mut job = Decode {
                data: 256,
                scale: 1024,
                out,
                rows: 256,
                cols: 512,
                data_pitch: 512,
                scale_pitch: 512,
                block_rows,
                block_cols,
                ingredients: Ingredients {
                    element: code::E4M3,
                    rule: rule::E8M0_TE,
                    ..Ingredients::default()
                },
                out_code,
                ..Decode::default()
            };
            job.lay_out();
            job.path
        };
        for blocks in [[1, 32], [32, 1], [32, 32], [1, 8], [8, 1]] {
            assert_eq!(path(512, code::BF16, blocks), decode_path::EIGHT);
            assert_eq!(path(512, code::F32, blocks), decode_path::WIDE);
            assert_eq!(path(520, code::BF16, blocks), decode_path::WIDE);
        }
        assert_eq!(path(512, code::BF16, [1, 4]), decode_path::WIDE);
        assert_eq!(path(512, code::BF16, [4, 1]), decode_path::GENERIC);
    }

    #[test]
    fn decodes_to_two_dtypes_at_once_take_the_general_path_for_one() {
        let job = |out_code| {
            let mut job = Decode {
                data: 256,
                out: 512,
                rows: 256,
                cols: 512,
                data_pitch: 512,
                ingredients: Ingredients {
                    element: code::E4M3,
                    rule: rule::TENSOR,
                    ..Ingredients::default()
                },
                out_code,
                ..Decode::default()
            };
            job.lay_out();
            job
        };
        let paths = |codes: &[u8]| {
            let mut jobs: Vec<Decode> = codes.iter().map(|&code| job(code)).collect();
            Decode::lay_out_together(&mut jobs);
            let paths: Vec<_> = jobs.iter().map(|job| (job.path, job.tiles())).collect();
            (Decode::kernel(&jobs), paths)
        };
        let (wide, generic) = ((decode_path::WIDE, 16), (decode_path::GENERIC, 32));
        let (f32, bf16) = (code::F32, code::BF16);
        assert_eq!(paths(&[f32, f32]), (DECODE, vec![wide; 2]));
        assert_eq!(paths(&[bf16, bf16]), (DECODE_BF16, vec![wide; 2]));
        assert_eq!(paths(&[bf16, f32]), (DECODE, vec![generic, wide]));
    }
}

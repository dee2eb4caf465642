//! Paths and tiles of jobs.

use super::super::table::{Encode, UNIT_BLOCKS, code, path, rule, vector};
use super::*;

fn encode(rows: u64, cols: u64, blocks: &[[u32; 2]]) -> Encode {
    let mut job = Encode {
        source: 256,
        rows,
        cols,
        passes: blocks.len() as u8,
        source_code: code::F32,
        ..Encode::default()
    };
    for (pass, block) in job.pass.iter_mut().zip(blocks) {
        pass.ingredients.rule = match *block {
            [0, 0] => rule::TENSOR,
            _ => rule::E8M0_TE,
        };
        [pass.block_rows, pass.block_cols] = *block;
        pass.data[0] = 512;
    }
    job.lay_out();
    job
}

#[test]
fn known_blocks_are_tiled() {
    let job = encode(33, 512, &[[1, 32], [32, 1]]);
    assert_eq!((job.path, job.tiles()), (path::WIDE, 4));
    assert_eq!(job.vector, vector::SOURCE | vector::ROWS_0 | vector::ROWS_1);
    assert_eq!(
        encode(1, 10, &[[0, 0]]).vector & (vector::SOURCE | vector::ROWS_0),
        0
    );
}

#[test]
fn bf16_sources_have_a_kernel_of_their_own() {
    let f32 = encode(64, 256, &[[1, 32]]);
    let mut bf16 = Encode {
        source_code: code::BF16,
        ..f32
    };
    bf16.lay_out();
    assert_eq!(Encode::kernel(&[bf16, bf16]), Kernel::EncodeWideBf16);
    assert_eq!(Encode::kernel(&[bf16, f32]), Kernel::Encode);
    let mut generic = Encode {
        stochastic: 1,
        ..bf16
    };
    generic.lay_out();
    assert_eq!(Encode::kernel(&[bf16, generic]), Kernel::Encode);
}

#[test]
fn whole_tiles_of_bf16_go_through_a_ring() {
    let job = |rows, cols| {
        let mut job = Encode {
            source_code: code::BF16,
            ..encode(rows, cols, &[[32, 1]])
        };
        job.lay_out();
        job
    };
    let together = |mut jobs: Vec<Encode>| {
        Encode::lay_out_together(&mut jobs);
        (
            Encode::kernel(&jobs),
            jobs.iter().map(Job::tiles).sum::<u64>(),
        )
    };
    let ring = Kernel::EncodeRingE8m0Fp8;
    assert_eq!(together(vec![job(160, 768)]), (ring, 15));
    // Where there are many, four tiles of 256 columns are one.
    assert_eq!(together(vec![job(8192, 4096)]), (ring, 1024));
    assert_eq!(together(vec![job(8192, 4352)]), (ring, 256 * 5));
    for [rows, cols] in [[255, 768], [160, 800]] {
        assert_eq!(
            together(vec![job(rows, cols), job(160, 768)]).0,
            Kernel::EncodeWideBf16
        );
    }
    // Rows alone go on in the order of memory where their tiles are not whole.
    for (cols, expected) in [(768, ring), (800, Kernel::EncodeStreamBf16)] {
        let mut rows = job(160, cols);
        [rows.pass[0].block_rows, rows.pass[0].block_cols] = [1, 32];
        rows.pass[0].scale[0] = 1024;
        rows.lay_out();
        assert_eq!(together(vec![rows]).0, expected);
    }
    let mut even = job(160, 768);
    for pass in &mut even.pass {
        pass.ingredients.rule = rule::E8M0_EVEN;
    }
    assert_eq!(even.ring(), None);
    // Scales in the order of columns are not what it stores.
    let mut crossed = job(160, 768);
    assert_eq!(crossed.ring(), Some(ring));
    crossed.pass[0].scale[1] = 4096;
    assert_eq!(crossed.ring(), None);
}

#[test]
fn many_tiles_are_enlarged() {
    let bf16 = |rows| {
        let mut job = Encode {
            source_code: code::BF16,
            ..encode(rows, 4100, &[[1, 32], [32, 1]])
        };
        job.lay_out();
        job
    };
    let together = |mut jobs: Vec<Encode>| {
        Encode::lay_out_together(&mut jobs);
        jobs.iter().map(Job::tiles).collect::<Vec<_>>()
    };
    // 17 tiles of 256 columns are 5 of 1024.
    assert_eq!(together(vec![bf16(3200)]), [1700]);
    assert_eq!(together(vec![bf16(32_000), bf16(32)]), [5000, 5]);
    assert_eq!(
        together(vec![bf16(32_000), encode(32, 256, &[[1, 32]])]),
        [17_000, 1]
    );
}

#[test]
fn other_blocks_are_walked_in_whole_units() {
    for [height, width] in [
        [1, 128],
        [128, 128],
        [5, 3],
        [4096, 4096],
        [1, 1],
        [4095, 4093],
    ] {
        let job = encode(1000, 1000, &[[height, width], [width, height]]);
        assert_eq!(job.path, path::GENERIC);
        for pass in &job.pass {
            let [rows, cols] = [pass.unit_rows, pass.unit_cols];
            assert!(rows % 2 == 0 && cols % 2 == 0);
            assert!(rows % pass.block_rows == 0 && cols % pass.block_cols == 0);
            let blocks = (rows / pass.block_rows) * (cols / pass.block_cols);
            assert!(blocks <= UNIT_BLOCKS, "{height}x{width}: {blocks}");
            assert!(job.tile_rows.is_multiple_of(rows) && job.tile_cols.is_multiple_of(cols));
        }
    }
}

#[test]
fn a_table_has_every_tile_of_every_job() {
    let jobs = [
        encode(64, 256, &[[1, 32]]),
        encode(0, 256, &[[1, 32]]),
        encode(1, 257, &[[0, 0]]),
    ];
    let tiles = tile_table(&jobs).expect("few tiles");
    let found: Vec<_> = tiles.iter().map(|tile| (tile.job, tile.index)).collect();
    assert_eq!(found, [(0, 0), (0, 1), (2, 0), (2, 1)]);
}

#[test]
fn more_than_two_billion_elements_are_counted() {
    let job = encode(1 << 20, 1 << 14, &[[1, 32], [32, 1]]);
    assert_eq!(job.tiles(), (1 << 15) * (1 << 6));
}

#[test]
fn vectors_are_cut_into_runs() {
    let job = |from, into, len| {
        let mut job = Sum {
            from,
            into,
            len,
            ..Sum::default()
        };
        job.lay_out();
        (job.vector, job.tiles())
    };
    assert_eq!(job(256, 512, 0), (1, 0));
    assert_eq!(job(256, 512, SUM_TILE), (1, 1));
    assert_eq!(job(256, 520, SUM_TILE + 1), (0, 2));
    assert_eq!(job(258, 512, 1), (0, 1));
}

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
    assert_eq!(paths(&[f32, f32]), (Kernel::Decode, vec![wide; 2]));
    assert_eq!(paths(&[bf16, bf16]), (Kernel::DecodeBf16, vec![wide; 2]));
    assert_eq!(paths(&[bf16, f32]), (Kernel::Decode, vec![generic, wide]));
}

#[test]
fn transposes_are_cut_into_bytes() {
    let tiles = |from, bits, outer, inner| {
        let mut job = Transpose {
            from,
            to: 512,
            outer,
            inner,
            bits,
            ..Transpose::default()
        };
        job.lay_out();
        (job.vector, job.tiles())
    };
    assert_eq!(tiles(256, 8, 256, 512), (1, 4));
    assert_eq!(tiles(256, 4, 256, 512), (1, 2));
    assert_eq!(tiles(256, 4, 160, 544), (1, 4));
    assert_eq!(tiles(264, 8, 256, 512), (0, 32));
    assert_eq!(tiles(256, 16, 256, 512), (0, 32));
}

#[test]
fn shared_scales_are_swizzled_in_larger_tiles() {
    let tiles = |tile| {
        let mut job = Repack {
            from: 256,
            to: 512,
            bits: 8,
            ..Repack::default()
        };
        job.from_layout.tile = tile;
        job.from_layout.padded = [16, 512];
        job.to_layout.tile = [1, 16];
        job.to_layout.padded = [256, 512];
        job.to_layout.swizzled = 1;
        job.lay_out();
        (job.path, job.tiles())
    };
    assert_eq!(tiles([1, 16]), (repack_path::SWIZZLE, 8));
    assert_eq!(tiles([16, 16]), (repack_path::SWIZZLE_SPREAD, 4));
    assert_eq!(tiles([16, 32]), (repack_path::GENERIC, 32));
}

//! Paths and tiles of encodes.

use super::super::encode_ring;
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
    assert_eq!(Encode::kernel(&[bf16, bf16]), WIDE_BF16);
    assert_eq!(Encode::kernel(&[bf16, f32]), ENCODE);
    let mut generic = Encode {
        stochastic: 1,
        ..bf16
    };
    generic.lay_out();
    assert_eq!(Encode::kernel(&[bf16, generic]), ENCODE);
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
    let ring = encode_ring::E8M0_FP8;
    assert_eq!(together(vec![job(160, 768)]), (ring, 15));
    // Where there are many, four tiles of 256 columns are one.
    assert_eq!(together(vec![job(8192, 4096)]), (ring, 1024));
    assert_eq!(together(vec![job(8192, 4352)]), (ring, 256 * 5));
    for [rows, cols] in [[255, 768], [160, 800]] {
        assert_eq!(together(vec![job(rows, cols), job(160, 768)]).0, WIDE_BF16);
    }
    // Rows alone go on in the order of memory where their tiles are not whole.
    for (cols, expected) in [(768, ring), (800, STREAM_BF16)] {
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
fn whole_blocks_of_128_of_bf16_go_through_a_ring() {
    let job = |rows, cols, scale: [u64; 2]| {
        let mut job = Encode {
            source_code: code::BF16,
            ..encode(rows, cols, &[[1, 128], [128, 1]])
        };
        for (order, pass) in job.pass.iter_mut().enumerate() {
            pass.ingredients.rule = rule::BLOCK_F32;
            pass.data = [0, 0];
            pass.data[order] = 512;
            pass.scale[scale[order] as usize] = 1024;
        }
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
    let ring = encode_ring::BLOCKS;
    assert_eq!(together(vec![job(256, 640, [1, 0])]), (ring, 10));
    // Where there are many, two tiles of 128 columns are one.
    assert_eq!(together(vec![job(8192, 4224, [1, 0])]), (ring, 64 * 17));
    for [rows, cols] in [[255, 640], [256, 704]] {
        let jobs = vec![job(rows, cols, [1, 0]), job(256, 640, [1, 0])];
        assert_eq!(together(jobs).0, BLOCKS_BF16);
    }
    // Scales of neighbouring lines that are apart are not what it stores.
    for scale in [[0, 0], [1, 1]] {
        assert_eq!(job(256, 640, scale).ring(), None);
    }
}

#[test]
fn some_of_binary32_go_through_a_ring() {
    let job = |made: [(u8, u8); 2]| {
        let mut job = encode(256, 640, &[[1, 32], [32, 1]]);
        for (pass, (element, rule)) in job.pass.iter_mut().zip(made) {
            [pass.ingredients.element, pass.ingredients.rule] = [element, rule];
        }
        job.lay_out();
        job
    };
    let [fp4, fp8] = [code::E2M1, code::E4M3].map(|element| (element, rule::E8M0_TE));
    let hybrid = job([fp4, fp8]);
    assert!(hybrid.ring().is_some());
    let rounded = Encode {
        via_bf16: 1,
        ..hybrid
    };
    assert_eq!(rounded.ring(), None);
    // Tiles of MXFP8 are 256 columns wide.
    assert_eq!(job([fp8, fp8]).ring(), None);
    assert!(encode(96, 768, &[[1, 32], [32, 1]]).ring().is_some());
    assert_eq!(encode(96, 768, &[[1, 32]]).ring(), None);
    // Scales of lines, but not one of the tensor.
    let mut lines = encode(256, 640, &[[0, 0]]);
    assert_eq!(lines.ring(), None);
    lines.pass[0].ingredients.extent = extent::ROWS;
    assert!(lines.ring().is_some());
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
fn more_than_two_billion_elements_are_counted() {
    let job = encode(1 << 20, 1 << 14, &[[1, 32], [32, 1]]);
    assert_eq!(job.tiles(), (1 << 15) * (1 << 6));
}

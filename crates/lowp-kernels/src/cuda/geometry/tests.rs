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

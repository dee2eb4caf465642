//! Checkpoints that are compared, whatever pieces ranks saved.

use lowp_checkpoint::{Block, Dtype, Piece, Saver};
use lowp_comm::threads;
use lowp_file::checkpoint::verify;
use serde_json::json;
use std::path::Path;
use std::thread;
use std::time::Duration;

const FULL: [usize; 2] = [6, 8];

/// Saves a tensor of [`FULL`] with these bytes, in a block of each rank.
fn save(folder: &Path, bytes: &[u8], blocks: &[Block]) {
    let of = |block: Block| {
        let rows = block.start[0]..block.start[0] + block.shape[0];
        let cols = block.start[1]..block.start[1] + block.shape[1];
        let row = |row: usize| &bytes[row * FULL[1]..][cols.clone()];
        rows.flat_map(row).copied().collect::<Vec<u8>>()
    };
    thread::scope(|scope| {
        let controls = threads(blocks.len(), Duration::from_secs(60));
        for (&block, control) in blocks.iter().zip(controls) {
            let piece = Piece {
                name: "w".to_owned(),
                dtype: Dtype::U8,
                full: FULL,
                block,
                bytes: of(block),
            };
            scope.spawn(move || {
                let mut saver = Saver::new(control, folder, None).expect("a folder");
                saver.start(1, vec![piece], json!({})).expect("a start");
                saver.finish().expect("a checkpoint");
            });
        }
    });
}

/// The first byte that differs is the first of the tensor, not of a piece.
#[test]
fn the_first_difference_is_that_of_the_tensor() {
    let block = |start, shape| Block { start, shape };
    let columns = [block([0, 0], [6, 3]), block([0, 3], [6, 5])];
    let rows = [block([0, 0], [4, 8]), block([4, 0], [2, 8])];
    let whole = [Block::whole(FULL)];
    let bytes: Vec<u8> = (0..48).collect();
    let mut others = bytes.clone();
    // In the first of two columns' blocks, and in the second in an earlier row.
    others[5 * 8 + 1] = 0xAA;
    others[2 * 8 + 6] = 0xBB;
    let folder = tempfile::tempdir().expect("a folder");
    let mut saved = 0;
    let mut saved_as = |bytes: &[u8], blocks: &[Block]| {
        saved += 1;
        let at = folder.path().join(saved.to_string());
        save(&at, bytes, blocks);
        at
    };
    let all: [&[Block]; 3] = [&columns, &rows, &whole];
    for (of_a, of_b) in all.iter().flat_map(|a| all.iter().map(move |b| (a, b))) {
        let [a, b] = [saved_as(&bytes, of_a), saved_as(&bytes, of_b)];
        let equal = verify(&a, &b).expect("the same bytes");
        assert_eq!((equal.tensors, equal.bytes), (1, 48));
        let other = saved_as(&others, of_b);
        let error = verify(&a, &other).expect_err("other bytes").to_string();
        let expected = "'w' differs first in row 2, column 6: byte 22 is 0x16 in ";
        assert!(error.starts_with(expected), "{error}");
        assert!(error.contains(" and 0xBB in "), "{error}");
    }
}

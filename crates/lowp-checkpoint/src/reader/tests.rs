//! Tensors that are cut in any way and dealt to ranks in any order, with chunks of a few bytes; and which files are opened for what.

use std::path::Path;
use std::thread;
use std::time::Duration;

use lowp_comm::threads;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::index::CHUNK;
use crate::{Piece, Saver, folder_of};

fn value(name: &str, at: usize) -> u8 {
    ((at + name.len()).wrapping_mul(0x9e37_79b1) >> 13) as u8
}

/// The bytes of `block` of tensor `name` of shape `full`.
fn bytes(name: &str, full: [usize; 2], block: Block) -> Vec<u8> {
    let rows = block.start[0]..block.start[0] + block.shape[0];
    let cols = block.start[1]..block.start[1] + block.shape[1];
    rows.flat_map(|row| cols.clone().map(move |col| row * full[1] + col))
        .map(|at| value(name, at))
        .collect()
}

fn piece(name: &str, full: [usize; 2], block: Block) -> Piece {
    Piece {
        name: name.to_owned(),
        dtype: Dtype::U8,
        full,
        block,
        bytes: bytes(name, full, block),
    }
}

/// Saves the pieces of each rank as step 1.
fn save(folder: &Path, ranks: &[Vec<Piece>]) -> Checkpoint {
    thread::scope(|scope| {
        let controls = threads(ranks.len(), Duration::from_secs(60));
        for (pieces, control) in ranks.iter().zip(controls) {
            scope.spawn(move || {
                let mut saver = Saver::new(control, folder, None).expect("a folder");
                let started = saver.start(1, pieces.clone(), json!({}));
                started.and_then(|()| saver.finish()).expect("a checkpoint");
            });
        }
    });
    Checkpoint::open(&folder_of(folder, 1)).expect("a checkpoint")
}

/// The cells between `cuts` of each axis.
fn cells([rows, cols]: [Vec<usize>; 2]) -> Vec<Block> {
    let cell = |rows: &[usize], cols: &[usize]| Block {
        start: [rows[0], cols[0]],
        shape: [rows[1] - rows[0], cols[1] - cols[0]],
    };
    let rows = rows.windows(2);
    rows.flat_map(|rows| cols.windows(2).map(move |cols| cell(rows, cols)))
        .collect()
}

fn cuts(most: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..=most, 1..5).prop_map(move |mut cuts| {
        cuts.extend([0, most]);
        cuts.sort_unstable();
        cuts
    })
}

/// Every value of bf16, among pieces of two ranks, is that f32.
#[test]
fn bf16_is_widened() {
    let folder = tempfile::tempdir().expect("a folder");
    let full = [1, 1 << 16];
    let half = |rank: usize| Piece {
        name: "t".to_owned(),
        dtype: Dtype::Bf16,
        full,
        block: Block::of_row(rank << 15, 1 << 15),
        bytes: (0..1u32 << 15)
            .flat_map(|i| ((rank << 15) as u16 | i as u16).to_le_bytes())
            .collect(),
    };
    let checkpoint = save(folder.path(), &[vec![half(0)], vec![half(1)]]);
    let values = checkpoint.read_f32("t", full, Block::whole(full));
    let bits: Vec<u32> = values
        .expect("values")
        .into_iter()
        .map(f32::to_bits)
        .collect();
    let expected: Vec<u32> = (0..1 << 16).map(|i| i << 16).collect();
    assert_eq!(bits, expected);
    let part = checkpoint.read_elements("t", [256, 256], 300..600);
    let bits: Vec<u32> = part
        .expect("values")
        .into_iter()
        .map(f32::to_bits)
        .collect();
    assert_eq!(bits, expected[300..600]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A rank may have several pieces of a tensor, or none.
    #[test]
    fn dealt_pieces_are_put_together(
        ranks in 1usize..=5,
        cut in prop::array::uniform3((cuts(13), cuts(40))),
        deal in prop::collection::vec(0usize..5, 36),
        blocks in prop::collection::vec((0usize..3, 0usize..=13, 0usize..=40, 0usize..=13, 0usize..=40), 1..12),
    ) {
        let full = [13, 40];
        let names = ["a", "bb", "ccc"];
        let mut pieces = vec![Vec::new(); ranks];
        for (name, (rows, cols)) in names.iter().zip(&cut) {
            for (block, rank) in cells([rows.clone(), cols.clone()]).into_iter().zip(deal.iter().cycle()) {
                pieces[rank % ranks].push(piece(name, full, block));
            }
        }
        let folder = tempfile::tempdir().expect("a folder");
        let checkpoint = save(folder.path(), &pieces);
        checkpoint.verify().expect("it is whole");
        for (name, row, col, rows, cols) in blocks {
            let shape = [rows.min(full[0] - row), cols.min(full[1] - col)];
            let block = Block { start: [row, col], shape };
            let read = checkpoint.read(names[name], Dtype::U8, full, block).expect("a block");
            prop_assert_eq!(read, bytes(names[name], full, block));
        }
    }
}

/// Ranks that resume as many as saved open their own file, that of the first for what all have, and no other; half as many open two.
#[test]
fn few_files_are_opened() {
    let (ranks, tensors) = (40, 30);
    let full = |tensor: usize| [1, ranks * (3 + tensor)];
    let share = |tensor: usize, rank: usize, ranks: usize| {
        let each = full(tensor)[1] / ranks;
        Block::of_row(rank * each, each)
    };
    let of_rank = |rank: usize| {
        let own = (0..tensors).map(|t| piece(&format!("t{t}"), full(t), share(t, rank, ranks)));
        let whole = (rank == 0).then(|| piece("counts", [1, 16], Block::whole([1, 16])));
        own.chain(whole).collect::<Vec<_>>()
    };
    let folder = tempfile::tempdir().expect("a folder");
    let pieces: Vec<_> = (0..ranks).map(of_rank).collect();
    drop(save(folder.path(), &pieces));
    for (now, most) in [(ranks, 2), (ranks / 2, 3), (5, 9), (4 * ranks, 2)] {
        for rank in [0, 1, now / 2, now - 1] {
            let checkpoint = Checkpoint::open(&folder_of(folder.path(), 1)).expect("a checkpoint");
            assert_eq!(checkpoint.reads().opens, 0);
            for tensor in 0..tensors {
                let (name, full) = (format!("t{tensor}"), full(tensor));
                // Cuts that do not go up.
                let entries = full[1];
                let block = Block::of_row(rank * entries / now, entries / now);
                let read = checkpoint.read(&name, Dtype::U8, full, block);
                assert_eq!(read.expect("a block"), bytes(&name, full, block));
            }
            let counts = Block::whole([1, 16]);
            let read = checkpoint.read("counts", Dtype::U8, [1, 16], counts);
            assert_eq!(read.expect("a block"), bytes("counts", [1, 16], counts));
            let opens = checkpoint.reads().opens;
            assert!(
                opens <= most,
                "{now} ranks: rank {rank} opened {opens} files"
            );
        }
    }
    // A file that nobody needs may be gone, which is found by those who look for it.
    std::fs::remove_file(folder_of(folder.path(), 1).join(file_name(7))).expect("a file");
    let checkpoint = Checkpoint::open(&folder_of(folder.path(), 1)).expect("a checkpoint");
    let read = |rank| checkpoint.read("t3", Dtype::U8, full(3), share(3, rank, ranks));
    read(6).expect("a block");
    for error in [read(7).map(drop), checkpoint.check_files()] {
        let error = error.expect_err("no file").to_string();
        assert!(
            error.contains("rank-00007.safetensors: cannot open"),
            "{error}"
        );
    }
}

/// More files than are kept open are opened again.
#[test]
fn many_files_are_opened_and_read() {
    let ranks = 20;
    let of_rank = |rank| {
        vec![piece(
            "t",
            [ranks, 8],
            Block {
                start: [rank, 0],
                shape: [1, 8],
            },
        )]
    };
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = save(folder.path(), &(0..ranks).map(of_rank).collect::<Vec<_>>());
    for _ in 0..2 {
        let read = checkpoint.read("t", Dtype::U8, [ranks, 8], Block::whole([ranks, 8]));
        assert_eq!(
            read.expect("all"),
            bytes("t", [ranks, 8], Block::whole([ranks, 8]))
        );
    }
}

/// Who needs a part of a piece reads the chunks that it lies in: damage elsewhere is not seen.
#[test]
fn a_part_is_read_by_chunks() {
    let full = [1, 10 * CHUNK + 3];
    let folder = tempfile::tempdir().expect("a folder");
    drop(save(
        folder.path(),
        &[vec![piece("t", full, Block::whole(full))]],
    ));
    let step = folder_of(folder.path(), 1);
    let path = step.join(file_name(0));
    let mut file = std::fs::read(&path).expect("a file");
    let data = file.len() - full[1];
    file[data + 5 * CHUNK + 1] ^= 4;
    std::fs::write(&path, file).expect("a file");
    let checkpoint = Checkpoint::open(&step).expect("a checkpoint");
    let damaged = 5 * CHUNK..6 * CHUNK;
    for (start, end) in [
        (0, 1),
        (CHUNK - 1, CHUNK + 1),
        (3 * CHUNK, 5 * CHUNK),
        (4 * CHUNK, 5 * CHUNK + 1),
        (6 * CHUNK - 1, 7 * CHUNK),
        (6 * CHUNK, full[1]),
        (7 * CHUNK + 3, 7 * CHUNK + 4),
        (0, full[1]),
    ] {
        let block = Block::of_row(start, end - start);
        let read = checkpoint.read("t", Dtype::U8, full, block);
        match start < damaged.end && damaged.start < end {
            true => {
                let error = read.expect_err("damage").to_string();
                assert!(error.contains("the checksum of tensor 't'"), "{error}");
            }
            false => assert_eq!(read.expect("a block"), bytes("t", full, block)),
        }
    }
    checkpoint.verify().expect_err("damage");
}

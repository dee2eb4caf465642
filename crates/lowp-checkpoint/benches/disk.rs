//! Saving and loading a checkpoint, next to a plain copy of the same bytes that waits for the disk.
//!
//! `cargo bench -p lowp-checkpoint`. Medians of six; each ratio is that of times in the same round.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use lowp_checkpoint::{Block, Checkpoint, Dtype, Piece, Saver, folder_of};
use lowp_comm::threads;

/// Bytes of a tensor; sixteen are saved.
const TENSOR: usize = 32 << 20;
const TENSORS: usize = 16;

fn main() {
    // `cargo test --benches` only asks whether it runs.
    let (tensor, rounds) = match std::env::args().any(|arg| arg == "--bench") {
        true => (TENSOR, 6),
        false => (TENSOR >> 10, 1),
    };
    let folder = std::env::temp_dir().join(format!("lowp-disk-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let bytes: Vec<u8> = (0..tensor)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let names: Vec<String> = (0..TENSORS)
        .map(|number| format!("tensor{number:02}"))
        .collect();
    let shape = [1024, tensor / 1024];
    let (mut saves, mut loads) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        // Each begins half of the rounds: a disk that was busy is slow for a while.
        let plain = || copy(&folder, &bytes);
        let saved = || checkpoint(&folder, &bytes, &names, shape);
        let ((copy, read), (save, load)) = if round % 2 == 0 {
            let plain = plain();
            (plain, saved())
        } else {
            let saved = saved();
            (plain(), saved)
        };
        println!(
            "round {round}: copy {copy:.2?}, save {save:.2?}; read {read:.2?}, load {load:.2?}"
        );
        saves.push(copy.as_secs_f64() / save.as_secs_f64());
        loads.push(read.as_secs_f64() / load.as_secs_f64());
    }
    fs::remove_dir_all(&folder).expect("the folder");
    println!(
        "{} MiB: save {:.2} of a copy with fsync, load {:.2} of a read",
        (TENSORS * tensor) >> 20,
        median(&mut saves),
        median(&mut loads)
    );
}

/// The time to write all bytes to a file on the disk, and to read them into memory. It lies in a folder of its own, as a checkpoint does:
/// file systems put the files of new folders elsewhere, and blocks that a virtual disk never had take several times as long.
fn copy(folder: &Path, bytes: &[u8]) -> (Duration, Duration) {
    let folder = &folder.join("plain");
    fs::create_dir(folder).expect("a folder");
    let path = folder.join("copy");
    let begun = Instant::now();
    let mut file = File::create(&path).expect("a file");
    for _ in 0..TENSORS {
        file.write_all(bytes).expect("room");
    }
    file.sync_all().expect("a disk");
    let written = begun.elapsed();
    let begun = Instant::now();
    let mut file = File::open(&path).expect("the file");
    for _ in 0..TENSORS {
        let mut tensor = vec![0; bytes.len()];
        file.read_exact(&mut tensor).expect("the bytes");
        std::hint::black_box(&tensor);
    }
    let read = begun.elapsed();
    fs::remove_dir_all(folder).expect("the folder");
    (written, read)
}

/// The time to save all bytes and to load them.
fn checkpoint(
    folder: &Path,
    bytes: &[u8],
    names: &[String],
    shape: [usize; 2],
) -> (Duration, Duration) {
    let piece = |name: &String| Piece {
        name: name.clone(),
        dtype: Dtype::U8,
        full: shape,
        block: Block::whole(shape),
        bytes: bytes.to_vec(),
    };
    let pieces = names.iter().map(piece).collect();
    let folder = &folder.join("checkpoint");
    let control = threads(1, Duration::from_secs(60)).swap_remove(0);
    let begun = Instant::now();
    let mut saver = Saver::new(control, folder, None).expect("a folder");
    saver
        .start(1, pieces, serde_json::Value::Null)
        .expect("a start");
    saver.finish().expect("a checkpoint");
    let saved = begun.elapsed();
    let begun = Instant::now();
    let checkpoint = Checkpoint::open(&folder_of(folder, 1)).expect("a checkpoint");
    for name in names {
        let read = checkpoint.read(name, Dtype::U8, shape, Block::whole(shape));
        std::hint::black_box(&read.expect("a tensor"));
    }
    let loaded = begun.elapsed();
    fs::remove_dir_all(folder).expect("the folder");
    (saved, loaded)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

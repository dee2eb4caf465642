//! One bit of a small file, or something else in its place: a run goes on from the checkpoint before.

use std::fs;
use std::path::Path;

use lowp_checkpoint::{Block, Checkpoint, Dtype, Piece, Saver, folder_of, steps};
use lowp_comm::threads;
use serde_json::json;

use crate::laws::PATIENCE;

/// Saves `steps` as the only rank.
fn save(folder: &Path, steps: &[u64], keep: Option<usize>) {
    let control = threads(1, PATIENCE).swap_remove(0);
    let mut saver = Saver::new(control, folder, keep).expect("a saver");
    for &step in steps {
        let full = [1, 3];
        let piece = Piece {
            name: "x".to_owned(),
            dtype: Dtype::U8,
            full,
            block: Block::whole(full),
            bytes: vec![1, 2, 3],
        };
        saver
            .start(step, vec![piece], json!(null))
            .expect("a start");
        saver.finish().expect("a checkpoint");
    }
}

/// The step of the newest whole checkpoint, and how many are left out.
type Newest = Result<(u64, usize), String>;

fn newest(folder: &Path) -> Newest {
    let found = Checkpoint::newest_whole(folder, u64::MAX);
    let found = found.map_err(|error| error.to_string());
    found.map(|(checkpoint, damaged)| (checkpoint.step(), damaged.len()))
}

/// The newest whole checkpoint for each bit of a sample of `file` that is flipped.
fn flipped(path: &Path, file: &Path) -> Vec<(usize, Newest)> {
    let whole = fs::read(file).expect("a file");
    // Every bit of a byte in some byte.
    let bits = (0..8 * whole.len()).step_by(13);
    let found = bits.map(|bit| {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        fs::write(file, flipped).expect("a file");
        (bit, newest(path))
    });
    let found = found.collect();
    fs::write(file, whole).expect("a file");
    found
}

/// Whatever the bit, the checkpoint is left out.
#[test]
fn a_flipped_bit_of_an_index_costs_its_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    save(path, &[1, 2], None);
    let index = folder_of(path, 2).join("index.json");
    let text = fs::read_to_string(&index).expect("a file");
    let end = 8 * (text.len() - 1);
    for (bit, found) in flipped(path, &index) {
        // The line may end in any space.
        let space = bit >= end && found == Ok((2, 0));
        assert!(found == Ok((1, 1)) || space, "bit {bit}: {found:?}");
    }
    // The digit of the version, in every bit.
    let digit = text.find(':').expect("a field") + 1;
    assert!(text.starts_with("{\"version\":2,"), "{text}");
    for bit in 0..8 {
        let mut bytes = text.clone().into_bytes();
        bytes[digit] ^= 1 << bit;
        fs::write(&index, bytes).expect("a file");
        assert_eq!(newest(path), Ok((1, 1)), "bit {bit}");
    }
    // A later version is no damage.
    let later = text.replace("\"version\":2", "\"version\":3");
    fs::write(&index, later.replace("\"kinds\"", "\"forms\"")).expect("a file");
    let error = newest(path).expect_err("another version");
    assert!(error.contains("version 3"), "{error}");
}

/// The name of another checkpoint is no damage.
#[test]
fn a_flipped_bit_of_latest_costs_no_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    save(path, &[1, 2], None);
    for (bit, found) in flipped(path, &path.join("latest")) {
        assert!(matches!(found, Ok((2, 0 | 1))), "bit {bit}: {found:?}");
    }
    assert_eq!(newest(path), Ok((2, 0)));
}

/// A run that goes on from the checkpoint before saves the damaged one again.
#[test]
fn a_damaged_checkpoint_is_saved_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    save(path, &[1, 2, 3, 4], None);
    let index = |step| folder_of(path, step).join("index.json");
    fs::remove_file(index(2)).expect("a file");
    fs::remove_file(index(3)).expect("a file");
    fs::create_dir(index(3)).expect("a folder");
    fs::write(index(4), "").expect("a file");
    assert_eq!(newest(path), Ok((1, 2)));
    save(path, &[2, 3, 4], None);
    assert_eq!(newest(path), Ok((4, 0)));
    for step in 1..=4 {
        let checkpoint = Checkpoint::of_step(path, step).expect("a checkpoint");
        checkpoint.check_files().expect("its files");
    }
    assert_eq!(steps(path).expect("a folder"), [1, 2, 3, 4]);
}

/// A pipe without a writer would be read forever.
#[cfg(unix)]
#[test]
fn an_index_that_is_no_file_is_damage() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    save(path, &[1, 2], None);
    let index = folder_of(path, 2).join("index.json");
    fs::remove_file(&index).expect("a file");
    let made = std::process::Command::new("mkfifo").arg(&index).status();
    assert!(made.expect("mkfifo runs").success());
    assert_eq!(newest(path), Ok((1, 1)));
    let error = Checkpoint::latest(path).expect_err("a pipe").to_string();
    assert!(error.contains("it is no file"), "{error}");
}

/// A run that is killed while it removes a checkpoint leaves none of it to later runs, whatever program began to remove it.
#[test]
fn what_is_left_of_a_removal_is_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    save(path, &[1, 2, 3, 4], None);
    fs::remove_file(folder_of(path, 1).join("index.json")).expect("a file");
    for file in ["index.json", "rank-00000.safetensors"] {
        fs::remove_file(folder_of(path, 2).join(file)).expect("a file");
    }
    fs::rename(
        folder_of(path, 3),
        path.join(".step-00000003.removed.unfinished"),
    )
    .expect("a folder");
    let other = folder_of(path, 0);
    fs::create_dir(&other).expect("a folder");
    fs::write(other.join("notes"), "").expect("a file");
    save(path, &[5], Some(2));
    assert_eq!(steps(path).expect("a folder"), [0, 4, 5]);
    let hidden = fs::read_dir(path).expect("a folder").filter_map(|entry| {
        let name = entry.expect("an entry").file_name().into_string();
        name.ok().filter(|name| name.starts_with(".step"))
    });
    assert_eq!(hidden.collect::<Vec<_>>(), [""; 0]);
    // Fewer than are kept: nothing is removed.
    fs::remove_file(folder_of(path, 4).join("index.json")).expect("a file");
    save(path, &[6], Some(3));
    assert_eq!(steps(path).expect("a folder"), [0, 4, 5, 6]);
}

/// Also where it is seen late: a file that was removed after the checkpoint was opened.
#[test]
fn a_missing_file_is_damage() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    save(path, &[1], None);
    let checkpoint = Checkpoint::latest(path).expect("a checkpoint");
    checkpoint.check_files().expect("its files");
    fs::remove_file(folder_of(path, 1).join("rank-00000.safetensors")).expect("a file");
    let error = checkpoint.verify_part(0, 1).expect_err("no file");
    assert!(error.is_damage(), "{error}");
}

/// A checkpoint that lacks a file is none of those that are kept.
#[test]
fn as_many_whole_ones_are_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    save(path, &[1, 2, 3], None);
    fs::remove_file(folder_of(path, 3).join("rank-00000.safetensors")).expect("a file");
    save(path, &[4], Some(2));
    assert_eq!(steps(path).expect("a folder"), [2, 3, 4]);
    assert_eq!(newest(path), Ok((4, 0)));
    // It goes with those that are as old.
    save(path, &[5, 6], Some(2));
    assert_eq!(steps(path).expect("a folder"), [5, 6]);
}

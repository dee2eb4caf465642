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

/// The newest whole checkpoint, and how many are left out.
fn newest(folder: &Path) -> Result<(u64, usize), String> {
    let found = Checkpoint::newest_whole(folder, u64::MAX);
    let found = found.map_err(|error| error.to_string());
    found.map(|(checkpoint, damaged)| (checkpoint.step(), damaged.len()))
}

/// A bit of the index or of `latest`.
#[test]
fn a_flipped_bit_costs_one_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    save(path, &[1, 2], None);
    for file in [folder_of(path, 2).join("index.json"), path.join("latest")] {
        let whole = fs::read(&file).expect("a file");
        // Every bit of a byte in some byte.
        for bit in (0..8 * whole.len()).step_by(13) {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            fs::write(&file, flipped).expect("a file");
            match newest(path) {
                // Space for space, or the name of the checkpoint before, is no damage.
                Ok(found) => assert!(
                    [(2, 0), (2, 1), (1, 0), (1, 1)].contains(&found),
                    "{found:?}"
                ),
                // A version is told apart from damage.
                Err(why) => assert!(why.contains("version"), "bit {bit} of {file:?}: {why}"),
            }
        }
        fs::write(&file, whole).expect("a file");
    }
    assert_eq!(newest(path), Ok((2, 0)));
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

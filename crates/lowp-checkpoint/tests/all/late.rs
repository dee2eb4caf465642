//! Bytes that are on their way when a checkpoint begins.

use lowp_checkpoint::{Block, Checkpoint, Dtype, Late, Piece, Saver, steps};
use lowp_comm::{Control, threads};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

fn saver(folder: &Path) -> Saver {
    let control = threads(1, Duration::from_secs(60)).swap_remove(0);
    Saver::new(control, folder, None).expect("a saver")
}

fn piece(name: &str, bytes: impl Into<Late>) -> Piece<Late> {
    let bytes = bytes.into();
    let full = [1, bytes.len()];
    Piece {
        name: name.to_owned(),
        dtype: Dtype::U8,
        full,
        block: Block::whole(full),
        bytes,
    }
}

/// The names of unfinished checkpoints in `folder`.
fn unfinished(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).expect("a folder").flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(".unfinished")).collect()
}

/// Training goes on until they are there, and they are waited for in the order of the file, one after the other.
#[test]
fn the_writer_waits_for_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut saver = saver(folder.path());
    let (send, arrive) = channel::<Vec<u8>>();
    let (taken, takes) = channel();
    let late = Late::new(3, move || {
        taken.send("a").expect("a test");
        arrive.recv().map_err(|error| error.to_string())
    });
    let pieces = vec![piece("a", late), piece("b", vec![7; 5])];
    saver.start(1, pieces, json!({})).expect("a start");
    assert_eq!(takes.recv(), Ok("a"));
    for _ in 0..3 {
        assert_eq!(saver.poll().expect("a step"), None);
    }
    assert!(steps(folder.path()).expect("a folder").is_empty());
    send.send(vec![1, 2, 3]).expect("the writer waits");
    assert_eq!(saver.finish().expect("a checkpoint"), Some(1));
    let read = |name: &str, len: usize| {
        let whole = Block::whole([1, len]);
        let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
        checkpoint
            .read(name, Dtype::U8, [1, len], whole)
            .expect("bytes")
    };
    assert_eq!((read("a", 3), read("b", 5)), (vec![1, 2, 3], vec![7; 5]));
}

/// A device that fails, or gives something else, is an error of the step, and the checkpoint before stays.
#[test]
fn bytes_that_do_not_come_are_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut saver = saver(folder.path());
    saver
        .start(1, vec![piece("a", vec![1])], json!({}))
        .expect("a start");
    saver.finish().expect("a checkpoint");
    let failing = [
        (
            Late::new(4, || Err("the device is gone".to_owned())),
            "'a' cannot be read: the device is gone",
        ),
        (
            Late::new(4, || Ok(vec![0; 3])),
            "'a' cannot be read: 3 bytes arrived, not 4",
        ),
    ];
    for (step, (late, expected)) in (2..).zip(failing) {
        saver
            .start(step, vec![piece("a", late)], json!({}))
            .expect("a start");
        let error = saver.finish().expect_err("no bytes").to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(steps(folder.path()).expect("a folder"), [1]);
        // A disk that is full would have no room for the next.
        assert_eq!(unfinished(folder.path()), [""; 0]);
    }
}

/// What one rank cannot write is an error of all, and what the others wrote is removed; the next checkpoint is whole.
#[test]
fn a_rank_whose_bytes_do_not_come_fails_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = |(rank, control): (usize, Arc<dyn Control>)| {
        let mut saver = Saver::new(control, folder.path(), None).expect("a saver");
        let name = ["a", "b"][rank];
        let failing = Late::new(4, || Err("the device is gone".to_owned()));
        let late = match rank {
            0 => vec![0; 4].into(),
            _ => failing,
        };
        saver
            .start(1, vec![piece(name, late)], json!({}))
            .expect("a start");
        let error = saver.finish().expect_err("no bytes").to_string();
        assert!(
            error.contains("rank 1") && error.contains("the device is gone"),
            "{error}"
        );
        saver
            .start(2, vec![piece(name, vec![1; 4])], json!({}))
            .expect("a start");
        assert_eq!(saver.finish().expect("a checkpoint"), Some(2));
    };
    thread::scope(|scope| {
        let controls = threads(2, Duration::from_secs(60));
        for rank in controls.into_iter().enumerate() {
            scope.spawn(|| run(rank));
        }
    });
    assert_eq!(unfinished(folder.path()), [""; 0]);
    let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
    checkpoint.verify().expect("it is whole");
}

//! Runs that publish to one folder at the same time, as they can where nothing is locked.

use std::cell::Cell;
use std::io;
use std::sync::Barrier;
use std::thread;

use super::*;

thread_local! {
    /// Calls of `sync` on this thread until one fails.
    pub(crate) static SYNCS_LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// An error if it is the turn of a disk that fails.
pub(super) fn unless_refused() -> io::Result<()> {
    let left = SYNCS_LEFT.get();
    SYNCS_LEFT.set(left.checked_sub(1).unwrap_or(usize::MAX));
    match left {
        0 => Err(io::Error::other("the disk is gone")),
        _ => Ok(()),
    }
}

/// Each has its own steps, or both have the same; in the end `latest` names a checkpoint that is there, and one of each step is.
#[test]
fn runs_that_publish_at_once_lose_nothing() {
    const ROUNDS: u64 = 100;
    for same in [false, true] {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let barrier = Barrier::new(2);
        // What was wrong: a thread that panics would let the other one wait.
        let publish = &|run: u64| {
            let mut wrong = Vec::new();
            for round in 1..=ROUNDS {
                let step = if same { round / 4 } else { 2 * round + run };
                let id = format!("{run}{round}");
                let from = unfinished(folder, step, &id);
                fs::create_dir(&from).expect("a folder");
                fs::write(from.join(INDEX), "{}").expect("an index");
                barrier.wait();
                let published = super::publish(folder, &from, &id, step);
                // What a saver does of a checkpoint that it could not publish.
                drop(remove(&from));
                barrier.wait();
                let found = latest(folder).map(|found| is_checkpoint(&found));
                let there = is_checkpoint(&folder_of(folder, step));
                if !(same || published.is_ok()) || !matches!(found, Ok(true)) || !there {
                    wrong.push(format!(
                        "step {step}: {published:?}, latest {found:?}, {there}"
                    ));
                }
                barrier.wait();
            }
            wrong
        };
        let wrong: Vec<String> = thread::scope(|scope| {
            let runs = [0, 1].map(|run| scope.spawn(move || publish(run)));
            let ended = runs.into_iter().map(|run| run.join().expect("no panic"));
            ended.flatten().collect()
        });
        assert_eq!(wrong, [""; 0]);
    }
}

/// Commands take what is damaged for what it was, and say what is wrong with it.
#[test]
fn damaged_checkpoints_are_named_as_such() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    assert!(!is_of_checkpoints(folder) && !is_of_checkpoints(&folder.join("none")));
    let step = folder_of(folder, 4);
    fs::create_dir(&step).expect("a folder");
    for damaged in [folder, &step] {
        assert!(is_of_checkpoints(damaged));
        let error = latest(damaged).unwrap_err().to_string();
        assert!(error.contains("`index.json`"), "{error}");
    }
    let other = tempfile::tempdir().expect("a folder");
    fs::write(other.path().join(LATEST), "").expect("a file");
    assert!(is_of_checkpoints(other.path()));
}

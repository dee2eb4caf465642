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

/// `file`, unless it is the turn of a disk that fails.
pub(super) fn unless_refused(file: File) -> io::Result<File> {
    let left = SYNCS_LEFT.get();
    SYNCS_LEFT.set(left.checked_sub(1).unwrap_or(usize::MAX));
    match left {
        0 => Err(io::Error::other("the disk is gone")),
        _ => Ok(file),
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
                let published = super::publish(folder, &from, (&id, step));
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

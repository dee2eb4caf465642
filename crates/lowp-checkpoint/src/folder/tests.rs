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

/// Removes a folder as NFS does: what has the name of a file that somebody reads stays, and the folder with it.
pub(super) fn remove_dir_all(folder: &Path) -> io::Result<()> {
    if !names(folder).is_ok_and(|names| names.iter().any(|name| is_of_nfs(name))) {
        return fs::remove_dir_all(folder);
    }
    let others = names(folder).unwrap_or_default().into_iter();
    for name in others.filter(|name| !is_of_nfs(name)) {
        fs::remove_file(folder.join(name))?;
    }
    Err(ErrorKind::DirectoryNotEmpty.into())
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

/// What is left of a checkpoint that somebody reads is none, and keeps no other from its place.
#[test]
fn what_nfs_keeps_is_no_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let begin = |id: &str| {
        let from = unfinished(folder, 3, id);
        fs::create_dir(&from).expect("a folder");
        fs::write(from.join(INDEX), id).expect("an index");
        from
    };
    let read = |path: &Path| {
        fs::create_dir_all(path).expect("a folder");
        fs::write(path.join(".nfs0001"), "").expect("a file");
    };
    let latest_id = || {
        let found = latest(folder).expect("a checkpoint");
        fs::read_to_string(found.join(INDEX)).expect("an index")
    };
    // In its own place, and in that of one which is replaced.
    read(&folder_of(folder, 3));
    publish(folder, &begin("a"), "a", 3).expect("a checkpoint");
    read(&folder_of(folder, 3));
    publish(folder, &begin("b"), "b", 3).expect("a checkpoint");
    read(&replaced(folder, 3));
    publish(folder, &begin("c"), "c", 3).expect("a checkpoint");
    assert_eq!(latest_id(), "c");
    let left = remove_replaced(folder);
    let left: Vec<String> = left.iter().map(ToString::to_string).collect();
    let said = |text: &String| text.contains(": cannot remove: ");
    assert!(!left.is_empty() && left.iter().all(said), "{left:?}");
    // It is not put back where the checkpoint that replaced it is gone.
    fs::remove_dir_all(folder_of(folder, 3)).expect("a folder");
    tidy(folder, true).expect("a folder");
    assert_eq!(steps(folder).expect("a folder"), [0; 0]);
    // Once nobody reads it, it goes.
    for name in names(folder).expect("a folder") {
        drop(fs::remove_file(folder.join(name).join(".nfs0001")));
    }
    tidy(folder, true).expect("a folder");
    assert_eq!(names(folder).expect("a folder"), [LATEST]);
}

/// The file that names the latest checkpoint is written again only if it is damaged.
#[test]
fn a_damaged_latest_is_mended() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    for step in [2, 4] {
        let place = folder_of(folder, step);
        fs::create_dir(&place).expect("a folder");
        fs::write(place.join(INDEX), "{}").expect("an index");
    }
    let named = |text: &str| {
        fs::write(folder.join(LATEST), text).expect("a file");
        mend_latest(folder, "id", 4).expect("a file");
        fs::read_to_string(folder.join(LATEST)).expect("a file")
    };
    for damaged in ["", "step-00000009\n", "step-4", "\0\0"] {
        assert_eq!(named(damaged), "step-00000004\n", "{damaged:?}");
    }
    assert_eq!(named("step-00000002\n"), "step-00000002\n");
}

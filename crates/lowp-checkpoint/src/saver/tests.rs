//! What is saved can be read again, and runs that cannot lock their folder leave each other alone.

use super::written::MAX_TABLES;
use super::*;
use crate::folder::tests::SYNCS_LEFT;
use crate::folder::{names, steps};
use crate::index::MAX_HEADER;
use crate::{Block, Checkpoint, Dtype, folder_of, latest};
use lowp_comm::{CommError, threads};
use serde_json::json;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const PATIENCE: Duration = Duration::from_secs(60);

/// `count` pieces of a byte, the share of `rank` of as many tensors that `ranks` ranks have.
fn pieces(count: usize, rank: usize, ranks: usize) -> Vec<Piece> {
    let piece = |number: usize| Piece {
        name: format!("layer.{number}.rowwise_data"),
        dtype: Dtype::U8,
        full: [1, ranks],
        block: Block::of_row(rank, 1),
        bytes: vec![7],
    };
    (0..count).map(piece).collect()
}

/// `count` whole tensors that only `rank` has.
fn own_pieces(count: usize, rank: usize) -> Vec<Piece> {
    let mut own = pieces(count, 0, 1);
    for piece in &mut own {
        piece.name += &format!(".of.{rank}");
    }
    own
}

/// Saves steps of as many pieces and with what stands beside them, by `ranks` ranks; how each save of the first rank and of the last ended.
fn save(folder: &Path, ranks: usize, steps: &[(usize, Value)]) -> Vec<[Result<u64, String>; 2]> {
    let run = |rank: usize, control: Arc<dyn Control>| {
        let mut saver = Saver::new(control, folder, None).expect("a folder");
        let steps = (1u64..).zip(steps);
        let save = |(step, (count, about)): (u64, &(usize, Value))| {
            let pieces = match about["own"] == true {
                true => own_pieces(*count, rank),
                false => pieces(*count, rank, ranks),
            };
            let started = saver.start(step, pieces, about.clone());
            let saved = started.and_then(|()| saver.finish());
            saved.map(|_| step).map_err(|error| error.to_string())
        };
        steps.map(save).collect::<Vec<_>>()
    };
    thread::scope(|scope| {
        let controls = threads(ranks, PATIENCE).into_iter().enumerate();
        let ranks: Vec<_> = controls
            .map(|(rank, control)| scope.spawn(move || run(rank, Arc::new(Counted::new(control)))))
            .collect();
        let mut ended = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
        let first = ended.next().expect("a rank");
        let last = ended.last().unwrap_or_else(|| first.clone());
        first.into_iter().zip(last).map(<[_; 2]>::from).collect()
    })
}

/// The hidden names in `folder`, but for the lock.
fn hidden(folder: &Path) -> Vec<String> {
    let mut names = names(folder).expect("a folder");
    names.retain(|name| name.starts_with('.') && name != ".lock");
    names
}

/// Counts rounds, and allows few bytes in one: every rank gets those of all, so that lists of pieces would be a thousand times as long among
/// a thousand ranks.
#[derive(Debug)]
struct Counted {
    control: Arc<dyn Control>,
    rounds: AtomicUsize,
}

impl Counted {
    fn new(control: Arc<dyn Control>) -> Self {
        let rounds = AtomicUsize::new(0);
        Self { control, rounds }
    }
}

impl Control for Counted {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn members(&self) -> &[usize] {
        self.control.members()
    }

    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.rounds.fetch_add(1, Ordering::Relaxed);
        let all = self.control.all_gather(tag, bytes)?;
        let sum: usize = all.iter().map(Vec::len).sum();
        if sum > 4096 {
            let message = format!("{sum} bytes in a round of {tag}");
            return Err(self.fail(CommError::Failed { rank: 0, message }));
        }
        Ok(all)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        self.control.split(color, key)
    }

    fn fail(&self, cause: CommError) -> CommError {
        self.control.fail(cause)
    }

    fn failure(&self) -> Option<CommError> {
        self.control.failure()
    }
}

/// What a rank wrote does not travel, and the folder has the same files whatever the number of pieces.
#[test]
fn ranks_tell_each_other_little() {
    let folder = tempfile::tempdir().expect("a folder");
    let ended = save(folder.path(), 3, &[(2000, json!(1))]);
    assert_eq!(ended, [[Ok(1), Ok(1)]]);
    let saved = folder_of(folder.path(), 1);
    Checkpoint::open(&saved)
        .and_then(|checkpoint| checkpoint.verify())
        .expect("it is whole");
    let mut files = names(&saved).expect("a folder");
    files.sort();
    let ranks = (0..3).map(crate::index::file_name);
    let expected: Vec<String> = ["index.json".to_owned()].into_iter().chain(ranks).collect();
    assert_eq!(files, expected);
}

/// Tensors that only some ranks have are asked for, and make one index.
#[test]
fn ranks_have_tensors_of_their_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let ended = save(folder.path(), 3, &[(4, json!({ "own": true }))]);
    assert_eq!(ended, [[Ok(1), Ok(1)]]);
    let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
    checkpoint.verify().expect("it is whole");
    let names: Vec<&str> = checkpoint.tensors().map(|tensor| tensor.name).collect();
    assert_eq!(names.len(), 12);
    assert!(names.contains(&"layer.3.rowwise_data.of.2"), "{names:?}");
}

/// Ranks that wait for a file that takes long meet less and less often.
#[test]
fn waiting_takes_few_rounds() {
    let folder = tempfile::tempdir().expect("a folder");
    let control = Arc::new(Counted::new(threads(1, PATIENCE).swap_remove(0)));
    let mut saver = Saver::new(control.clone(), folder.path(), None).expect("a folder");
    let late = Late::new(1, || {
        thread::sleep(Duration::from_millis(800));
        Ok(vec![7])
    });
    let piece = Piece {
        name: "late".to_owned(),
        dtype: Dtype::U8,
        full: [1, 1],
        block: Block::of_row(0, 1),
        bytes: late,
    };
    saver.start(1, vec![piece], json!({})).expect("a start");
    let before = control.rounds.load(Ordering::Relaxed);
    assert_eq!(saver.finish().expect("a checkpoint"), Some(1));
    let rounds = control.rounds.load(Ordering::Relaxed) - before;
    assert!(rounds < 40, "{rounds} rounds");
}

/// What could not be opened again is refused on every rank, with the numbers, and the checkpoint before stays.
#[test]
fn what_could_not_be_read_is_not_saved() {
    let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
    let cases = [
        (
            16,
            (10, json!("x".repeat(1 << 20))),
            "the index of 160 pieces",
            MAX_INDEX,
        ),
        // More than the first rank asks for.
        (
            20,
            (2000, json!({ "own": true })),
            "the lists of tensors of 20",
            MAX_TABLES,
        ),
        (
            1,
            (12_000, json!(1)),
            "the header of 12000 pieces",
            MAX_HEADER,
        ),
        (2, (1, deep), "could not be read again: recursion limit", 0),
    ];
    for (ranks, too_much, expected, most) in cases {
        let folder = tempfile::tempdir().expect("a folder");
        let little = (10, json!(1));
        let ended = save(folder.path(), ranks, &[little.clone(), too_much, little]);
        assert_eq!([&ended[0], &ended[2]], [&[Ok(1), Ok(1)], &[Ok(3), Ok(3)]]);
        for error in ended[1].clone().map(|end| end.expect_err(expected)) {
            assert!(error.contains(expected), "{error}");
            let said = most == 0 || error.contains(&format!("bytes, and at most {most} can"));
            assert!(said, "{error}");
        }
        assert_eq!(hidden(folder.path()), [""; 0], "{expected}");
        assert!(!folder_of(folder.path(), 2).exists(), "{expected}");
        let checkpoint = Checkpoint::open(&folder_of(folder.path(), 1)).expect("it stays");
        checkpoint.verify().expect("it is whole");
    }
}

/// Where the file system has no locks nobody knows whether another run is at work: what it is writing stays, and both save.
#[test]
fn runs_without_locks_leave_each_other_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let no_locks = |_: &Path| Ok(None);
    let run = || {
        let control = threads(1, PATIENCE).swap_remove(0);
        Saver::with_lock(control, folder.path(), None, no_locks).expect("a folder")
    };
    let about = |run: usize| json!({ "run": run });
    let [mut first, mut second] = [run(), run()];
    first.start(1, pieces(3, 0, 1), about(1)).expect("a start");
    // One more begins, and one that saves the same step.
    let third = run();
    second.start(1, pieces(2, 0, 1), about(2)).expect("a start");
    assert_eq!(first.finish().expect("a checkpoint"), Some(1));
    let found = Checkpoint::latest(folder.path()).expect("a checkpoint");
    assert_eq!(found.about(), &about(1));
    found.verify().expect("it is whole");
    // The later one wins.
    assert_eq!(second.finish().expect("a checkpoint"), Some(1));
    let found = Checkpoint::latest(folder.path()).expect("a checkpoint");
    assert_eq!(found.about(), &about(2));
    found.verify().expect("it is whole");
    drop((first, second, third));
    assert_eq!(hidden(folder.path()), [""; 0]);
    assert_eq!(
        latest(folder.path()).expect("a checkpoint"),
        folder_of(folder.path(), 1)
    );
}

/// A run in `folder` that cannot lock it.
fn without_locks(folder: &Path, keep: Option<usize>) -> Saver {
    let control = threads(1, PATIENCE).swap_remove(0);
    Saver::with_lock(control, folder, keep, |_| Ok(None)).expect("a folder")
}

/// Nobody removes what another run saved.
#[test]
fn a_run_without_locks_thins_out_its_own_checkpoints() {
    let folder = tempfile::tempdir().expect("a folder");
    let save = |saver: &mut Saver, step: u64| {
        saver
            .start(step, pieces(1, 0, 1), json!({}))
            .expect("a start");
        assert_eq!(saver.finish().expect("a checkpoint"), Some(step));
    };
    let mut other = without_locks(folder.path(), None);
    save(&mut other, 1);
    let mut own = without_locks(folder.path(), Some(1));
    save(&mut other, 2);
    save(&mut own, 5);
    save(&mut own, 6);
    save(&mut own, 7);
    drop((own, other));
    assert_eq!(steps(folder.path()).expect("a folder"), [1, 2, 7]);
    // With the lock it is known that nobody else is there.
    let control = threads(1, PATIENCE).swap_remove(0);
    let mut alone = Saver::new(control, folder.path(), Some(2)).expect("a folder");
    save(&mut alone, 8);
    drop(alone);
    assert_eq!(steps(folder.path()).expect("a folder"), [7, 8]);
}

/// A run that ends by an error gives up what it is writing.
#[test]
fn what_is_not_finished_is_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut saver = without_locks(folder.path(), None);
    saver.start(1, pieces(1, 0, 1), json!({})).expect("a start");
    assert_eq!(hidden(folder.path()).len(), 1);
    drop(saver);
    assert_eq!(hidden(folder.path()), [""; 0]);
    assert_eq!(steps(folder.path()).expect("a folder"), [0; 0]);
}

/// What nobody has written to for a day is no run's any more, also where nothing tells of runs.
#[test]
fn old_leftovers_are_removed_without_locks() {
    let folder = tempfile::tempdir().expect("a folder");
    let old = SystemTime::now() - Duration::from_secs(49 * 3600);
    let age = |path: &Path| {
        let file = File::open(path).expect("it is there");
        file.set_modified(old).expect("another time");
    };
    for id in ["old", "new", "written"] {
        let of = unfinished(folder.path(), 3, id);
        fs::create_dir(&of).expect("a folder");
        let file = of.join("rank-00000.safetensors");
        for path in [
            file,
            folder.path().join(format!(".latest.{id}.unfinished")),
            shared_probe(folder.path(), id),
        ] {
            fs::write(&path, "").expect("a file");
            if id == "old" {
                age(&path);
            }
        }
        if id != "new" {
            // A rank still writes its file.
            age(&of);
        }
    }
    drop(without_locks(folder.path(), None));
    let mut left = hidden(folder.path());
    left.sort();
    let expected = [
        ".latest.new.unfinished",
        ".latest.written.unfinished",
        ".probe-new",
        ".probe-written",
        ".step-00000003.new.unfinished",
        ".step-00000003.written.unfinished",
    ];
    assert_eq!(left, expected);
    let control = threads(1, PATIENCE).swap_remove(0);
    drop(Saver::new(control, folder.path(), None).expect("a folder"));
    assert_eq!(hidden(folder.path()), [""; 0]);
}

/// Whatever cannot be brought to the disk: the checkpoint before is the latest, or the new one is, and the error says which.
#[test]
fn a_disk_that_fails_leaves_what_the_error_says() {
    for failing in 0.. {
        let folder = tempfile::tempdir().expect("a folder");
        let run = |rank: usize, control: Arc<dyn Control>| {
            let mut saver = Saver::new(control, folder.path(), Some(1)).expect("a folder");
            let mut save = |step: u64| {
                let started = saver.start(step, pieces(1, rank, 2), json!({}));
                started.and_then(|()| saver.finish())
            };
            save(1).expect("a checkpoint");
            if rank == 0 {
                SYNCS_LEFT.set(failing);
            }
            let ended = save(2).map_err(|error| error.to_string());
            let spare = SYNCS_LEFT.replace(usize::MAX);
            (ended, spare < failing + 100 && spare != usize::MAX)
        };
        let [(first, spare), (second, _)] = thread::scope(|scope| {
            let controls = threads(2, PATIENCE).into_iter().enumerate();
            let ranks = controls.map(|(rank, control)| scope.spawn(move || run(rank, control)));
            let ranks: Vec<_> = ranks.collect();
            let ended = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            <[_; 2]>::try_from(ended.collect::<Vec<_>>()).expect("two ranks")
        });
        if spare {
            assert_eq!((first, second), (Ok(Some(2)), Ok(Some(2))));
            assert_eq!(failing, 5, "all of them have failed once");
            return;
        }
        let [first, second] = [first, second].map(|ended| ended.expect_err("a disk that fails"));
        assert!(first.contains("the disk is gone"), "{first}");
        let newest = Checkpoint::latest(folder.path()).expect("a checkpoint");
        newest.verify().expect("it is whole");
        assert_eq!(hidden(folder.path()), [""; 0]);
        let saved = steps(folder.path()).expect("a folder");
        if newest.step() == 1 {
            assert!(first.contains("was not saved"), "{failing}: {first}");
            assert!(second.contains("was not saved"), "{failing}: {second}");
            assert_eq!(saved, [1]);
        } else {
            let there = "the checkpoint of step 2 was saved and is the latest";
            assert!(first.contains(there), "{failing}: {first}");
            assert_eq!(first, second);
            // It may be the only one that survives.
            assert_eq!(saved, [1, 2]);
        }
    }
}

/// The bytes of one rank never arrive: every rank gets an error that names the file nobody writes to, and goes on.
#[test]
fn a_file_that_is_never_written_is_given_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let (send, arrive) = std::sync::mpsc::channel::<Vec<u8>>();
    let late = Mutex::new(Some(Late::new(1, move || {
        arrive.recv().map_err(|error| error.to_string())
    })));
    let run = |rank: usize, control: Arc<dyn Control>| {
        let mut saver = Saver::new(control, folder.path(), None).expect("a folder");
        saver.stalled = Duration::from_millis(100);
        let own = pieces(2, rank, 2).into_iter();
        let mut own: Vec<Piece<Late>> = own.map(Into::into).collect();
        if rank == 1 {
            own[1].bytes = late.lock().expect("bytes").take().expect("once");
        }
        saver.start(1, own, json!({})).expect("a start");
        let error = saver.finish().expect_err("no file").to_string();
        saver
            .start(2, pieces(2, rank, 2), json!({}))
            .expect("a start");
        assert_eq!(saver.finish().expect("a checkpoint"), Some(2));
        error
    };
    let errors: Vec<String> = thread::scope(|scope| {
        let ranks = threads(2, PATIENCE).into_iter().enumerate();
        let ranks: Vec<_> = ranks
            .map(|(rank, control)| scope.spawn(move || run(rank, control)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    });
    drop(send);
    assert_eq!(errors[0], errors[1]);
    let parts = [
        "step 1 was not saved: rank 1: ",
        "rank-00001.safetensors is not on the disk",
        "for 100ms",
    ];
    assert!(
        parts.iter().all(|text| errors[0].contains(text)),
        "{}",
        errors[0]
    );
}

/// Neither is it waited for where the saver ends.
#[test]
fn a_saver_ends_though_its_file_is_never_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let (send, arrive) = std::sync::mpsc::channel::<Vec<u8>>();
    let control = threads(1, PATIENCE).swap_remove(0);
    let mut saver = Saver::new(control, folder.path(), None).expect("a folder");
    saver.stalled = Duration::from_millis(100);
    let mut own: Vec<Piece<Late>> = pieces(1, 0, 1).into_iter().map(Into::into).collect();
    own[0].bytes = Late::new(1, move || arrive.recv().map_err(|error| error.to_string()));
    saver.start(1, own, json!({})).expect("a start");
    drop(saver);
    drop(send);
}

/// Saves three steps and keeps one, where `removals` are under way; what is there after the saver has ended, and what it says of that.
fn save_beside(removals: impl FnOnce() + Send + 'static) -> (Vec<u64>, Vec<String>) {
    let folder = tempfile::tempdir().expect("a folder");
    let control = threads(1, PATIENCE).swap_remove(0);
    let mut saver = Saver::new(control, folder.path(), Some(1)).expect("a folder");
    saver.stalled = Duration::from_millis(400);
    saver.removing = Some(thread::spawn(|| {
        removals();
        Vec::new()
    }));
    for step in 1..=3 {
        let started = saver.start(step, pieces(1, 0, 1), json!({}));
        let saved = started.and_then(|()| saver.finish());
        assert_eq!(saved.expect("a checkpoint"), Some(step));
    }
    let left = saver.finish_removals().expect("a world");
    let left = left.iter().map(ToString::to_string).collect();
    drop(saver);
    (steps(folder.path()).expect("a folder"), left)
}

/// Removals that are slow are followed by those that were due meanwhile; those that never end keep neither a checkpoint nor the end waiting.
#[test]
fn nobody_waits_for_removals_without_end() {
    assert_eq!(save_beside(|| ()), (vec![3], Vec::new()));
    let ended = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&ended);
    // Far longer than the limit of a wait.
    let slow = move || {
        thread::sleep(Duration::from_secs(5));
        count.fetch_add(1, Ordering::Relaxed);
    };
    let (steps, left) = save_beside(slow);
    assert_eq!(steps, [1, 2, 3]);
    let said = "cannot remove old checkpoints: timed out";
    assert!(left.len() == 1 && left[0].contains(said), "{left:?}");
    assert_eq!(ended.load(Ordering::Relaxed), 0, "it was waited for");
    let slow = || thread::sleep(Duration::from_millis(100));
    assert_eq!(save_beside(slow), (vec![3], Vec::new()));
}

thread_local! {
    /// Bytes of the file of this thread that are on a slow disk.
    static ON_DISK: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Two milliseconds for every byte that is new.
fn sync_slowly(file: &File) -> std::io::Result<()> {
    let length = file.metadata()?.len();
    thread::sleep(Duration::from_millis(
        2 * (length - ON_DISK.replace(length)),
    ));
    file.sync_all()
}

/// A slow disk is no reason to give a checkpoint up, as long as bytes come to it; one that is silent for as long is.
#[test]
fn a_disk_that_is_slow_is_waited_for() {
    let save = |part| {
        let folder = tempfile::tempdir().expect("a folder");
        let control = threads(1, PATIENCE).swap_remove(0);
        let mut saver = Saver::new(control, folder.path(), None).expect("a folder");
        saver.stalled = Duration::from_millis(200);
        saver.disk = Disk {
            part,
            sync: sync_slowly,
        };
        saver.start(1, pieces(1, 0, 1), json!({})).expect("a start");
        let length = saver.finish().map(|_| {
            let file = folder_of(folder.path(), 1).join(file_name(0));
            Duration::from_millis(2 * fs::metadata(file).expect("a file").len())
        });
        (length, saver.stalled)
    };
    let (took, stalled) = save(32);
    assert!(took.expect("a checkpoint") > stalled);
    let (silent, _) = save(u64::MAX);
    let error = silent.expect_err("no byte on the disk").to_string();
    assert!(error.contains("but for 0 bytes"), "{error}");
}

/// Nobody waits for a file that is of no use any more.
#[test]
fn a_checkpoint_that_is_dropped_is_not_written_to_its_end() {
    const BYTES: usize = 1 << 16;
    let folder = tempfile::tempdir().expect("a folder");
    let control = threads(1, PATIENCE).swap_remove(0);
    let mut saver = Saver::new(control, folder.path(), None).expect("a folder");
    saver.disk = Disk {
        part: 32,
        sync: sync_slowly,
    };
    let full = [1, BYTES];
    let piece = Piece {
        name: "long".to_owned(),
        dtype: Dtype::U8,
        full,
        block: Block::whole(full),
        bytes: vec![7; BYTES],
    };
    saver.start(1, vec![piece], json!({})).expect("a start");
    let begun = Instant::now();
    drop(saver);
    // All of it would take two minutes.
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
    assert_eq!(hidden(folder.path()), [""; 0]);
}

/// Old checkpoints that somebody reads end no run; what is left of them is said, and goes when nobody does.
#[test]
fn what_cannot_be_removed_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let control = threads(1, PATIENCE).swap_remove(0);
    let mut saver = Saver::new(control, folder.path(), Some(1)).expect("a folder");
    let mut save = |step: u64| {
        let started = saver.start(step, pieces(1, 0, 1), json!({}));
        let saved = started.and_then(|()| saver.finish());
        assert_eq!(saved.expect("a checkpoint"), Some(step));
        let left = saver.finish_removals().expect("a world").into_iter();
        left.map(|error| error.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(save(1), [""; 0]);
    fs::write(folder_of(folder.path(), 1).join(".nfs0001"), "").expect("a file");
    let hidden_name = ".step-00000001.removed.unfinished";
    for step in [2, 3] {
        let left = save(step);
        assert!(
            left.len() == 1 && left[0].contains(hidden_name) && left[0].contains("cannot remove"),
            "{left:?}"
        );
        assert_eq!(steps(folder.path()).expect("a folder"), [step]);
    }
    fs::remove_file(folder.path().join(hidden_name).join(".nfs0001")).expect("a file");
    assert_eq!(save(4), [""; 0]);
    assert_eq!(hidden(folder.path()), [""; 0]);
}

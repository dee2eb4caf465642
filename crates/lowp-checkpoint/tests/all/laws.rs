//! What one number of ranks saved, any other number reads; what was damaged is an error; what failed leaves the checkpoint before.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use lowp_checkpoint::{
    Block, Checkpoint, CheckpointError, Dtype, Piece, Saver, check_writable, folder_of, latest,
    steps,
};
use lowp_comm::threads;
use proptest::prelude::*;
use serde_json::json;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A tensor of bytes that say where they lie.
fn tensor(name: &str, shape: [usize; 2]) -> Vec<u8> {
    let seed = name.len() as u64;
    let value = |i: usize| ((i as u64 + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    (0..shape[0] * shape[1]).map(value).collect()
}

/// The bytes of `block` of `whole`, a tensor of `shape`.
pub(crate) fn cut(whole: &[u8], shape: [usize; 2], block: Block) -> Vec<u8> {
    let rows = block.start[0]..block.start[0] + block.shape[0];
    rows.flat_map(|row| {
        let from = row * shape[1] + block.start[1];
        whole[from..from + block.shape[1]].to_vec()
    })
    .collect()
}

/// The blocks that `ranks` ranks have of a tensor of `shape` which is cut along `axis`; some may be empty.
pub(crate) fn shares(shape: [usize; 2], axis: usize, ranks: usize) -> Vec<Block> {
    let each = shape[axis].div_ceil(ranks);
    let share = |rank: usize| {
        let (start, end) = (
            (rank * each).min(shape[axis]),
            ((rank + 1) * each).min(shape[axis]),
        );
        let mut block = Block::whole(shape);
        (block.start[axis], block.shape[axis]) = (start, end - start);
        block
    };
    (0..ranks).map(share).collect()
}

/// Names, shapes and the axes along which they are cut.
const TENSORS: [(&str, [usize; 2], usize); 4] = [
    ("rows", [11, 6], 0),
    ("cols", [5, 13], 1),
    ("flat", [1, 40], 1),
    ("none", [0, 7], 0),
];

fn pieces(rank: usize, ranks: usize) -> Vec<Piece> {
    let piece = |(name, full, axis): (&str, [usize; 2], usize)| {
        let block = shares(full, axis, ranks)[rank];
        let bytes = cut(&tensor(name, full), full, block);
        let (name, dtype) = (name.to_owned(), Dtype::U8);
        Piece {
            name,
            dtype,
            full,
            block,
            bytes,
        }
    };
    TENSORS.into_iter().map(piece).collect()
}

/// Runs `f` as every rank of a world.
pub(crate) fn world<T: Send>(
    ranks: usize,
    f: impl Fn(usize, Saver) -> T + Sync,
    folder: &Path,
    keep: Option<usize>,
) -> Vec<T> {
    thread::scope(|scope| {
        let start = |(rank, control)| {
            let f = &f;
            scope.spawn(move || f(rank, Saver::new(control, folder, keep).expect("a folder")))
        };
        let ranks: Vec<_> = threads(ranks, PATIENCE)
            .into_iter()
            .enumerate()
            .map(start)
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    })
}

fn save(folder: &Path, ranks: usize, steps: &[u64], keep: Option<usize>) {
    let save = |rank: usize, mut saver: Saver| {
        for &step in steps {
            saver
                .start(step, pieces(rank, ranks), json!({ "step": step }))
                .expect("a start");
            assert_eq!(saver.unfinished(), Some(step));
            assert_eq!(saver.finish().expect("a checkpoint"), Some(step));
            assert_eq!(saver.poll().expect("nothing"), None);
        }
    };
    world(ranks, save, folder, keep);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_block_of_any_world(
        ranks in 1usize..=9,
        blocks in prop::collection::vec((0usize..3, 0.0..1.0f64, 0.0..1.0f64, 0.0..1.0f64, 0.0..1.0f64), 1..12),
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        save(folder.path(), ranks, &[3], None);
        let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
        prop_assert_eq!((checkpoint.step(), checkpoint.ranks()), (3, ranks));
        prop_assert_eq!(checkpoint.about(), &json!({ "step": 3 }));
        checkpoint.verify().expect("what was written");
        for (which, top, left, rows, cols) in blocks {
            let (name, shape, _) = TENSORS[which];
            let part = |whole: usize, of: f64| (whole as f64 * of) as usize;
            let start = [part(shape[0], top), part(shape[1], left)];
            let shape_of = [part(shape[0] - start[0] + 1, rows), part(shape[1] - start[1] + 1, cols)];
            let block = Block { start, shape: shape_of };
            let read = checkpoint.read(name, Dtype::U8, shape, block).expect("a block");
            prop_assert_eq!(read, cut(&tensor(name, shape), shape, block));
        }
    }

    /// What the trainer wrote down comes back, whatever numbers are in it.
    #[test]
    fn any_numbers_of_the_trainer(numbers in prop::collection::vec(any::<f64>(), 0..20)) {
        let folder = tempfile::tempdir().expect("a folder");
        let about = json!({ "numbers": numbers.iter().filter(|x| x.is_finite()).collect::<Vec<_>>() });
        world(1, |_, mut saver| {
            saver.start(1, Vec::<Piece>::new(), about.clone()).expect("a start");
            saver.finish().expect("a checkpoint")
        }, folder.path(), None);
        Checkpoint::latest(folder.path()).expect("a checkpoint").verify().expect("it is whole");
    }

    /// Any byte of any file that changes is found: when the checkpoint is opened, or when what it lies in is read.
    #[test]
    fn changed_bytes_are_found(file in 0usize..4, at in 0.0..1.0f64, bit in 0u32..8) {
        let folder = tempfile::tempdir().expect("a folder");
        save(folder.path(), 3, &[1], None);
        let path = files(folder.path(), 1).swap_remove(file);
        let mut bytes = fs::read(&path).expect("a file");
        let at = ((bytes.len() as f64) * at) as usize;
        let (before, after) = (bytes[at], bytes[at] ^ (1 << bit));
        bytes[at] = after;
        fs::write(&path, &bytes).expect("a file");
        let found = Checkpoint::latest(folder.path()).and_then(|checkpoint| checkpoint.verify());
        // White space between the values of the index says nothing.
        let blank = |byte: u8| byte == b' ' || byte == b'\n' || byte == b'\t' || byte == b'\r';
        if !(blank(before) && blank(after)) {
            prop_assert!(found.is_err(), "byte {} of {}: {:02x} to {:02x}", at, path.display(), before, after);
        }
    }
}

/// The files of the checkpoint of `step`, the index first.
fn files(folder: &Path, step: u64) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder_of(folder, step)).expect("a checkpoint");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
    files.sort();
    files
}

#[test]
fn damaged_checkpoints_say_how() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 9] = [
        ("cannot open", |folder| {
            fs::remove_file(&files(folder, 1)[2]).expect("a file")
        }),
        ("bytes of", |folder| {
            let path = &files(folder, 1)[1];
            let bytes = fs::read(path).expect("a file");
            fs::write(path, &bytes[..bytes.len() - 1]).expect("a file");
        }),
        ("belongs to another checkpoint", |folder| {
            fs::copy(&files(folder, 2)[1], &files(folder, 1)[1]).expect("a file");
        }),
        ("not the file of rank", |folder| {
            // Files of equal shares swap their places.
            let paths = files(folder, 1);
            let [a, b] = [1, 2].map(|at| fs::read(&paths[at]).expect("a file"));
            fs::write(&paths[1], b).expect("a file");
            fs::write(&paths[2], a).expect("a file");
        }),
        ("it is no index", |folder| {
            fs::write(&files(folder, 1)[0], "{").expect("a file")
        }),
        ("has no index.json", |folder| {
            fs::remove_file(&files(folder, 1)[0]).expect("a file")
        }),
        ("the checkpoint has version 3", |folder| {
            let path = &files(folder, 1)[0];
            let text = fs::read_to_string(path).expect("an index");
            let newer = text.replace("\"version\":2", "\"version\":3");
            fs::write(path, newer.replace("\"kinds\"", "\"forms\"")).expect("a file");
        }),
        ("its checksum is another one", |folder| {
            let path = &files(folder, 1)[0];
            let text = fs::read_to_string(path).expect("an index");
            fs::write(path, text.replace("\"step\":1", "\"step\":2")).expect("a file");
        }),
        ("the checksum of tensor", |folder| {
            let path = &files(folder, 1)[3];
            let mut bytes = fs::read(path).expect("a file");
            *bytes.last_mut().expect("a byte") ^= 1;
            fs::write(path, bytes).expect("a file");
        }),
    ];
    for (expected, damage) in damages {
        let folder = tempfile::tempdir().expect("a folder");
        // Every share is of the same size, but for the name.
        save(folder.path(), 3, &[2], None);
        save(folder.path(), 3, &[1], None);
        damage(folder.path());
        let opened = Checkpoint::open(&folder_of(folder.path(), 1));
        let error = opened
            .and_then(|checkpoint| checkpoint.verify())
            .expect_err(expected);
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        Checkpoint::open(&folder_of(folder.path(), 2))
            .expect("the other one")
            .verify()
            .expect("it is whole");
    }
}

/// An index that a stranger wrote, with the checksum that it needs.
#[test]
fn hostile_indexes_are_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), 2, &[1], None);
    let path = files(folder.path(), 1).swap_remove(0);
    let text = fs::read_to_string(&path).expect("an index");
    let document: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let max = u64::MAX;
    let of = |name: &str, place: &str| {
        let kind = &document["index"]["tensors"][name];
        format!("/kinds/{kind}/{place}")
    };
    // A span is rank, number of ranks, first row, first column, rows, columns, axis.
    let changes = [
        (
            "/files/0/bytes".to_owned(),
            json!(max),
            "larger than can be",
        ),
        ("/files/0/bytes".to_owned(), json!(9), "which is no length"),
        (
            of("rows", "shape"),
            json!([max, max]),
            "its shape cannot be",
        ),
        (of("rows", "shape"), json!([11, 7]), "entries of 77"),
        (of("rows", "spans/0/0"), json!(2), "on no rank"),
        (of("rows", "spans/0/2"), json!(max), "outside of it"),
        (of("rows", "spans/1/2"), json!(5), "overlap"),
        (of("rows", "spans/1/1"), json!(0), "an empty piece"),
        (of("rows", "spans/1/1"), json!(max), "outside of it"),
        (of("rows", "spans/0/6"), json!(2), "outside of it"),
        (
            of("rows", "dtype"),
            json!("F32"),
            "its header does not fit it",
        ),
        (
            of("none", "shape"),
            json!([1, 7]),
            "its pieces have 0 entries",
        ),
        ("/tensors/rows".to_owned(), json!(99), "of no kind"),
        ("/files".to_owned(), json!([]), "on no rank"),
    ];
    for (pointer, value, expected) in changes {
        let mut changed = document.clone();
        let place = changed["index"].pointer_mut(&pointer).expect("a value");
        *place = value;
        let compact = serde_json::to_vec(&changed["index"]).expect("JSON");
        let sum = format!("{:016x}", twox_hash::XxHash3_64::oneshot(&compact));
        changed["checksum"] = json!(sum);
        fs::write(&path, changed.to_string()).expect("a file");
        let opened = Checkpoint::latest(folder.path());
        let error = opened.and_then(|checkpoint| checkpoint.verify());
        let error = error.expect_err(&pointer);
        assert!(error.to_string().contains(expected), "{pointer}: {error}");
    }
    fs::write(&path, &text).expect("a file");
    Checkpoint::latest(folder.path()).expect("as it was");
}

/// What lowp saved before its index had kinds.
#[test]
fn version_1_is_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/version-1/step-00000007");
    let checkpoint = Checkpoint::open(&folder).expect("a checkpoint");
    checkpoint.check_files().expect("it is whole");
    checkpoint.verify().expect("it is whole");
    assert_eq!((checkpoint.step(), checkpoint.ranks()), (7, 3));
    assert_eq!(checkpoint.about(), &json!({ "step": 7 }));
    for (name, shape, axis) in TENSORS {
        let shares = [shares(shape, axis, 2), vec![Block::whole(shape)]].concat();
        for block in shares {
            let read = checkpoint.read(name, Dtype::U8, shape, block);
            assert_eq!(
                read.expect("a block"),
                cut(&tensor(name, shape), shape, block)
            );
        }
    }
}

#[test]
fn wrong_questions_are_answered() {
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), 2, &[1], None);
    let checkpoint = Checkpoint::latest(folder.path()).expect("a checkpoint");
    let names: Vec<_> = checkpoint
        .tensors()
        .map(|tensor| (tensor.name, tensor.pieces))
        .collect();
    assert_eq!(names, [("cols", 2), ("flat", 2), ("none", 0), ("rows", 2)]);
    let whole = Block::whole([11, 6]);
    let error = checkpoint
        .read("nothing", Dtype::U8, [11, 6], whole)
        .unwrap_err();
    assert!(error.to_string().contains("no tensor 'nothing'"), "{error}");
    let error = checkpoint
        .read("rows", Dtype::F32, [11, 6], whole)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("is U8 11x6, but the model needs F32 11x6"),
        "{error}"
    );
    let out = Block {
        start: [0, usize::MAX],
        shape: [1, 2],
    };
    let error = checkpoint.read("rows", Dtype::U8, [11, 6], out);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("has no block"), "{error}");
}

#[test]
fn old_checkpoints_are_removed_and_the_latest_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    let error = latest(path).unwrap_err();
    assert!(error.to_string().contains("holds no checkpoint"), "{error}");
    save(path, 2, &[1, 2, 3, 4], Some(2));
    assert_eq!(latest(path).expect("a checkpoint"), folder_of(path, 4));
    let there = [1, 2, 3, 4].map(|step| folder_of(path, step).exists());
    assert_eq!(there, [false, false, true, true]);
    // A run that was resumed saves the same step again.
    save(path, 3, &[4], Some(2));
    assert_eq!(Checkpoint::latest(path).expect("a checkpoint").ranks(), 3);
    let hidden = fs::read_dir(path).expect("a folder").filter_map(Result::ok);
    let hidden: Vec<_> = hidden
        .map(|entry| entry.file_name())
        .filter(|name| name.to_string_lossy().starts_with('.') && name != ".lock")
        .collect();
    assert_eq!(hidden, [""; 0], "nothing unfinished is left");
    // As a run leaves it that is stopped right after its first checkpoint.
    fs::remove_file(path.join("latest")).expect("a file");
    assert_eq!(latest(path).expect("a checkpoint"), folder_of(path, 4));
    fs::write(path.join("latest"), "../elsewhere\n").expect("a file");
    let error = latest(path).unwrap_err();
    assert!(error.to_string().contains("names no checkpoint"), "{error}");
    fs::write(path.join("latest"), "step-00000009\n").expect("a file");
    assert!(
        latest(path)
            .unwrap_err()
            .to_string()
            .contains("is not there")
    );
}

/// If the latest checkpoint is damaged, the run goes on from an earlier one that is whole, and the error of the damaged one is returned.
#[test]
fn the_newest_whole_checkpoint_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    save(path, 2, &[1, 2, 3, 4], None);
    let newest = || {
        let (checkpoint, damaged) = Checkpoint::newest_whole(path, u64::MAX)?;
        Ok::<_, CheckpointError>((checkpoint.step(), damaged.len()))
    };
    assert_eq!(newest().expect("a checkpoint"), (4, 0));
    // A later one that a run went back from.
    fs::write(path.join("latest"), "step-00000003\n").expect("a file");
    assert_eq!(newest().expect("a checkpoint"), (3, 0));
    let before = Checkpoint::newest_whole(path, 3).expect("a checkpoint");
    assert_eq!(before.0.step(), 2);
    fs::remove_file(&files(path, 3)[2]).expect("a file");
    assert_eq!(newest().expect("a checkpoint"), (2, 1));
    fs::write(&files(path, 2)[0], "{").expect("a file");
    assert_eq!(newest().expect("a checkpoint"), (1, 2));
    // A damaged one that is being replaced hides none.
    let hidden = path.join(".step-00000003.replaced");
    fs::rename(folder_of(path, 3), &hidden).expect("a checkpoint");
    assert_eq!(newest().expect("a checkpoint"), (1, 2));
    fs::rename(&hidden, folder_of(path, 3)).expect("a checkpoint");
    let other = Checkpoint::of_step(&folder_of(path, 4), 3).expect_err("another step");
    let other = other.to_string();
    assert!(other.contains("no checkpoint of step 3"), "{other}");
    let index = fs::read_to_string(&files(path, 1)[0]).expect("an index");
    let newer = index.replace("\"version\":2", "\"version\":3");
    let newer = newer.replace("\"kinds\"", "\"forms\"");
    fs::write(&files(path, 1)[0], newer).expect("a file");
    let error = newest().expect_err("a newer version").to_string();
    assert!(error.contains("has version 3"), "{error}");
    fs::remove_file(&files(path, 1)[0]).expect("a file");
    let error = newest().expect_err("none is whole").to_string();
    assert!(
        error.contains("rank-00001.safetensors: cannot open"),
        "{error}"
    );
}

/// What cannot be looked at is not taken for what is not there: the run would start at step 0.
#[cfg(unix)]
#[test]
fn what_cannot_be_looked_at_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("loop");
    std::os::unix::fs::symlink("loop", &path).expect("a link");
    let none = steps(&folder.path().join("none"));
    assert!(none.expect("nothing").is_empty());
    for error in [
        steps(&path).map(drop),
        latest(&path).map(drop),
        Checkpoint::newest_whole(&path, u64::MAX).map(drop),
        Checkpoint::open(&path).map(drop),
    ] {
        let error = error.expect_err("a loop of links");
        assert!(matches!(error, CheckpointError::Io { .. }), "{error}");
    }
}

/// The rank whose folder goes away is named on all, and the checkpoint before stays.
#[test]
fn a_failed_write_is_an_error_on_every_rank() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, away) = (folder.path().join("run"), folder.path().join("away"));
    save(&path, 2, &[1], Some(1));
    let errors = world(
        2,
        |rank, mut saver| {
            // A folder in the place of the second rank's file.
            if rank == 0 {
                let wrong = Piece {
                    bytes: vec![0],
                    ..pieces(0, 2).swap_remove(0)
                };
                let error = saver.start(9, vec![wrong], json!(null)).unwrap_err();
                assert!(
                    error.to_string().contains("1 bytes for a block of"),
                    "{error}"
                );
            } else {
                let error = saver.start(9, pieces(1, 2), json!(null)).unwrap_err();
                assert!(error.to_string().contains("rank 0"), "{error}");
            }
            let both = pieces(rank, 2).into_iter().chain(pieces(rank, 2)).collect();
            let error = saver.start(9, both, json!(null)).unwrap_err().to_string();
            assert!(error.contains("pieces that overlap on one rank"), "{error}");
            // The folder is not where it was.
            let move_it = |from: &Path, to: &Path| {
                if rank == 0 {
                    fs::rename(from, to).expect("a folder");
                }
            };
            move_it(&path, &away);
            let error = saver.start(2, pieces(rank, 2), json!(null)).unwrap_err();
            move_it(&away, &path);
            error.to_string()
        },
        &path,
        Some(1),
    );
    assert!(errors[1].contains("was not saved: rank 0"), "{errors:?}");
    assert_eq!(latest(&path).expect("a checkpoint"), folder_of(&path, 1));
    Checkpoint::latest(&path)
        .expect("a checkpoint")
        .verify()
        .expect("it is whole");
}

/// Between the two renames that replace a checkpoint `latest` names what is there under its other name, and the next run puts it
/// back.
#[test]
fn a_step_that_is_being_replaced_is_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    save(path, 2, &[5], None);
    let hidden = path.join(".step-00000005.replaced");
    fs::rename(folder_of(path, 5), &hidden).expect("a checkpoint");
    let left = [
        ".step-00000005.0123abcd.unfinished",
        ".step-00000005.unfinished",
    ];
    let left = left.map(|name| path.join(name));
    for left in &left {
        fs::create_dir(left).expect("a folder");
    }
    let found = Checkpoint::latest(path).expect("a checkpoint");
    assert_eq!((found.folder(), found.step()), (hidden.as_path(), 5));
    world(2, |_, saver| drop(saver), path, None);
    assert_eq!(latest(path).expect("a checkpoint"), folder_of(path, 5));
    assert!(!left.iter().any(|left| left.exists()) && !hidden.exists());
}

/// What a process that was killed had made to see whether it can is removed by the next one, and nothing of anybody else.
#[test]
fn no_question_of_a_killed_run_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let made = |names: &[&str]| {
        for name in names {
            fs::write(folder.path().join(name), "").expect("a file");
        }
    };
    let left = || {
        let names = fs::read_dir(folder.path()).expect("a folder").flatten();
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<String> = names.filter(|name| name != ".lock").collect();
        names.sort();
        names
    };
    made(&[".lowp-probe-17", ".lowp-probe-of-mine", ".probe-01ab"]);
    check_writable(&folder.path().join("a/b")).expect("folders that can be made");
    assert_eq!(left(), [".lowp-probe-of-mine", ".probe-01ab"]);
    made(&[".lowp-probe-17", ".probe-01ab.1", "probe"]);
    fs::write(folder.path().join(".probe-full"), "words").expect("a file");
    world(2, |_, saver| drop(saver), folder.path(), None);
    assert_eq!(left(), [".probe-full", "probe"]);
}

/// Two runs that save to one folder would mix their checkpoints.
#[test]
fn a_folder_is_of_one_run_at_a_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let control = || threads(1, PATIENCE).swap_remove(0);
    let first = Saver::new(control(), folder.path(), None).expect("a folder");
    let error = Saver::new(control(), folder.path(), None).unwrap_err();
    assert!(
        error.to_string().contains("another run writes to"),
        "{error}"
    );
    let error = check_writable(folder.path()).expect_err("a locked folder");
    assert!(matches!(error, CheckpointError::InUse { .. }), "{error}");
    drop(first);
    Saver::new(control(), folder.path(), None).expect("it is free");
}

/// Whether a run can save to a folder is known before it is made, and nothing is left of the question.
#[test]
fn a_folder_is_asked_before_it_is_made() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    check_writable(folder.path()).expect("a folder");
    check_writable(&at("a/b/c")).expect("folders that can be made");
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
    fs::write(at("file"), "").expect("a file");
    #[cfg(unix)]
    std::os::unix::fs::symlink("nowhere", at("link")).expect("a link");
    for name in ["file", "file/a", "file/a/b", "link/a"] {
        let made = fs::create_dir_all(at(name));
        let found = check_writable(&at(name)).expect_err(name).to_string();
        assert!(
            made.is_err() && found.contains("cannot create"),
            "{name}: {found}"
        );
    }
}

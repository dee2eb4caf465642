//! What is saved can be read again, and runs that cannot lock their folder leave each other alone.

use super::*;
use crate::index::FileRecord;
use crate::writer::MAX_HEADER;
use crate::{Block, Checkpoint, Dtype, folder_of, latest};
use lowp_shard::threads;
use serde_json::json;

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

/// Saves steps of as many pieces and with what stands beside them, by `ranks` ranks; how each save of the first rank and of the last ended.
fn save(folder: &Path, ranks: usize, steps: &[(usize, Value)]) -> Vec<[Result<u64, String>; 2]> {
    let run = |rank: usize, control: Arc<dyn Control>| {
        let mut saver = Saver::new(control, folder, None).expect("a folder");
        let steps = (1u64..).zip(steps);
        let save = |(step, (count, about)): (u64, &(usize, Value))| {
            let started = saver.start(step, pieces(*count, rank, ranks), about.clone());
            let saved = started.and_then(|()| saver.finish());
            saved.map(|_| step).map_err(|error| error.to_string())
        };
        steps.map(save).collect::<Vec<_>>()
    };
    thread::scope(|scope| {
        let controls = threads(ranks, PATIENCE).into_iter().enumerate();
        let ranks: Vec<_> = controls
            .map(|(rank, control)| scope.spawn(move || run(rank, control)))
            .collect();
        let mut ended = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
        let first = ended.next().expect("a rank");
        let last = ended.last().unwrap_or_else(|| first.clone());
        first.into_iter().zip(last).map(<[_; 2]>::from).collect()
    })
}

/// The hidden names in `folder`.
fn hidden(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).expect("a folder").flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names
        .filter(|name| name.starts_with('.') && name != ".lock")
        .collect()
}

/// What could not be opened again is refused on every rank, with the numbers, and the checkpoint before stays.
#[test]
fn what_could_not_be_read_is_not_saved() {
    let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
    let cases = [
        (16, (1000, json!(1)), "the index of 16000 pieces", MAX_INDEX),
        (
            1,
            (12_000, json!(1)),
            "the header of 12000 pieces",
            MAX_HEADER,
        ),
        (2, (1, deep), "cannot be read again: recursion limit", 0),
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

/// Ten million pieces of a large model fit an index that is read.
#[test]
fn a_piece_takes_few_bytes_of_the_index() {
    let (ranks, tensors) = (32, 100);
    let each = 100_000_000_000;
    let piece = |rank: usize, number: usize| {
        let name = format!("layers.{number}.feed_forward.w2.columnwise_data");
        let block = Block::of_row(rank * each, each);
        (name, Dtype::U8, [1, ranks * each], block, checksum(&[7]))
    };
    let written = |rank: usize| Written {
        file: FileRecord {
            name: crate::index::file_name(rank),
            bytes: each as u64,
        },
        pieces: (0..tensors).map(|number| piece(rank, number)).collect(),
    };
    let written = (0..ranks).map(written).collect();
    let index = Index::new((checksum(&[]), 1), written, json!({})).expect("an index");
    let text = index.render().expect("a text");
    assert_eq!(
        Index::parse(&text, Path::new("index.json")).expect("it is read"),
        index
    );
    let bytes = text.len() / index.pieces();
    assert!(bytes * 10_000_000 < 1 << 30, "{bytes} bytes a piece");
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

//! The example: a run that was broken off and resumed is the unbroken one, to the bit.

#[path = "../../examples/own_network.rs"]
mod example;

use std::fs;
use std::path::Path;

use lowp_checkpoint::Checkpoint;
use lowp_comm::RanksFailed;
use lowp_train::TrainError;
use lowp_train::result::RunResult;

/// The example says so itself.
#[test]
fn the_example_runs() {
    example::main().expect("the example");
}

#[test]
fn a_resumed_run_is_the_unbroken_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let [unbroken, broken] = ["unbroken", "broken"].map(|name| folder.path().join(name));
    let all = example::train(&unbroken, 24).expect("a run");
    assert_eq!(all.len(), 24);
    assert!(all[23] < 0.9 * all[0], "{all:?}");
    let begun = example::train(&broken, 7).expect("a run");
    assert_eq!(begun, all[..7]);
    assert_eq!(example::train(&broken, 24).expect("a run"), all);
    // Masters, moments, codes and scales, and the losses.
    let [unbroken, broken] = [unbroken, broken].map(|folder| saved(&folder));
    assert!(unbroken.iter().all(|bytes| bytes.len() > 1 << 13));
    assert!(unbroken == broken);
}

/// A folder in which another run saves: every rank has an error of the input, and the first rank that of the folder.
#[test]
fn a_folder_that_another_run_has_is_an_error_of_the_input() {
    let folder = tempfile::tempdir().expect("a folder");
    let _lock = lowp_checkpoint::lock(&folder.path().join("mxfp8-seed0")).expect("a lock");
    let error = example::train(folder.path(), 3).expect_err("another run has it");
    let failed = error.downcast::<RanksFailed<RunResult, TrainError>>();
    let failed = failed.expect("the errors of ranks");
    assert_eq!(failed.rank, 0);
    let others = failed.others.into_iter().map(|(_, other)| other);
    let others = others.map(|other| other.expect_err("another run has it"));
    let text = "another run writes to this folder";
    let all: Vec<TrainError> = others.chain([failed.cause]).collect();
    for (error, rank) in all.iter().zip(["rank 0: ", ""]) {
        assert!(error.is_input(), "{error:?}");
        let text = format!("mxfp8-seed0: {text}");
        let said = error.to_string();
        assert!(said.contains(&text) && said.contains(rank), "{said}");
    }
    assert_eq!(all.len(), 2);
}

/// The bytes of all tensors in the last checkpoint, by file. The header before them has the checkpoint's random number.
fn saved(folder: &Path) -> Vec<Vec<u8>> {
    let checkpoint = Checkpoint::latest(&folder.join("mxfp8-seed0")).expect("a checkpoint");
    assert_eq!(checkpoint.step(), 24);
    let file = |rank: usize| {
        checkpoint
            .folder()
            .join(format!("rank-0000{rank}.safetensors"))
    };
    let tensors = |rank: usize| {
        let bytes = fs::read(file(rank)).expect("bytes");
        let (header, rest) = bytes.split_first_chunk().expect("a header");
        let header = usize::try_from(u64::from_le_bytes(*header)).expect("a length");
        rest[header..].to_vec()
    };
    (0..2).map(tensors).collect()
}

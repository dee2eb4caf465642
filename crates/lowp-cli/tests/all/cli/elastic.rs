//! A command that is started again whenever it stops: ranks are killed, and others go on from the newest whole checkpoint.

use super::stopped_runs::latest_step;
use super::world::{Launcher, as_rank, free_port};
use super::{Outcome, command, lowp, path, tiny, train_json};
use crate::support::exhaustive;
use lowp_checkpoint::{Block, Checkpoint, folder_of};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Arguments of a run that does not end during the test, and saves to `folder` after every step.
fn endless(folder: &Path, more: &[&str]) -> Vec<String> {
    let folder = path(folder);
    let run = [
        "--recipe",
        "nvfp4-2d",
        "--no-baseline",
        "--steps",
        "1000000",
    ];
    let save = ["--save", &folder, "--save-every", "1", "--resume", "latest"];
    let keep: &[&str] = match more.contains(&"--keep") {
        true => &[],
        false => &["--keep", "2"],
    };
    tiny(&[&run[..], &save, keep, more].concat())
}

/// The ranks of a world, as torchrun starts them for the `restart`th time.
fn start(world: usize, restart: usize, args: &[String]) -> Vec<Child> {
    let port = free_port();
    let start = |rank| {
        as_rank(command(), Launcher::Torchrun, port, [rank, world], args)
            .env("TORCHELASTIC_RUN_ID", "elastic")
            .env("TORCHELASTIC_RESTART_COUNT", restart.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("lowp starts")
    };
    (0..world).map(start).collect()
}

/// All tensors of the latest checkpoint of a run, and its step.
fn content(run: &Path) -> (u64, BTreeMap<String, Vec<u8>>) {
    let checkpoint = Checkpoint::latest(run).expect("a checkpoint");
    checkpoint.verify().expect("it is whole");
    let whole = |tensor: lowp_checkpoint::TensorInfo<'_>| {
        let block = Block::whole(tensor.shape);
        let bytes = checkpoint.read(tensor.name, tensor.dtype, tensor.shape, block);
        (tensor.name.to_owned(), bytes.expect("a tensor"))
    };
    (checkpoint.step(), checkpoint.tensors().map(whole).collect())
}

/// Pseudo-random delays, so that kills hit any part of a step.
fn random(seed: usize, below: usize) -> usize {
    (seed.wrapping_mul(0x9e37_79b9).rotate_left(13) ^ seed.wrapping_mul(7919)) % below
}

/// Kills ranks of `kills` worlds, each of as many ranks as `world` says. The steps that each of them saved; the last one ends by itself.
fn killed(folder: &Path, kills: usize, world: impl Fn(usize) -> usize) -> Vec<u64> {
    let run = folder.join("nvfp4-2d-seed0");
    let mut steps = vec![0];
    for kill in 0..kills {
        let before = steps[kill];
        let ranks = world(kill);
        let mut ranks = start(ranks, kill, &endless(folder, &[]));
        let begun = Instant::now();
        while latest_step(&run) <= before {
            let waited = begun.elapsed() < Duration::from_secs(60);
            assert!(waited, "kill {kill}: no checkpoint after step {before}");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(random(kill, 60_000) as u64));
        // One of them, or two.
        for victim in 0..1 + kill % 2 {
            let victim = random(kill + 31 * victim, ranks.len());
            ranks[victim].kill().expect("an end");
        }
        let killed = Instant::now();
        for mut rank in ranks {
            let end = rank.wait().expect("an end");
            assert!(!end.success(), "kill {kill}");
        }
        let took = killed.elapsed();
        assert!(took < Duration::from_secs(20), "kill {kill}: {took:?}");
        steps.push(latest_step(&run));
    }
    let last = steps[kills] + 2;
    let stop = ["--stop-after", &last.to_string()];
    for mut rank in start(world(kills), kills, &endless(folder, &stop)) {
        assert!(rank.wait().expect("an end").success());
    }
    steps.push(last);
    steps
}

/// The content of the run that makes the steps between two of `steps` on so many ranks each, and is never killed.
fn unbroken(steps: &[u64], world: impl Fn(usize) -> usize) -> (u64, BTreeMap<String, Vec<u8>>) {
    let folder = tempfile::tempdir().expect("a folder");
    for (number, last) in steps[1..].iter().enumerate() {
        let (ranks, last) = (world(number).to_string(), last.to_string());
        let stop = ["--world-size", &ranks, "--stop-after", &last];
        let outcome = lowp(&endless(folder.path(), &stop));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    }
    content(&folder.path().join("nvfp4-2d-seed0"))
}

fn kills() -> usize {
    if exhaustive() { 20 } else { 3 }
}

/// The run is the one that was never stopped, to the bit.
#[test]
fn killed_ranks_change_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let steps = killed(folder.path(), kills(), |_| 3);
    let found = content(&folder.path().join("nvfp4-2d-seed0"));
    let last = *steps.last().expect("an end");
    assert!(
        found == unbroken(&[0, last], |_| 3),
        "other bits after {steps:?}"
    );
}

/// Other numbers of ranks go on with what was saved: the run is the one that was stopped there, and not killed.
#[test]
fn any_number_of_ranks_goes_on() {
    let world = |number: usize| [3, 1, 4, 2][number % 4];
    let folder = tempfile::tempdir().expect("a folder");
    let steps = killed(folder.path(), kills(), world);
    let found = content(&folder.path().join("nvfp4-2d-seed0"));
    assert!(
        found == unbroken(&steps, world),
        "other bits after {steps:?}"
    );
}

/// A damaged newer checkpoint is skipped with a note.
#[test]
fn the_newest_whole_checkpoint_counts() {
    let folder = tempfile::tempdir().expect("a folder");
    // All are kept, so that there are some before those that are damaged.
    let args = |last| endless(folder.path(), &["--keep", "9", "--stop-after", last]);
    let Outcome { code, stderr, .. } = lowp(&args("3"));
    assert_eq!(code, Some(0), "{stderr}");
    let note = "no checkpoint to resume from; the run starts at step 0";
    assert!(stderr.contains(note), "{stderr}");
    let run = folder.path().join("nvfp4-2d-seed0");
    let file = folder_of(&run, 3).join("rank-00001.safetensors");
    let bytes = fs::read(&file).expect("a file");
    fs::write(&file, &bytes[1..]).expect("a file");
    let Outcome { code, stderr, .. } = lowp(&args("4"));
    assert_eq!(code, Some(0), "{stderr}");
    let note = "nvfp4-2d: left out to resume: ";
    assert!(
        stderr.contains(note) && stderr.contains("step-00000003"),
        "{stderr}"
    );
    assert_eq!(content(&run).0, 4);
    assert!(content(&run) == unbroken(&[0, 4], |_| 2), "other bits");
    // A flipped byte: only the checksum shows it.
    let file = folder_of(&run, 4).join("rank-00001.safetensors");
    let mut bytes = fs::read(&file).expect("a file");
    *bytes.last_mut().expect("a byte") ^= 1;
    fs::write(&file, bytes).expect("a file");
    let earlier = lowp(&args("5"));
    assert_eq!(earlier.code, Some(0), "{}", earlier.stderr);
    assert!(
        earlier.stderr.contains("step-00000004"),
        "{}",
        earlier.stderr
    );
    assert!(content(&run) == unbroken(&[0, 5], |_| 2), "other bits");
    // If every checkpoint is damaged it is an error, not a new run.
    for step in lowp_checkpoint::steps(&run).expect("a folder") {
        let file = folder_of(&run, step).join("rank-00001.safetensors");
        fs::write(file, "").expect("a file");
    }
    let Outcome { code, stderr, .. } = lowp(&args("6"));
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("the checkpoint is damaged"), "{stderr}");
}

#[test]
fn latest_needs_a_folder() {
    let Outcome { code, stderr, .. } = lowp(&tiny(&["--resume", "latest"]));
    assert_eq!(code, Some(2), "{stderr}");
    assert!(
        stderr.contains("--resume latest resumes from the folder of --save"),
        "{stderr}"
    );
    // Starting a finished run again gives the same result.
    let folder = tempfile::tempdir().expect("a folder");
    let saved = path(folder.path());
    let args = [
        "--no-baseline",
        "--steps",
        "2",
        "--save",
        &saved,
        "--resume",
        "latest",
    ];
    let [first, again] = [(); 2].map(|()| train_json(&args));
    assert_eq!(first["runs"][0]["val_loss"], again["runs"][0]["val_loss"]);
    assert_eq!(again["runs"][0]["resumed_at"], 2);
}

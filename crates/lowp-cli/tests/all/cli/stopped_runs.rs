//! Runs that are killed, or have no room to save, leave the latest checkpoint that was whole.

use super::bad_input::rejected;
use super::{command, path, tiny, train_json};
use crate::support::exhaustive;
use crate::support::hidden::hidden;
use lowp_checkpoint::{Checkpoint, folder_of, latest, lock, steps};
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ENDLESS: [&str; 5] = [
    "--steps",
    "1000000",
    "--recipe",
    "nvfp4-2d",
    "--no-baseline",
];

/// A run without end, which ends with the test.
struct Endless(Child);

impl Endless {
    fn start(args: &[&str]) -> Self {
        Self::saying(args, Stdio::null())
    }

    /// With this standard error.
    fn saying(args: &[&str], stderr: Stdio) -> Self {
        let mut command = command();
        command
            .args(tiny(&[&ENDLESS[..], args].concat()))
            .stdout(Stdio::null())
            .stderr(stderr);
        Self(command.spawn().expect("lowp starts"))
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A run without end that saves to `folder` after every step.
fn endless(folder: &Path, resume: bool) -> Endless {
    let folder = path(folder);
    let mut args = vec!["--save", &folder, "--save-every", "1", "--keep", "2"];
    if resume {
        args.extend(["--resume", &folder]);
    }
    Endless::start(&args)
}

/// The step of the latest checkpoint of `run`, or 0.
pub(super) fn latest_step(run: &Path) -> u64 {
    let found = latest(run).ok();
    let name = found.and_then(|found| Some(found.file_name()?.to_str()?.to_owned()));
    let step = name.and_then(|name| name.strip_prefix("step-")?.parse().ok());
    step.unwrap_or(0)
}

/// Killed at any moment of its saves, a run leaves a latest checkpoint that is whole, and what it left unfinished does not keep
/// the next one from going on.
#[test]
fn killed_runs_leave_a_whole_checkpoint() {
    let kills = if exhaustive() { 200 } else { 12 };
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("nvfp4-2d-seed0");
    let mut step = 0;
    for kill in 0..kills {
        let mut child = endless(folder.path(), kill > 0);
        let begun = Instant::now();
        while latest_step(&run) <= step {
            let waited = begun.elapsed() < Duration::from_secs(60);
            assert!(waited, "nothing was saved after step {step}");
            std::thread::sleep(Duration::from_millis(1));
        }
        // Microseconds that have nothing to do with the length of a step.
        std::thread::sleep(Duration::from_micros(1 + (kill * 7919) % 40_000));
        child.0.kill().expect("a run");
        child.0.wait().expect("an end");
        let checkpoint = Checkpoint::latest(&run).and_then(|checkpoint| {
            checkpoint.verify()?;
            Ok(checkpoint)
        });
        let checkpoint = checkpoint.unwrap_or_else(|error| panic!("kill {kill}: {error}"));
        assert!(checkpoint.step() > step, "kill {kill}");
        step = checkpoint.step();
    }
    let (saved, last) = (path(folder.path()), (step + 2).to_string());
    let stop = ["--stop-after", &last, "--resume", &saved, "--save", &saved];
    let document = train_json(&[&ENDLESS[..], &stop].concat());
    assert_eq!(document["runs"][0]["resumed_at"], step);
    assert_eq!(latest_step(&run), step + 2);
}

/// A run that is asked to end removes the checkpoint that it is writing.
#[test]
fn no_unfinished_checkpoint_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("nvfp4-2d-seed0");
    let unfinished = || {
        let mut names = if run.exists() {
            hidden(&run)
        } else {
            Vec::new()
        };
        names.retain(|name| name.ends_with(".unfinished"));
        names
    };
    for (round, signal) in ["-TERM", "-USR1", "-TERM"].into_iter().enumerate() {
        let mut child = endless(folder.path(), round > 0);
        let begun = Instant::now();
        let saves = || latest_step(&run) > 0 && !unfinished().is_empty();
        while !saves() {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "nothing is saved"
            );
        }
        let sent = Command::new("kill")
            .args([signal, &child.0.id().to_string()])
            .status();
        assert!(sent.expect("kill runs").success());
        let ended = child.0.wait().expect("an end");
        assert_eq!(ended.code(), None, "{signal} ends it");
        assert_eq!(unfinished(), [""; 0], "{signal}");
        let checkpoint = Checkpoint::latest(&run).expect("a checkpoint");
        checkpoint.verify().expect("it is whole");
    }
}

/// While a run logs to a folder no other one does.
#[test]
fn a_log_is_of_one_run_at_a_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let logs = path(folder.path());
    let log = ["--log-dir", &logs];
    let first = Endless::start(&log);
    let lines = folder.path().join("nvfp4-2d-seed0/metrics.jsonl");
    let begun = Instant::now();
    while !lines.exists() {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "nothing is logged"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    let second = [&["--steps", "2"], &ENDLESS[2..], &log].concat();
    let second = command().args(tiny(&second)).output();
    drop(first);
    let second = second.expect("lowp starts");
    let text = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{text}");
    let said = "another run writes to this folder";
    assert!(text.contains("--log-dir") && text.contains(said), "{text}");
}

/// Of runs that begin at once one saves, and the others say why they do not.
#[test]
fn runs_that_begin_at_once_save_one_at_a_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = path(folder.path());
    let save = ["--save", &saved, "--save-every", "1", "--keep", "2"];
    let mut runs: Vec<Endless> = (0..6)
        .map(|_| Endless::saying(&save, Stdio::piped()))
        .collect();
    let begun = Instant::now();
    let mut ended = Vec::new();
    while runs.len() > 1 {
        let waited = begun.elapsed() < Duration::from_secs(60);
        assert!(waited, "{} runs save to one folder", runs.len());
        std::thread::sleep(Duration::from_millis(5));
        let is_done = |run: &mut Endless| run.0.try_wait().expect("a run").is_some();
        ended.extend(runs.extract_if(.., is_done));
    }
    assert_eq!(runs.len(), 1, "nobody saves");
    for mut run in ended {
        let mut text = String::new();
        let mut stderr = run.0.stderr.take().expect("a pipe");
        stderr.read_to_string(&mut text).expect("UTF-8");
        assert_eq!(run.0.wait().expect("an end").code(), Some(2), "{text}");
        let said = "nvfp4-2d-seed0: another run writes to this folder";
        assert!(text.contains(said), "{text}");
    }
}

/// A folder that another run takes while the run before trains: the arguments did work.
#[test]
fn a_folder_that_is_taken_later_is_a_failure_of_the_work() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = path(folder.path());
    let args = ["--compare", "mxfp8,nvfp4-2d", "--no-baseline"];
    let more = ["--steps", "200", "--save", &saved];
    let first = command()
        .args(tiny(&[&args[..], &more].concat()))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let first = first.expect("lowp starts");
    let begun = Instant::now();
    while !folder.path().join("mxfp8-seed0/.lock").exists() {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing begins");
        std::thread::sleep(Duration::from_millis(1));
    }
    let lock = lock(&folder.path().join("nvfp4-2d-seed0")).expect("a lock");
    let output = first.wait_with_output().expect("an end");
    drop(lock);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in [
        "1 of 2 runs finished: nvfp4-2d",
        "another run writes to this folder",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// What names the latest checkpoint is damaged: a run that is started again goes on from the newest whole one, and writes it anew.
#[test]
fn a_damaged_latest_is_mended() {
    let folder = tempfile::tempdir().expect("a folder");
    let (run, saved) = (folder.path().join("mxfp8-seed0"), path(folder.path()));
    let args = ["--recipe", "mxfp8", "--no-baseline", "--steps", "6"];
    let args = [&args[..], &["--save", &saved, "--save-every", "2"]].concat();
    train_json(&[&args[..], &["--stop-after", "4"]].concat());
    let name = run.join("latest");
    for damaged in ["", "step-00000009\n", "step-00000004 and more"] {
        for stop in ["4", "6"] {
            fs::write(&name, damaged).expect("a file");
            let resume = |from: &str, code| {
                let given = [&args[..], &["--resume", from, "--stop-after", stop]].concat();
                let output = command().args(tiny(&given)).output().expect("lowp starts");
                let text = String::from_utf8_lossy(&output.stderr).into_owned();
                assert_eq!(output.status.code(), Some(code), "{damaged:?}: {text}");
                text
            };
            let text = resume(&saved, 2);
            let remedy = "; or resume from step 4, the newest whole checkpoint there: with --resume latest and the --save that the run had";
            assert!(text.contains(remedy), "{damaged:?}: {text}");
            let text = resume("latest", 0);
            for part in [
                "mxfp8: left out to resume: ",
                "mxfp8: resumes from step 4, the newest whole checkpoint",
            ] {
                assert!(text.contains(part), "{damaged:?}: {part}: {text}");
            }
            let mended = fs::read_to_string(&name).expect("a file");
            assert_eq!(mended, format!("step-0000000{stop}\n"), "{damaged:?}");
        }
        fs::remove_dir_all(folder_of(&run, 6)).expect("a folder");
    }
}

/// A run that begins anew does not save among the checkpoints of another.
#[test]
fn an_earlier_run_is_not_overwritten() {
    let folder = tempfile::tempdir().expect("a folder");
    let args = tiny(&[
        "--steps",
        "2",
        "--no-baseline",
        "--save",
        &path(folder.path()),
    ]);
    let run = || command().args(&args).output().expect("lowp starts");
    assert_eq!(run().status.code(), Some(0));
    let again = run();
    let text = String::from_utf8_lossy(&again.stderr);
    assert_eq!(again.status.code(), Some(2), "{text}");
    assert!(
        text.contains("of an earlier run, up to step 2; resume from them with --resume"),
        "{text}"
    );
}

/// Without room on the disk the run ends with the file and the cause, and its last whole checkpoint stays.
#[test]
fn a_full_disk_ends_the_run_with_its_cause() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = path(folder.path());
    let args = [
        "--recipe",
        "mxfp8",
        "--no-baseline",
        "--save",
        &saved,
        "--save-every",
        "2",
    ];
    train_json(&[&args[..], &["--steps", "6", "--stop-after", "2"]].concat());
    // No file of more than some KiB, which is an error of the write and not a signal.
    let mut limited = limited("ulimit -f 16");
    let more = ["--steps", "6", "--resume", &saved];
    let output = limited
        .args(tiny(&[&args[..], &more].concat()))
        .output()
        .expect("sh starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in [
        "the checkpoint of step 4 was not saved",
        "rank-0000",
        "cannot write the file: File too large",
        "bytes were written; allow larger files (ulimit -f)",
        "earlier checkpoints are unchanged",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let run = folder.path().join("mxfp8-seed0");
    let checkpoint = Checkpoint::latest(&run).expect("the one before");
    assert_eq!(checkpoint.step(), 2);
    checkpoint.verify().expect("it is whole");
    assert_eq!(hidden(&run), [".lock"]);
}

/// `lowp` with a limit of the shell.
fn limited(limit: &str) -> Command {
    let mut command = Command::new("sh");
    let script = format!("{limit}; exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_lowp")]);
    command
}

/// A checkpoint is saved once it is the latest, also where the one of its step that it replaced cannot be removed.
#[test]
fn what_was_replaced_and_stays_is_no_failure() {
    let folder = tempfile::tempdir().expect("a folder");
    let (run, saved) = (folder.path().join("mxfp8-seed0"), path(folder.path()));
    let args = [
        "--recipe",
        "mxfp8",
        "--no-baseline",
        "--save",
        &saved,
        "--steps",
        "4",
    ];
    train_json(&[&args[..], &["--save-every", "2"]].concat());
    // Deeper than a process of so few descriptors can remove.
    let deep = (0..100).fold(folder_of(&run, 4), |path, _| path.join("d"));
    fs::create_dir_all(deep).expect("a folder");
    let damage = || {
        let file = folder_of(&run, 4).join("rank-00000.safetensors");
        fs::write(file, "").expect("a file");
    };
    damage();
    let output = limited("ulimit -n 60")
        .args(tiny(&[&args[..], &["--resume", "latest"]].concat()))
        .output()
        .expect("sh starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert_eq!(hidden(&run), [".lock", ".step-00000004.replaced"]);
    let note = "mxfp8: an old checkpoint stays until the next run that saves there removes it: ";
    let lines = text.lines().filter(|line| line.starts_with(note));
    let lines: Vec<&str> = lines.collect();
    assert!(
        lines.len() == 1 && lines[0].contains(".step-00000004.replaced: cannot remove: "),
        "{text}"
    );
    let checkpoint = Checkpoint::latest(&run).expect("the new one");
    assert!(checkpoint.step() == 4 && checkpoint.verify().is_ok());
    // The next run removes it.
    damage();
    train_json(&[&args[..], &["--resume", "latest"]].concat());
    assert_eq!(hidden(&run), [".lock"]);
}

/// Where nothing can be created the run does not begin.
#[test]
fn a_folder_that_cannot_be_is_an_error_before_training() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    fs::write(&file, "").expect("a file");
    let output = command()
        .args(tiny(&["--save", &path(&file.join("below"))]))
        .output();
    let output = output.expect("lowp starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("--save") && text.contains("cannot create") && !text.contains("  step "),
        "{text}"
    );
    assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1);
    // A folder where a file is to be; and one that takes no files, which is named, and not a file that was tried.
    for name in [".lock", "latest"] {
        let saved = folder.path().join("saved");
        let there = saved.join("fp32-seed0").join(name);
        fs::create_dir_all(&there).expect("a folder");
        let text = rejected(&["--save", &path(&saved)]);
        assert!(
            text.contains("a folder has its name; move it away"),
            "{text}"
        );
        fs::remove_dir_all(saved).expect("a folder");
    }
    if cfg!(target_os = "linux") {
        let text = rejected(&["--save", "/proc/self/saved"]);
        assert!(
            text.contains("/proc/self: cannot create files in this folder"),
            "{text}"
        );
    }
}

/// A run that is done and is started again, with states in fewer bits, leaves its checkpoint as it is.
#[test]
fn runs_that_are_done_are_not_saved_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = path(folder.path());
    let args = ["--steps", "2", "--recipe", "mxfp8", "--no-baseline"];
    train_json(&[&args[..], &["--save", &saved, "--save-every", "1"]].concat());
    let run = folder.path().join("mxfp8-seed0");
    let index = run.join("step-00000002").join("index.json");
    let before = fs::read(&index).expect("a checkpoint");
    let again = ["--save", &saved, "--resume", "latest"];
    let narrow = ["--optimizer-state", "master=bf16"];
    train_json(&[&args[..], &again, &narrow].concat());
    assert!(before == fs::read(&index).expect("a checkpoint"));
    // Those that are not kept are removed all the same.
    assert_eq!(steps(&run).expect("a folder"), [1, 2]);
    train_json(&[&args[..], &again, &["--keep", "1"]].concat());
    assert_eq!(steps(&run).expect("a folder"), [2]);
}

/// A run that goes back to an earlier checkpoint of its folder would mix its own with the later ones.
#[test]
fn later_checkpoints_are_of_one_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let other = tempfile::tempdir().expect("a folder");
    let saved = path(folder.path());
    let mxfp8 = ["--recipe", "mxfp8", "--no-baseline", "--steps", "4"];
    let every = ["--save-every", "2", "--save"];
    train_json(&[&mxfp8[..], &every, &[&saved]].concat());
    let run = folder.path().join("mxfp8-seed0");
    let earlier = path(&folder_of(&run, 2));
    let back = ["--resume", &earlier, "--save"];
    let args = [&mxfp8[..], &["--save-every", "2"], &back, &[&saved]].concat();
    let output = command().args(tiny(&args)).output().expect("lowp starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("has later checkpoints, up to step 4, which would mix with those of this run; resume from the last with --resume"),
        "{text}"
    );
    assert_eq!(latest_step(&run), 4);
    let other = path(other.path());
    let document = train_json(&[&mxfp8[..], &back, &[&other]].concat());
    assert_eq!(document["runs"][0]["resumed_at"], 2);
}

/// Neither a result file nor another run goes into the folder of a run.
#[test]
fn folders_of_runs_are_their_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = path(folder.path());
    let args = ["--recipe", "mxfp8", "--no-baseline", "--steps", "2"];
    train_json(&[&args[..], &["--save", &saved]].concat());
    let run = folder.path().join("mxfp8-seed0");
    let checkpoint = folder_of(&run, 2);
    let (index, latest) = (
        path(&checkpoint.join("index.json")),
        path(&run.join("latest")),
    );
    let (inside, log) = (
        path(&checkpoint.join("more")),
        path(&run.join("metrics.jsonl")),
    );
    let before = fs::read(&index).expect("an index");
    for (options, said) in [
        (
            ["--resume", &saved, "--json", &index],
            "could replace one of its files",
        ),
        (
            ["--save", &saved, "--report", &latest],
            "could replace one of its files",
        ),
        (
            ["--log-dir", &saved, "--json", &log],
            "could replace one of its files",
        ),
        (
            ["--save", &inside, "--beta2", "0.9"],
            "is inside the checkpoint",
        ),
        (
            ["--log-dir", &inside, "--beta2", "0.9"],
            "is inside the checkpoint",
        ),
    ] {
        let output = command()
            .args(tiny(&[&args[..], &options].concat()))
            .output();
        let output = output.expect("lowp starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {text}");
        assert!(text.contains(said), "{options:?}: {text}");
    }
    assert_eq!(fs::read(&index).expect("an index"), before);
}

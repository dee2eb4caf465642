//! Commands that are stopped midway, by a signal or for lack of space: nothing is left that a user would have to remove.
#![cfg(unix)]

use crate::support::hidden::hidden;
use crate::support::{Args, Bench, matrix};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;
const LONG: &str = "quantize long.safetensors -o q.safetensors --recipe nvfp4-1d";

/// A model of zeros that takes seconds, beside a short one.
fn bench() -> Bench {
    let bench = Bench::new();
    let header = r#"{"w":{"dtype":"F32","shape":[8192,16384],"data_offsets":[0,536870912]}}"#;
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend(header.as_bytes());
    let path = bench.path("long.safetensors");
    std::fs::write(&path, &start).expect("a file");
    // The zeros take no space on the disk.
    let file = std::fs::File::options().write(true).open(path);
    let length = start.len() as u64 + (1 << 29);
    file.and_then(|file| file.set_len(length)).expect("a file");
    bench.write("short.safetensors", &[matrix("w", &[64, 64], 1)]);
    bench
}

/// Waits until `reached` says so.
fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let start = Instant::now();
    while !reached() {
        assert!(start.elapsed() < Duration::from_secs(120), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Starts `command` and returns when it is at work: when its temporary holds a file.
fn started(bench: &Bench, command: Command) -> Child {
    started_with(bench, command, Stdio::null())
}

/// The same with a place for its messages.
fn started_with(bench: &Bench, mut command: Command, messages: Stdio) -> Child {
    let child = command
        .current_dir(bench.path(""))
        .stderr(messages)
        .spawn()
        .expect("lowp starts");
    let filled = |name: &String| {
        let entries = std::fs::read_dir(bench.path(name));
        entries.is_ok_and(|mut entries| entries.next().is_some())
    };
    wait_until("nothing was written", || {
        hidden(&bench.path("")).iter().any(filled)
    });
    child
}

fn lowp(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lowp"));
    command.args(line.words());
    command
}

fn send(signal: i32, child: &Child) {
    let status = Command::new("kill")
        .args([format!("-{signal}"), child.id().to_string()])
        .status();
    assert!(status.expect("kill runs").success());
}

/// Every signal that ends a process which does nothing about it: from people, watchdogs, timers, and the job schedulers
/// that send SIGUSR1 before a job's time is over.
#[test]
fn a_command_that_is_asked_to_end_leaves_nothing() {
    const SHARD: &str = "shard long.safetensors -o ranks --world-size 3 --recipe mxfp8";
    let bench = bench();
    let before = bench.listing();
    // SIGABRT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM, SIGXCPU, SIGVTALRM, SIGPROF, as Linux numbers them.
    let numbers = if cfg!(target_os = "linux") {
        &[6, 10, 12, 14, SIGTERM, 24, 26, 27][..]
    } else {
        &[SIGTERM]
    };
    let all = numbers.iter().map(|&signal| (signal, LONG));
    for (signal, line) in all.chain([(SIGTERM, SHARD)]) {
        let mut child = started(&bench, lowp(line));
        send(signal, &child);
        let status = child.wait().expect("lowp ends");
        // As the shell, or a job scheduler, expects of a process that was stopped.
        assert_eq!(status.signal(), Some(signal), "{line}: {status}");
        assert_eq!(bench.listing(), before, "{line}, signal {signal}");
    }
}

/// Whenever the signal comes, the folder is there with all its files, or it is not there.
#[test]
fn a_folder_is_whole_or_not_there() {
    let bench = Bench::new();
    bench.write("short.safetensors", &[matrix("w", &[64, 64], 1)]);
    let line = "shard short.safetensors -o ranks --world-size 4 --recipe mxfp8";
    let start = Instant::now();
    bench.done(line);
    let whole = std::fs::read_dir(bench.path("ranks"))
        .expect("a folder")
        .count();
    let time = start.elapsed();
    for round in 0..60u32 {
        std::fs::remove_dir_all(bench.path("ranks")).ok();
        let mut child = lowp(line)
            .current_dir(bench.path(""))
            .spawn()
            .expect("lowp starts");
        // Most of the time towards the end, where the folder gets its name.
        std::thread::sleep(time * (40 + round) / 80);
        send(SIGTERM, &child);
        child.wait().expect("lowp ends");
        assert_eq!(hidden(&bench.path("")), [""; 0], "round {round}");
        if let Ok(files) = std::fs::read_dir(bench.path("ranks")) {
            assert_eq!(files.count(), whole, "round {round}");
        }
    }
}

#[test]
fn what_a_killed_command_left_is_removed_by_the_next() {
    let bench = bench();
    let mut child = started(&bench, lowp(LONG));
    let left = hidden(&bench.path(""));
    assert_eq!(left.len(), 1, "{left:?}");

    // While the command runs, its folder is its own.
    let other = "quantize short.safetensors -o q.safetensors --recipe mxfp8";
    bench.done(other);
    assert_eq!(hidden(&bench.path("")), left);

    send(SIGKILL, &child);
    assert_eq!(child.wait().expect("lowp ends").signal(), Some(SIGKILL));
    assert_eq!(hidden(&bench.path("")), left, "a kill cannot be answered");
    bench.done(other);
    assert_eq!(hidden(&bench.path("")), [""; 0]);
}

/// `nohup` starts a command with SIGHUP ignored, and a shell its background jobs with SIGINT.
#[test]
fn a_signal_that_was_ignored_stays_ignored() {
    let bench = bench();
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' HUP INT; exec \"$@\"", "sh"])
        .arg(env!("CARGO_BIN_EXE_lowp"))
        .args(LONG.words());
    let mut child = started(&bench, command);
    for ignored in [1, 2] {
        send(ignored, &child);
    }
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(child.try_wait().expect("a status"), None, "it ended");
    send(SIGTERM, &child);
    assert_eq!(child.wait().expect("lowp ends").signal(), Some(SIGTERM));
    assert_eq!(hidden(&bench.path("")), [""; 0]);
}

/// `lowp LINE` where no file may have more than `blocks` blocks of the shell, which is an error of the write and no signal.
fn limited(bench: &Bench, blocks: usize, line: &str) -> (Option<i32>, String) {
    let output = Command::new("sh")
        .args(["-c", &format!("ulimit -f {blocks}; exec \"$0\" {line}")])
        .arg(env!("CARGO_BIN_EXE_lowp"))
        .current_dir(bench.path(""))
        .output()
        .expect("lowp runs");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), message)
}

/// A limit on the size of files stands for a full disk: whatever a command writes, the error says which file, how much of it there is and
/// what to do, and nothing is left.
#[test]
fn a_file_that_cannot_be_completed() {
    let bench = Bench::new();
    bench.write("medium.safetensors", &[matrix("w.weight", &[512, 512], 1)]);
    bench.done("quantize medium.safetensors -o q.safetensors --recipe fp8-current");
    bench.done("shard medium.safetensors -o ranks --recipe fp8-current --world-size 2");
    bench.done("export q.safetensors -o hub --to compressed-tensors");
    let train = "train --steps 2 --dim 32 --layers 1 --heads 1 --seq 16 --batch 2 --no-baseline";
    let train = train.to_owned();
    for (blocks, line, file) in [
        (
            100,
            "quantize medium.safetensors -o x --recipe mxfp8",
            "x/model.safetensors",
        ),
        (
            100,
            "quantize medium.safetensors -o x.safetensors --recipe mxfp8",
            "x.safetensors",
        ),
        (
            100,
            "dequantize q.safetensors -o x.safetensors",
            "x.safetensors",
        ),
        (
            100,
            "shard medium.safetensors -o x --world-size 3 --recipe mxfp8",
            "x/rank-0000",
        ),
        (100, "unshard ranks -o x.safetensors", "x.safetensors"),
        (
            100,
            "export q.safetensors -o x --to deepseek",
            "x/model.safetensors",
        ),
        (
            100,
            "export q.safetensors -o x --to bf16",
            "x/model.safetensors",
        ),
        (100, "import hub -o x.safetensors", "x.safetensors"),
        (1, &format!("{train} --json x.json"), "x.json"),
        (1, &format!("{train} --report x.html"), "x.html"),
    ] {
        let before = bench.listing();
        let (code, message) = limited(&bench, blocks, line);
        assert_eq!(code, Some(1), "{line}: {message}");
        let said = message.lines().last().unwrap_or_default();
        for part in [
            "cannot write",
            file,
            "too large",
            "bytes of it there",
            "(ulimit -f)",
        ] {
            assert!(said.contains(part), "{line}: {part}: {message}");
        }
        assert_eq!(bench.listing(), before, "{line}");
    }
    let (code, message) = limited(&bench, 1, "help train > out");
    assert_eq!(code, Some(1), "{message}");
    assert!(
        message.contains("cannot write to standard output"),
        "{message}"
    );
}

/// The exit code and the message of a command that ended.
fn ended(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().expect("lowp ends");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), message)
}

/// What another process writes to an input, or takes off its end, ends whoever reads it: with one line, and nothing left.
#[cfg(target_os = "linux")]
#[test]
fn an_input_that_changes_while_it_is_read() {
    use std::os::unix::fs::FileExt;
    const FOLDER: &str = "quantize long.safetensors -o quantized --recipe mxfp8";
    const SHARD: &str = "shard long.safetensors -o ranks --world-size 2 --recipe mxfp8";
    let bench = bench();
    let path = bench.path("long.safetensors");
    let whole = std::fs::metadata(&path).expect("a file").len();
    let file = std::fs::File::options().write(true).open(path);
    let file = file.expect("a file");
    let before = bench.listing();
    for line in [LONG, FOLDER, SHARD] {
        // Within what is mapped, to a page, and bytes only.
        for length in [whole / 8, 4096, whole] {
            let child = started_with(&bench, lowp(line), Stdio::piped());
            match length == whole {
                true => file.write_all_at(&[0; 8], whole / 2).expect("written"),
                false => file.set_len(length).expect("cut"),
            }
            let (code, message) = ended(child);
            assert_eq!(code, Some(2), "{line}, {length}: {message}");
            assert!(
                message.starts_with("error: ") && message.lines().count() == 1,
                "{message}"
            );
            let causes = ["was changed while", "became shorter while"];
            assert!(
                causes.iter().any(|cause| message.contains(cause)),
                "{message}"
            );
            assert_eq!(bench.listing(), before, "{line}, {length}");
            // Everything after the header is zeros.
            file.set_len(whole).expect("longer");
        }
    }
}

/// The parent may have had us wait with signals, as some job runners do: a page that is gone ends the command all the same.
#[cfg(target_os = "linux")]
#[test]
fn an_input_that_changes_where_signals_are_blocked() {
    let bench = bench();
    let path = bench.path("long.safetensors");
    let file = std::fs::File::options().write(true).open(path);
    let file = file.expect("a file");
    let before = bench.listing();
    let whole = file.metadata().expect("a file").len();
    for blocked in ["--block-signal=ABRT,ALRM,HUP", "--block-signal"] {
        let mut command = Command::new("env");
        command
            .args([blocked, env!("CARGO_BIN_EXE_lowp")])
            .args(LONG.words());
        let child = started_with(&bench, command, Stdio::piped());
        let begin = Instant::now();
        file.set_len(whole / 8).expect("cut");
        let (code, message) = ended(child);
        assert_eq!(code, Some(2), "{message}");
        assert!(begin.elapsed() < Duration::from_secs(30), "{message}");
        file.set_len(whole).expect("longer");
        // Where every signal is blocked nothing can tell who tidies: the next command does.
        if blocked != "--block-signal" {
            assert_eq!(bench.listing(), before, "{message}");
        }
    }
}

/// However few files may be open, the error says so, and nothing is left.
#[test]
fn too_few_files_can_be_open() {
    let bench = Bench::new();
    bench.write("short.safetensors", &[matrix("w", &[64, 64], 1)]);
    let before = bench.listing();
    let mut refused = 0;
    for line in [
        "quantize short.safetensors -o q.safetensors --recipe mxfp8",
        "shard short.safetensors -o ranks --world-size 4 --recipe mxfp8",
    ] {
        for files in 5..14 {
            let output = Command::new("sh")
                .args(["-c", &format!("ulimit -n {files}; exec \"$@\""), "sh"])
                .arg(env!("CARGO_BIN_EXE_lowp"))
                .args(line.words())
                .current_dir(bench.path(""))
                .output()
                .expect("lowp runs");
            let message = String::from_utf8_lossy(&output.stderr);
            if output.status.success() {
                std::fs::remove_file(bench.path("q.safetensors")).ok();
                std::fs::remove_dir_all(bench.path("ranks")).ok();
                continue;
            }
            refused += 1;
            assert!(
                message.contains("(ulimit -n)") && message.lines().count() == 1,
                "{files}: {message}"
            );
            assert_eq!(bench.listing(), before, "{line}, {files}");
        }
    }
    assert!(refused > 2, "{refused}");
}

/// A umask that takes the rights of the user, too, is no reason to leave anything.
#[test]
fn a_umask_that_takes_all_rights() {
    let bench = Bench::new();
    bench.write("short.safetensors", &[matrix("w", &[64, 64], 1)]);
    for line in [
        "quantize short.safetensors -o q.safetensors --recipe mxfp8",
        "shard short.safetensors -o ranks --world-size 2 --recipe mxfp8",
    ] {
        let status = Command::new("sh")
            .args(["-c", "umask 0777; exec \"$@\"", "sh"])
            .arg(env!("CARGO_BIN_EXE_lowp"))
            .args(line.words())
            .current_dir(bench.path(""))
            .status();
        assert!(status.expect("lowp runs").success(), "{line}");
        assert_eq!(hidden(&bench.path("")), [""; 0]);
    }
}

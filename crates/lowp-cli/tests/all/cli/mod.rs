//! The `lowp` binary as its user sees it.

mod bad_input;
#[cfg(unix)]
mod elastic;
mod fidelity;
mod help;
mod losses;
mod options;
mod plan;
mod report;
mod spellings;
#[cfg(unix)]
mod stopped_runs;
#[cfg(unix)]
mod streams;
mod train;
mod train_ranks;
mod world;

use serde_json::Value;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

/// What a command left behind.
#[derive(Debug)]
struct Outcome {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Runs `lowp` away from any terminal.
fn lowp<A: AsRef<OsStr>>(args: &[A]) -> Outcome {
    let output = command().args(args).output().expect("lowp starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Outcome {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// `lowp` without a terminal to ask for its width.
fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lowp"));
    command.env_remove("COLUMNS").stdin(Stdio::null());
    command
}

/// Standard output of a command that must succeed.
fn stdout<A: AsRef<OsStr>>(args: &[A]) -> String {
    let outcome = lowp(args);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    outcome.stdout
}

/// `lowp train` of a model that trains in milliseconds, unless `args` say otherwise.
fn tiny(args: &[&str]) -> Vec<String> {
    let model = [
        ("--dim", "64"),
        ("--layers", "1"),
        ("--heads", "2"),
        ("--seq", "32"),
        ("--batch", "4"),
        ("--eval-batches", "2"),
    ];
    let unset = model.iter().filter(|(option, _)| !args.contains(option));
    let model = unset.flat_map(|&(option, value)| [option, value]);
    let words = ["train"].into_iter().chain(model);
    words
        .chain(args.iter().copied())
        .map(str::to_owned)
        .collect()
}

/// Trains a tiny model and reads its JSON.
fn train_json(args: &[&str]) -> Value {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("out.json");
    let mut args = tiny(args);
    args.extend(["--json".to_owned(), path(&file)]);
    stdout(&args);
    let text = std::fs::read_to_string(file).expect("the file of --json");
    serde_json::from_str(&text).expect("JSON")
}

fn path(path: &Path) -> String {
    path.to_str().expect("a UTF-8 path").to_owned()
}

/// The recipes that the binary lists.
fn recipes() -> Vec<String> {
    let list = stdout(&["recipes", "--json"]);
    let list: Value = serde_json::from_str(&list).expect("JSON");
    let recipes = list["recipes"].as_array().expect("an array").iter();
    let names: Vec<_> = recipes
        .filter_map(|recipe| recipe["name"].as_str())
        .map(str::to_owned)
        .collect();
    assert!(names.len() > 2, "{list}");
    names
}

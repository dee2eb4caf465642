//! Standard output and standard error that are closed, full or nobody's: never a panic, always a defined exit code.

use super::tiny;
use std::process::{Command, Output, Stdio};

/// Runs `lowp` under a shell that redirects as `how` says.
fn redirected(args: &[&str], how: &str) -> Output {
    Command::new("sh")
        .args(["-c", &format!("exec \"$@\" {how}"), "sh"])
        .arg(env!("CARGO_BIN_EXE_lowp"))
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("sh runs")
}

fn train() -> Vec<String> {
    tiny(&["--steps", "2", "--recipe", "fp32"])
}

/// The exit code of `lowp` in a pipe of which nobody reads: `pipe` says what goes there.
fn piped(args: &[&str], pipe: &str) -> Output {
    let line = format!("{{ {{ \"$@\" {pipe}; echo $? >&3; }} | true; }} 3>&1");
    Command::new("sh")
        .args(["-c", &line, "sh"])
        .arg(env!("CARGO_BIN_EXE_lowp"))
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("sh runs")
}

#[test]
fn a_standard_error_that_cannot_be_written_changes_no_exit_code() {
    let train = train();
    let train: Vec<&str> = train.iter().map(String::as_str).collect();
    for (args, code) in [
        (&train[..], 0),
        (&["train", "--steps", "0"], 2),
        (&["train", "--no-such-option"], 2),
        (&["inspect", "/no/such/file"], 2),
        (&["--help"], 0),
    ] {
        let full = cfg!(target_os = "linux").then_some("2>/dev/full");
        for how in full.into_iter().chain(["2>&-"]) {
            assert_eq!(
                redirected(args, how).status.code(),
                Some(code),
                "{args:?} {how}"
            );
        }
        let output = piped(args, "2>&1 >/dev/null");
        let expected = format!("{code}\n");
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            expected,
            "{args:?}"
        );
    }
}

#[test]
fn a_reader_that_stops_early_is_no_failure_and_a_full_disk_is() {
    let train = train();
    let train: Vec<&str> = train.iter().map(String::as_str).collect();
    let plan = ["plan", "--shape", "64x64", "--world-size", "2"];
    for args in [&train[..], &plan, &["--help"]] {
        let output = piped(args, "");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.stdout, b"0\n", "{args:?}: {stderr}");
        assert!(
            !stderr.contains("error") && !stderr.contains("panic"),
            "{stderr}"
        );
    }
    // Only Linux has a file that is always full.
    let full = if cfg!(target_os = "linux") {
        &[
            &train[..],
            &plan,
            &["--help"],
            &["--version"],
            &["train", "-h"],
            &["recipes"],
        ][..]
    } else {
        &[]
    };
    for args in full {
        let output = redirected(args, ">/dev/full");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(
            stderr.contains("error: cannot write to standard output"),
            "{stderr}"
        );
    }
}

/// An argument is the user's own, and may still be long, or come from a file.
#[test]
fn messages_of_arguments_are_short_and_harmless() {
    let long = "\u{202e}x\u{1b}".repeat(10_000);
    for args in [
        ["train", "--recipe", &long],
        ["train", "--no-such-option", &long],
        ["train", "--grad-wire", &long],
        ["inspect", "--reference", &long],
        ["inspect", &long, "--no"],
        ["inspect", &long, "--reference=x"],
    ] {
        let output = redirected(&args, "");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.starts_with("error: ") && stderr.len() < 20_000,
            "{}",
            stderr.len()
        );
        assert!(
            !stderr.contains('\u{202e}') && !stderr.contains('\u{1b}'),
            "{stderr}"
        );
    }
}

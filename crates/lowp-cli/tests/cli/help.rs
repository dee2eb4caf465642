//! Help texts, the list of recipes, and completion scripts.

use super::{command, lowp, recipes, stdout};
use std::process::Stdio;

#[test]
fn help_of_every_command() {
    for (name, args) in [
        ("lowp", vec!["--help"]),
        ("train_short", vec!["train", "-h"]),
        ("train", vec!["train", "--help"]),
        ("plan", vec!["plan", "--help"]),
        ("completions", vec!["completions", "--help"]),
    ] {
        let text = stdout(&args);
        assert!(text.contains("Examples:\n  lowp "), "{name} has no example");
        insta::assert_snapshot!(format!("help_{name}"), text);
    }
}

#[test]
fn list() {
    insta::assert_snapshot!(stdout(&["train", "--list"]));
}

#[test]
fn every_listed_name_is_in_the_help_and_parses() {
    let help = stdout(&["train", "--help"]);
    for name in recipes() {
        assert!(help.contains(&name), "{name}");
        stdout(&[
            "plan", "--recipe", &name, "--shape", "64x64", "--world", "2",
        ]);
    }
}

#[test]
fn no_command_prints_the_help() {
    let outcome = lowp::<&str>(&[]);
    assert_eq!(outcome.code, Some(2));
    assert!(
        outcome.stderr.contains("Usage: lowp <COMMAND>"),
        "{}",
        outcome.stderr
    );
}

#[test]
fn completions_know_the_options() {
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout(&["completions", shell]);
        for word in ["lowp", "train", "plan", "reshard-after-forward", "seeds"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}

#[test]
fn a_reader_that_stops_early_is_no_error() {
    let mut child = command()
        .args(["train", "--list"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("lowp starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("lowp ends");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

//! Help texts, the list of recipes, and completion scripts.

use super::{command, lowp, recipes, stdout};
use serde_json::Value;
use std::process::Stdio;

#[test]
fn help_of_every_command() {
    for (name, args) in [
        ("lowp", vec!["--help"]),
        ("train_short", vec!["train", "-h"]),
        ("train", vec!["train", "--help"]),
        ("plan", vec!["plan", "--help"]),
        ("recipes", vec!["recipes", "--help"]),
        ("bench", vec!["bench", "--help"]),
        ("losses", vec!["losses", "--help"]),
        ("completions", vec!["completions", "--help"]),
    ] {
        let text = stdout(&args);
        assert!(text.contains("Examples:\n  lowp "), "{name} has no example");
        insta::assert_snapshot!(format!("help_{name}"), text);
    }
}

#[test]
fn list() {
    insta::assert_snapshot!(stdout(&["recipes"]));
}

#[test]
fn list_as_json() {
    insta::assert_snapshot!(stdout(&["recipes", "--json"]));
}

/// Options of the list are those of which a file says how it was quantized, and the bytes those of a plan.
#[test]
fn the_list_and_the_plans_say_the_same() {
    let list: Value = serde_json::from_str(&stdout(&["recipes", "--json"])).expect("JSON");
    let [rows, cols, world] = [&list["shape"][0], &list["shape"][1], &list["world_size"]];
    for recipe in list["recipes"].as_array().expect("recipes") {
        let name = recipe["name"].as_str().expect("a name");
        let shape = format!("{rows}x{cols}");
        let plan = stdout(&[
            "plan",
            "--recipe",
            name,
            "--shape",
            &shape,
            "--world-size",
            &world.to_string(),
            "--json",
        ]);
        let plan: Value = serde_json::from_str(&plan).expect("JSON");
        assert_eq!(recipe["sent"], plan["wire_bytes_per_weight"], "{name}");
        let elements = rows.as_f64().expect("rows") * cols.as_f64().expect("columns");
        let stored = plan["stored_bytes"].as_f64().expect("bytes") / elements;
        assert_eq!(recipe["stored"], stored, "{name}");
    }
}

#[test]
fn every_listed_name_is_in_the_help_and_parses() {
    let commands = ["train", "plan", "quantize", "shard"];
    let helps = commands.map(|command| stdout(&[command, "--help"]));
    for name in recipes() {
        for help in &helps {
            assert!(help.contains(&format!("- {name}:")), "{name}: {help}");
        }
        stdout(&[
            "plan",
            "--recipe",
            &name,
            "--shape",
            "64x64",
            "--world-size",
            "2",
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
        for name in recipes() {
            assert!(script.contains(&name), "{shell}: {name}");
        }
    }
}

/// bash itself, asked what may follow `--recipe` and `--compare`.
#[cfg(target_os = "linux")]
#[test]
fn bash_completes_the_names_of_recipes() {
    let dir = tempfile::tempdir().expect("a folder");
    let script = dir.path().join("lowp.bash");
    std::fs::write(&script, stdout(&["completions", "bash"])).expect("a script");
    for (command, option) in [
        ("train", "--recipe"),
        ("train", "--compare"),
        ("plan", "--recipe"),
        ("quantize", "--recipe"),
        ("shard", "--recipe"),
    ] {
        let ask = format!(
            "source '{}'; COMP_WORDS=(lowp {command} {option} nv); COMP_CWORD=3; \
             _lowp lowp nv {option}; printf '%s\n' \"${{COMPREPLY[@]}}\"",
            script.display()
        );
        let output = std::process::Command::new("bash")
            .args(["-c", &ask])
            .output()
            .expect("bash runs");
        let found = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut found: Vec<&str> = found.lines().collect();
        found.sort_unstable();
        let mut expected = recipes();
        expected.retain(|name| name.starts_with("nv"));
        expected.sort_unstable();
        assert_eq!(found, expected, "{command} {option}: {output:?}");
    }
}

#[test]
fn a_reader_that_stops_early_is_no_error() {
    let mut child = command()
        .arg("recipes")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("lowp starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("lowp ends");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

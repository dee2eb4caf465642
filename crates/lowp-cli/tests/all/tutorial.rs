//! docs/tutorial-command.md, run as it is written: each `sh` block in order, and what it prints next to the `text` block after it.

use std::path::Path;
use std::process::Command;

use crate::support::text;

/// A block of the page: its language, and its lines.
fn blocks(page: &str) -> Vec<(&str, Vec<&str>)> {
    let mut blocks = Vec::new();
    let mut inside: Option<(&str, Vec<&str>)> = None;
    for line in page.lines() {
        match (line.strip_prefix("```"), inside.take()) {
            (Some(language), None) => inside = Some((language, Vec::new())),
            (Some(_), Some(block)) => blocks.push(block),
            (None, Some((language, mut lines))) => {
                lines.push(line);
                inside = Some((language, lines));
            }
            (None, None) => {}
        }
    }
    blocks
}

/// Whether `printed` is what `shown` shows. A line `..` stands for any lines, and at the end of a line for its rest.
fn shows(shown: &[&str], printed: &[&str]) -> bool {
    let Some((first, rest)) = shown.split_first() else {
        return printed.is_empty();
    };
    if *first == ".." {
        return (0..=printed.len()).any(|skipped| shows(rest, &printed[skipped..]));
    }
    let same = |line: &str| match first.strip_suffix("..") {
        Some(begin) => line.starts_with(begin),
        None => line == *first,
    };
    printed
        .split_first()
        .is_some_and(|(line, left)| same(line) && shows(rest, left))
}

/// Runs a block of the shell in `folder`, where `lowp` is the program under test.
fn run(block: &str, folder: &Path) -> String {
    let lowp = Path::new(env!("CARGO_BIN_EXE_lowp"));
    let mut path = std::ffi::OsString::from(lowp.parent().expect("a folder"));
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let output = Command::new("sh")
        .args(["-euc", block])
        .env("PATH", path)
        .current_dir(folder)
        .output()
        .expect("sh runs");
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{block}\n{errors}");
    text(&output.stdout)
}

#[test]
fn the_tutorial_runs_as_it_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let page = include_str!("../../../../docs/tutorial-command.md");
    // The last step needs the feature.
    let page = match cfg!(feature = "tokenize") {
        true => page,
        false => page.split("## 6.").next().expect("a page"),
    };
    let mut printed = None;
    let mut compared = 0;
    for (language, lines) in blocks(page) {
        match language {
            "sh" => printed = Some(run(&lines.join("\n"), folder.path())),
            "text" => {
                let printed = printed.take().expect("an `sh` block before it");
                let of_lowp: Vec<&str> = printed.lines().collect();
                assert!(
                    shows(&lines, &of_lowp),
                    "the page shows\n{}\nand lowp prints\n{printed}",
                    lines.join("\n")
                );
                compared += 1;
            }
            other => panic!("a block of {other:?}"),
        }
    }
    assert!(compared > 5, "{compared} outputs compared");
}

#[test]
fn an_output_that_the_page_does_not_show_is_caught() {
    let printed = ["a", "b 1", "c"];
    for shown in [
        &["a", "b 1", "c"][..],
        &["..", "c"],
        &["a", ".."],
        &["a", "b ..", "c"],
    ] {
        assert!(shows(shown, &printed), "{shown:?}");
    }
    for shown in [
        &["a", "b 1"][..],
        &["..", "d"],
        &["a", "c", ".."],
        &["a", "c ..", "c"],
        &[],
    ] {
        assert!(!shows(shown, &printed), "{shown:?}");
    }
}

//! `cargo xtask bench`: the benchmarks of every crate, then a table of what was measured: each
//! kernel as a ratio to the memcpy that was measured just before it, beside the bar it must reach.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::{cargo, run, workspace_root};
use crate::tree::Tree;

/// Runs every benchmark, passing `args` to each, and prints the table.
pub(crate) fn bench(args: &[String]) -> Result<()> {
    let root = workspace_root()?;
    let tree = Tree::load(&root)?;
    if !has_benches(&tree) {
        bail!(
            "the workspace has no benchmarks: no crate has a benches/ folder with a .rs file in it"
        );
    }
    let start = SystemTime::now();
    // Bench targets only: the unit test harness does not know criterion's options.
    let mut command = cargo(&["bench", "--workspace", "--bench", "*", "--"])?;
    command.args(args);
    run(command)?;
    let groups = read(&root.join("target/criterion"), start)?;
    if !groups.is_empty() {
        println!("{}", table(&groups, &bars(&tree)?));
    }
    Ok(())
}

fn has_benches(tree: &Tree) -> bool {
    tree.with_extension("rs")
        .any(|file| file.path.contains("/benches/"))
}

/// Seconds by function (memcpy, 1 thread, 2 threads), and the bytes of a run.
#[derive(Debug, Default, PartialEq)]
struct Group {
    bytes: f64,
    seconds: BTreeMap<String, f64>,
}

/// What criterion measured since `start`, by group.
fn read(folder: &Path, start: SystemTime) -> Result<BTreeMap<String, Group>> {
    let mut groups = BTreeMap::<String, Group>::new();
    for group in folders(folder)? {
        for function in folders(&group)? {
            let estimates = function.join("new/estimates.json");
            let fresh = std::fs::metadata(&estimates)
                .and_then(|file| file.modified())
                .is_ok_and(|time| time >= start);
            if !fresh {
                continue;
            }
            let benchmark = json(&function.join("new/benchmark.json"))?;
            let text = |key: &str| benchmark[key].as_str().unwrap_or_default().to_owned();
            let group = groups.entry(text("group_id")).or_default();
            group.bytes = benchmark["throughput"]["Bytes"].as_f64().unwrap_or(0.0);
            let median = &json(&estimates)?["median"]["point_estimate"];
            let nanoseconds = median
                .as_f64()
                .with_context(|| format!("{} has no median", estimates.display()))?;
            group.seconds.insert(text("function_id"), nanoseconds / 1e9);
        }
    }
    Ok(groups)
}

fn folders(folder: &Path) -> Result<Vec<std::path::PathBuf>> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Ok(Vec::new());
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            paths.push(path);
        }
    }
    Ok(paths)
}

fn json(path: &Path) -> Result<Value> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))
}

/// The bars of every `benches/bars.toml`: `"benchmark" = least ratio`.
fn bars(tree: &Tree) -> Result<BTreeMap<String, f64>> {
    let files = tree.with_extension("toml");
    let lines = files
        .filter(|file| file.path.ends_with("/benches/bars.toml"))
        .flat_map(|file| file.text.lines())
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    lines
        .map(|line| {
            let (name, bar) = line
                .rsplit_once('=')
                .with_context(|| format!("a bar without `=`: {line}"))?;
            let bar = bar
                .trim()
                .parse()
                .with_context(|| format!("a bar without a number: {line}"))?;
            Ok((name.trim().trim_matches('"').to_owned(), bar))
        })
        .collect()
}

/// A Markdown table of `groups`, those with bars first.
fn table(groups: &BTreeMap<String, Group>, bars: &BTreeMap<String, f64>) -> String {
    let mut out = String::from(
        "| kernel | memcpy GB/s | 1 thread GB/s | ratio | bar | 2 threads / 1 |\n|---|---|---|---|---|---|\n",
    );
    let (barred, others): (Vec<_>, Vec<_>) = groups
        .iter()
        .partition(|(name, _)| bars.contains_key(*name));
    for (name, group) in barred.into_iter().chain(others) {
        let seconds = |function: &str| group.seconds.get(function).copied();
        let speed = |function| seconds(function).map(|s| group.bytes / s / 1e9);
        let number = |x: Option<f64>| x.map_or_else(String::new, |x| format!("{x:.2}"));
        let [memcpy, one, two] = ["memcpy", "1 thread", "2 threads"].map(speed);
        let ratio = one.zip(memcpy).map(|(a, b)| a / b);
        let bar = match (bars.get(name), ratio) {
            (Some(bar), Some(ratio)) if ratio < *bar => format!("{bar}, missed"),
            (Some(bar), _) => bar.to_string(),
            (None, _) => String::new(),
        };
        let columns = [
            name.clone(),
            number(memcpy),
            number(one),
            number(ratio),
            bar,
            number(two.zip(one).map(|(a, b)| a / b)),
        ];
        // Writing to a string cannot fail.
        let _ = writeln!(out, "| {} |", columns.join(" | "));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benches_are_found_by_their_folder() {
        assert!(!has_benches(&Tree::of(&[("crates/a/src/bench.rs", "")])));
        assert!(has_benches(&Tree::of(&[(
            "crates/a/benches/encode.rs",
            ""
        )])));
    }

    #[test]
    fn bars_come_first_and_say_when_they_are_missed() {
        let tree = Tree::of(&[(
            "crates/a/benches/bars.toml",
            "# least ratios\n\"fast\" = 0.5\n\"slow\" = 0.5\n",
        )]);
        let group = |one: f64| Group {
            bytes: 8e9,
            seconds: [("memcpy", 1.0), ("1 thread", one), ("2 threads", one / 2.0)]
                .map(|(name, seconds)| (name.to_owned(), seconds))
                .into_iter()
                .collect(),
        };
        let groups = [("any", 1.0), ("fast", 1.6), ("slow", 4.0)]
            .map(|(name, one)| (name.to_owned(), group(one)))
            .into_iter()
            .collect();
        let table = table(&groups, &bars(&tree).expect("bars"));
        let rows: Vec<&str> = table.lines().skip(2).collect();
        assert_eq!(
            rows,
            [
                "| fast | 8.00 | 5.00 | 0.62 | 0.5 | 2.00 |",
                "| slow | 8.00 | 2.00 | 0.25 | 0.5, missed | 2.00 |",
                "| any | 8.00 | 8.00 | 1.00 |  | 2.00 |",
            ]
        );
        let wrong = Tree::of(&[("crates/a/benches/bars.toml", "fast 0.5\n")]);
        assert!(bars(&wrong).is_err());
    }
}

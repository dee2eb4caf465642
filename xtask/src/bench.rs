//! `cargo xtask bench`: the benchmarks of every crate, then a table of what was measured: each
//! kernel as a ratio to the memcpy that was measured just before it, beside the bar it must reach.
//! A bar that is missed fails the command.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use self::measured::{Group, read};
use self::verdict::Verdict;
use crate::command::{cargo, run, target_dir, workspace_root};
use crate::tree::Tree;

mod against;
mod measured;
mod verdict;

pub(crate) use verdict::median;

/// Runs every benchmark, passing `args` to each, and prints the table. Fails where a row misses its
/// bar in the median of three runs. With `against`, compares with that benchmark program instead.
pub(crate) fn bench(args: &[String], against: Option<&Path>) -> Result<()> {
    let root = workspace_root()?;
    let tree = Tree::load(&root)?;
    if !has_benches(&tree) {
        bail!(
            "the workspace has no benchmarks: no crate has a benches/ folder with a .rs file in it"
        );
    }
    if let Some(other) = against {
        return against::compare(other, args);
    }
    let groups = measure(args)?;
    if groups.is_empty() {
        return Ok(());
    }
    let verdicts = verdict::judge(&groups, &bars(&tree)?, |missed| {
        println!(
            "measured twice more, for a median of three runs: {}",
            missed.join(", ")
        );
        measure(&[filter(missed)])
    })?;
    println!("{}", table(&groups, &verdicts));
    verdict::result(&verdicts)
}

fn measure(args: &[String]) -> Result<BTreeMap<String, Group>> {
    let start = SystemTime::now();
    // Bench targets only: the unit test harness does not know criterion's options.
    let mut command = cargo(&["bench", "--workspace", "--bench", "*", "--"])?;
    command.args(args);
    run(command)?;
    read(&target_dir()?.join("criterion"), start)
}

/// The regular expression of what decides about these benchmarks. Their names have no characters
/// with a meaning in it.
fn filter(names: &[&str]) -> String {
    format!("^({})/(memcpy|1 thread)$", names.join("|"))
}

fn has_benches(tree: &Tree) -> bool {
    tree.with_extension("rs")
        .any(|file| file.path.contains("/benches/"))
}

/// The bars of every `benches/bars.toml`: `"benchmark" = least ratio`.
fn bars(tree: &Tree) -> Result<BTreeMap<String, f64>> {
    let mut bars = BTreeMap::new();
    for file in tree.with_extension("toml") {
        if file.path.ends_with("/benches/bars.toml") {
            let read: BTreeMap<String, f64> =
                toml::from_str(&file.text).with_context(|| format!("reading {}", file.path))?;
            bars.extend(read);
        }
    }
    Ok(bars)
}

/// A Markdown table of `groups`, those with bars first.
fn table(groups: &BTreeMap<String, Group>, verdicts: &BTreeMap<String, Verdict>) -> String {
    let mut out = String::from(
        "| kernel | memcpy GB/s | 1 thread GB/s | ratio | bar | 2 threads / 1 |\n|---|---|---|---|---|---|\n",
    );
    let (barred, others): (Vec<_>, Vec<_>) = groups
        .iter()
        .partition(|(name, _)| verdicts.contains_key(*name));
    for (name, group) in barred.into_iter().chain(others) {
        let speed = |function| group.seconds(function).map(|s| group.bytes / s / 1e9);
        let number = |x: Option<f64>| x.map_or_else(String::new, |x| format!("{x:.2}"));
        let [memcpy, one, two] = ["memcpy", "1 thread", "2 threads"].map(speed);
        let verdict = verdicts.get(name);
        let columns = [
            name.clone(),
            number(memcpy),
            number(one),
            number(verdict.map(Verdict::median).or_else(|| group.ratio())),
            verdict.map_or_else(String::new, Verdict::to_string),
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
    fn a_filter_chooses_what_decides() {
        let names = ["decode mxfp8 rowwise", "amax"];
        let expected = "^(decode mxfp8 rowwise|amax)/(memcpy|1 thread)$";
        assert_eq!(filter(&names), expected);
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
        let slower = |_: &[&str]| Ok(BTreeMap::from([("slow".to_owned(), group(3.2))]));
        let verdicts = verdict::judge(&groups, &bars(&tree).expect("bars"), slower);
        let table = table(&groups, &verdicts.expect("verdicts"));
        let rows: Vec<&str> = table.lines().skip(2).collect();
        assert_eq!(
            rows,
            [
                "| fast | 8.00 | 5.00 | 0.62 | 0.5 | 2.00 |",
                "| slow | 8.00 | 2.00 | 0.31 | 0.5, missed in 0.25 0.31 0.31 | 2.00 |",
                "| any | 8.00 | 8.00 | 1.00 |  | 2.00 |",
            ]
        );
        let wrong = Tree::of(&[("crates/a/benches/bars.toml", "fast 0.5\n")]);
        assert!(bars(&wrong).is_err());
    }
}

//! Comparing with another build of the benchmarks: the two alternate, row by row, so that both see the
//! same state of the machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};

use super::measured::read;
use super::verdict::median;
use crate::command::{build_program, cargo, run, target_dir};

const RUNS: usize = 3;
/// Further runs of rows that seem slower.
const MORE: usize = 4;
/// The least speed as a part of the other's.
const BAR: f64 = 0.98;
/// What is compared of a row.
const FUNCTION: &str = "1 thread";

/// Compares this checkout with the benchmark program `other`; fails where a row is slower by more
/// than 2%. Rows of memcpy alone show the noise.
pub(super) fn compare(other: &Path, args: &[String]) -> Result<()> {
    ensure!(
        other.is_file(),
        "{} is no file: build the other checkout with `cargo bench -p lowp-kernels --no-run`, \
         which prints the path of its program",
        other.display()
    );
    let build = cargo(&["bench", "-p", "lowp-kernels", "--bench", "cpu", "--no-run"])?;
    let programs = [other.to_owned(), build_program(build)?];
    let rows = rows(&programs[1], args)?;
    ensure!(!rows.is_empty(), "no benchmark matches {args:?}");
    println!("| kernel | other ms | this ms | speed | runs |\n|---|---|---|---|---|");
    let mut slower = Vec::new();
    for row in &rows {
        let mut times = [vec![], vec![]];
        take_turns(&programs, row, RUNS, &mut times)?;
        if speed(&times) < BAR {
            take_turns(&programs, row, MORE, &mut times)?;
        }
        let speed = speed(&times);
        let [old, new] = times.each_ref().map(|t| 1e3 * median(t.clone()));
        let runs = times[0].len();
        println!("| {row} | {old:.2} | {new:.2} | {speed:.3} | {runs} |");
        if speed < BAR {
            slower.push(format!("{row}: {speed:.3}"));
        }
    }
    if !slower.is_empty() {
        bail!(
            "{} slower than {} of the other's speed. {}",
            slower.len(),
            BAR,
            slower.join("; ")
        );
    }
    Ok(())
}

fn rows(program: &Path, args: &[String]) -> Result<Vec<String>> {
    let mut command = Command::new(program);
    command.args(["--bench", "--list"]).args(args);
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    Ok(names(&String::from_utf8_lossy(&output.stdout)))
}

/// The groups in a list of benchmarks.
fn names(list: &str) -> Vec<String> {
    let ending = format!("/{FUNCTION}: benchmark");
    let named = |line: &str| line.strip_suffix(&ending).map(str::to_owned);
    list.lines().filter_map(named).collect()
}

fn take_turns(
    programs: &[PathBuf; 2],
    row: &str,
    runs: usize,
    times: &mut [Vec<f64>; 2],
) -> Result<()> {
    for _ in 0..runs {
        for (program, times) in programs.iter().zip(times.iter_mut()) {
            times.push(time(program, row)?);
        }
    }
    Ok(())
}

fn time(program: &Path, row: &str) -> Result<f64> {
    let folder = target_dir()?.join("criterion-against");
    let start = SystemTime::now();
    let mut command = Command::new(program);
    command
        .env("CRITERION_HOME", &folder)
        .args(["--bench", "--noplot", "--exact"])
        .arg(format!("{row}/{FUNCTION}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    run(command)?;
    let groups: BTreeMap<_, _> = read(&folder, start)?;
    let seconds = groups.get(row).and_then(|group| group.seconds(FUNCTION));
    seconds.with_context(|| format!("{} has no row `{row}`", program.display()))
}

/// The speed of the second as a part of the first's.
fn speed(times: &[Vec<f64>; 2]) -> f64 {
    let [old, new] = times.each_ref().map(|times| median(times.clone()));
    old / new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_from_the_list() {
        let list = "a b/memcpy: benchmark\na b/1 thread: benchmark\na b/2 threads: benchmark\n\
                    memcpy/1 thread: benchmark\n";
        assert_eq!(names(list), ["a b", "memcpy"]);
    }

    #[test]
    fn speed_is_that_of_medians() {
        let times = [vec![2.0, 9.0, 1.0], vec![4.0, 3.0, 4.0]];
        assert!((speed(&times) - 0.5).abs() < 1e-12);
    }
}

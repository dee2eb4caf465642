//! A run as named stages: a heading for each, its time, and a table at the end. The first failure
//! ends the run.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Passed(Duration),
    Failed(Duration),
    Skipped(String),
}

/// The stages that ended so far, in order.
#[derive(Debug, Default)]
pub(crate) struct Stages {
    ended: Vec<(String, Outcome)>,
}

impl Stages {
    /// Runs one stage between its heading and its result. The error names the stage.
    pub(crate) fn run(&mut self, name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        // On stderr, where cargo writes: the two would come out of order otherwise.
        eprintln!("\n== {name}");
        let start = Instant::now();
        let done = work();
        let time = start.elapsed();
        let outcome = match done {
            Ok(()) => Outcome::Passed(time),
            Err(_) => Outcome::Failed(time),
        };
        eprintln!("== {name}: {outcome}");
        self.ended.push((name.to_owned(), outcome));
        done.with_context(|| format!("stage `{name}` failed"))
    }

    /// Records that a stage did not run, and why.
    pub(crate) fn skip(&mut self, name: &str, why: &str) {
        let outcome = Outcome::Skipped(why.to_owned());
        eprintln!("\n== {name}: {outcome}");
        self.ended.push((name.to_owned(), outcome));
    }

    /// Prints the table of all stages and hands the result on.
    pub(crate) fn finish(self, done: Result<()>) -> Result<()> {
        eprintln!("\n{self}");
        done
    }
}

impl fmt::Display for Stages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "== summary")?;
        for (name, outcome) in &self.ended {
            write!(f, "\n   {name:<12} {outcome}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed(time) => write!(f, "ok in {:.1} s", time.as_secs_f64()),
            Self::Failed(time) => write!(f, "FAILED after {:.1} s", time.as_secs_f64()),
            Self::Skipped(why) => write!(f, "skipped: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_its_stage_and_keeps_its_cause() {
        let mut stages = Stages::default();
        let error = stages
            .run("clippy", || anyhow::bail!("2 warnings"))
            .unwrap_err();
        assert_eq!(format!("{error:#}"), "stage `clippy` failed: 2 warnings");
    }

    #[test]
    fn the_summary_lists_every_stage() {
        let mut stages = Stages::default();
        stages.run("fmt", || Ok(())).unwrap();
        stages.skip("doctests", "a filter was given");
        let summary = stages.to_string();
        assert!(summary.contains("fmt          ok in 0.0 s"), "{summary}");
        assert!(
            summary.contains("doctests     skipped: a filter was given"),
            "{summary}"
        );
    }
}

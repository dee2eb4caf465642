//! `cargo xtask test`: the stages of the test run, cheapest first.

use std::process::Command;
use std::{env, thread};

use anyhow::{Result, ensure};
use clap::Args;

use crate::command::{cargo, run, succeeds, target_dir};
use crate::cuda;
use crate::miri;
use crate::python;
use crate::snapshots::References;
use crate::stages::Stages;
use crate::tidy;
use crate::{licences, package};

/// What to test.
#[derive(Debug, Default, Args)]
pub(crate) struct Options {
    /// Walk whole value ranges where the normal run takes samples (sets `LOWP_EXHAUSTIVE=1`).
    #[arg(long)]
    exhaustive: bool,

    /// Leave out the tests that need Python and, the first time, the network.
    #[arg(long)]
    no_python: bool,

    /// Run only matching tests: names, or options of the test runner such as `-p lowp-format`.
    ///
    /// Doctests, the snapshot check and the Python tests need the whole suite and are skipped.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    filter: Vec<String>,
}

/// Why stages that need the whole suite do not run.
const FILTERED: &str = "a filter was given";

/// Runs the whole test command and prints its summary.
pub(crate) fn test(options: &Options) -> Result<()> {
    let mut stages = Stages::default();
    let done = test_stages(options, &mut stages);
    stages.finish(done)
}

/// The stages of `test`, for use in a longer run.
pub(crate) fn test_stages(options: &Options, stages: &mut Stages) -> Result<()> {
    let left_out = (!options.filter.is_empty()).then_some(FILTERED);
    let left_out = left_out.or(options.no_python.then_some("--no-python was given"));
    let python = match left_out {
        None => Ok(python::Tests::prepare()),
        Some(why) => Err(why),
    };
    stages.run("fmt", || run(cargo(&["fmt", "--all", "--check"])?))?;
    stages.run("tidy", tidy::tidy)?;
    stages.run("licences", licences::check)?;
    stages.run("package", || package::package(false))?;
    if cuda::ready() {
        stages.run("cuda", || cuda::cuda(&cuda::Options::checked()?))?;
    } else {
        stages.skip(
            "cuda",
            "no nvcc; `cargo xtask cuda` installs one below target/",
        );
    }
    stages.run("clippy", clippy)?;

    let references = References::new(&target_dir()?)?;
    stages.run("tests", || tests(options, &references))?;

    if options.filter.is_empty() {
        stages.run("doctests", || {
            let mut command = cargo(&["test", "--workspace", "--doc"])?;
            set_test_environment(&mut command, options, &references);
            run(command)
        })?;
        // Once each, on small input, so that they cannot rot.
        stages.run("benches", || {
            run(cargo(&["test", "--workspace", "--bench", "*"])?)
        })?;
        stages.run("snapshots", || references.reject_unreferenced())?;
        match miri::ready() {
            true => stages.run("miri", || miri::miri(&miri::Options { short: true }))?,
            false => stages.skip("miri", miri::MISSING),
        }
    } else {
        for name in ["doctests", "benches", "snapshots", "miri"] {
            stages.skip(name, FILTERED);
        }
    }
    match python {
        Ok(tests) => tests.run(stages)?,
        Err(why) => {
            for name in ["python", "torch"] {
                stages.skip(name, why);
            }
        }
    }
    Ok(())
}

fn clippy() -> Result<()> {
    ensure!(
        succeeds(cargo(&["clippy", "--version"])?),
        "clippy is missing; install it with `rustup component add clippy`"
    );
    let mut command = cargo(&["clippy", "--workspace", "--all-targets", "--all-features"])?;
    command.args(["--", "-D", "warnings"]);
    cuda::without_kernels(&mut command);
    run(command)
}

/// Left out of the default build, which it would slow; the tutorial needs it.
const TOKENIZE: &str = "lowp-cli/tokenize";

/// The one example that tests start. Clippy checks the others, and a test is made of that of lowp-train.
const RANKS: &str = "rank_loop";

/// How many tests nextest runs at once. An option of the caller goes before it.
const THREADS: &str = "NEXTEST_TEST_THREADS";

/// A fifth of their time tests wait: for ranks, processes and files.
fn tests_at_once(cores: usize) -> usize {
    cores + cores.div_ceil(4)
}

fn tests(options: &Options, references: &References) -> Result<()> {
    // By itself: the runners would build a test of it. The features are theirs, so that nothing is built twice.
    let build = ["build", "--workspace", "--features", TOKENIZE];
    run(cargo(&[&build[..], &["--example", RANKS]].concat())?)?;
    let mut command = if succeeds(cargo(&["nextest", "--version"])?) {
        let profile = if options.exhaustive {
            "exhaustive"
        } else {
            "default"
        };
        let mut nextest = cargo(&["nextest", "run", "--workspace", "--profile", profile])?;
        nextest.args(["--lib", "--bins", "--tests", "--features", TOKENIZE]);
        nextest.args(&options.filter);
        if env::var_os(THREADS).is_none() {
            let cores = thread::available_parallelism()?.get();
            nextest.env(THREADS, tests_at_once(cores).to_string());
        }
        nextest
    } else {
        eprintln!(
            "cargo-nextest is not installed; using cargo test, which has no time limit per test"
        );
        let mut test = cargo(&[
            "test",
            "--workspace",
            "--lib",
            "--bins",
            "--tests",
            "--no-fail-fast",
            "--features",
            TOKENIZE,
        ])?;
        test.args(libtest_args(&options.filter));
        test
    };
    set_test_environment(&mut command, options, references);
    run(command)
}

/// `cargo test` takes one test name; several go after `--`. Options stay where cargo reads them.
fn libtest_args(filter: &[String]) -> Vec<&str> {
    let names_only = !filter.is_empty() && filter.iter().all(|arg| !arg.starts_with('-'));
    let separator = names_only.then_some("--");
    separator
        .into_iter()
        .chain(filter.iter().map(String::as_str))
        .collect()
}

fn set_test_environment(command: &mut Command, options: &Options, references: &References) {
    // A snapshot that differs fails its test and changes no file, whatever the caller's settings.
    command
        .env("INSTA_UPDATE", "no")
        .env("INSTA_FORCE_PASS", "0");
    references.record(command);
    if options.exhaustive {
        command.env("LOWP_EXHAUSTIVE", "1");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn parse(args: &[&str]) -> Options {
        Line::parse_from([&["test"], args].concat()).options
    }

    #[test]
    fn exhaustive_is_ours_and_the_rest_goes_to_the_runner() {
        let options = parse(&["--exhaustive", "gather", "-p", "lowp-shard"]);
        assert!(options.exhaustive);
        assert_eq!(options.filter, ["gather", "-p", "lowp-shard"]);
        assert!(parse(&[]).filter.is_empty());
        assert!(parse(&["--no-python"]).no_python && !parse(&[]).no_python);
    }

    #[test]
    fn names_go_after_the_separator_and_options_do_not() {
        let strings = |args: &[&str]| args.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(libtest_args(&strings(&["a", "b"])), ["--", "a", "b"]);
        assert_eq!(
            libtest_args(&strings(&["-p", "lowp-format"])),
            ["-p", "lowp-format"]
        );
        assert!(libtest_args(&[]).is_empty());
    }

    #[test]
    fn only_exhaustive_sets_the_variable() {
        let references = References::new(&std::env::temp_dir()).unwrap();
        for exhaustive in [false, true] {
            let mut command = Command::new("true");
            let options = Options {
                exhaustive,
                ..Options::default()
            };
            set_test_environment(&mut command, &options, &references);
            let set = command
                .get_envs()
                .any(|(name, _)| name == "LOWP_EXHAUSTIVE");
            assert_eq!(set, exhaustive);
        }
    }
}

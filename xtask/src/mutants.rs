//! `cargo xtask mutants`: breaks the code in many small ways with cargo-mutants, and counts how many
//! of the breaks the tests see, against a bar for each crate.
//!
//! `.cargo/mutants.toml` names the mutants that no test can see, with the reason.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::command::{cargo, display, remove, succeeds, target_dir};

/// A crate whose tests are tried.
struct Subject {
    package: &'static str,
    /// Packages whose tests run against a mutant, in rounds: what a round leaves alive goes to the
    /// next. The crate's own tests come first where they are many, because they build fastest.
    rounds: &'static [&'static [&'static str]],
    /// The share of viable mutants that must be killed, in percent.
    bar: f64,
}

const SUBJECTS: [Subject; 4] = [
    Subject {
        package: "lowp-format",
        rounds: &[&["lowp-format"]],
        bar: 95.0,
    },
    Subject {
        package: "lowp-comm",
        rounds: &[&["lowp-comm"], &["lowp-shard", "lowp-tests"]],
        bar: 90.0,
    },
    Subject {
        package: "lowp-shard",
        rounds: &[
            &["lowp-shard"],
            &["lowp-tests", "lowp-optim", "lowp-fsdp", "lowp-candle"],
        ],
        bar: 90.0,
    },
    Subject {
        package: "lowp-optim",
        rounds: &[&["lowp-optim", "lowp-tests"]],
        bar: 90.0,
    },
];

/// What to break.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Only this crate; may be repeated. All without it.
    #[arg(short, long, value_parser = SUBJECTS.map(|s| s.package))]
    package: Vec<String>,

    /// Only part K of N of the mutants, for a sample: `--shard 0/20`.
    #[arg(long, value_name = "K/N")]
    shard: Option<String>,

    /// Passed to cargo mutants in every round, for example `--jobs 4` or `--in-diff FILE`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Runs cargo mutants over the crates that `options` name, and fails if one is below its bar.
pub(crate) fn mutants(options: &Options) -> Result<()> {
    for (tool, install) in [
        ("mutants", "cargo install --locked cargo-mutants@27.1.0"),
        ("nextest", "cargo install --locked cargo-nextest"),
    ] {
        ensure!(
            succeeds(cargo(&[tool, "--version"])?),
            "cargo-{tool} is not installed; `{install}` installs it"
        );
    }
    let chosen = |s: &&Subject| {
        options.package.is_empty() || options.package.iter().any(|name| name == s.package)
    };
    let mut lines = Vec::new();
    let mut low = Vec::new();
    for subject in SUBJECTS.iter().filter(chosen) {
        let tally = test(subject, options)?;
        lines.push(tally.line(subject));
        lines.extend(tally.missed.iter().map(|name| format!("  alive: {name}")));
        if !tally.reaches(subject.bar) {
            low.push(subject.package);
        }
    }
    println!("\n{}", lines.join("\n"));
    if !low.is_empty() {
        bail!(
            "{} below the bar: write a test that states what a mutant breaks, drop code that no test needs, or give the reason in .cargo/mutants.toml why none can see it",
            low.join(" and ")
        );
    }
    Ok(())
}

fn test(subject: &Subject, options: &Options) -> Result<Tally> {
    let mut tally = Tally::default();
    for (round, tests) in subject.rounds.iter().enumerate() {
        let mut args: Vec<OsString> = vec!["mutants".into(), "--package".into()];
        args.push(subject.package.into());
        args.push(format!("--test-package={}", tests.join(",")).into());
        if round == 0 {
            args.extend(
                options
                    .shard
                    .iter()
                    .map(|part| format!("--shard={part}").into()),
            );
        } else {
            if tally.missed.is_empty() {
                break;
            }
            let alive = tally.missed.iter();
            args.extend(alive.map(|name| format!("--re=^{}$", escape(name)).into()));
        }
        args.extend(options.args.iter().map(OsString::from));
        let output = target_dir()?.join(format!("mutants/{}-{round}", subject.package));
        // Without mutants nothing is written, and an old result must not be read.
        remove(&output)?;
        fs::create_dir_all(&output).with_context(|| format!("cannot make {}", output.display()))?;
        run(&args, &output)?;
        let results = output.join("mutants.out");
        if results.exists() {
            tally.add(&Tally::read(&results)?, round);
        }
    }
    Ok(tally)
}

/// Runs cargo mutants with its results in `output`.
fn run(args: &[OsString], output: &Path) -> Result<()> {
    let mut command = cargo(&[])?;
    command.args(args).arg("--output").arg(output);
    // Stops at the first test that fails, and kills tests that hang (.config/nextest.toml).
    command.env("NEXTEST_PROFILE", "mutants");
    let line = display(&command);
    let status = command
        .status()
        .with_context(|| format!("cannot start `{line}`"))?;
    // 2: a mutant lived. 3: a mutant hung.
    match status.code() {
        Some(0 | 2 | 3) => Ok(()),
        Some(4) => bail!("the tests fail without a mutant; `cargo xtask test` shows why"),
        _ => bail!("`{line}` failed ({status})"),
    }
}

#[derive(Debug, Default, PartialEq)]
struct Tally {
    /// Mutants that a test saw; one that hangs is seen by a time limit.
    killed: usize,
    missed: Vec<String>,
    unviable: usize,
}

impl Tally {
    /// Reads the lists in the output folder of cargo mutants.
    fn read(folder: &Path) -> Result<Self> {
        let lines = |name: &str| -> Result<Vec<String>> {
            let path = folder.join(name);
            let text = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            Ok(text.lines().map(str::to_owned).collect())
        };
        Ok(Self {
            killed: lines("caught.txt")?.len() + lines("timeout.txt")?.len(),
            missed: lines("missed.txt")?,
            unviable: lines("unviable.txt")?.len(),
        })
    }

    /// Takes the outcome of a round; a later one decides about what the rounds before it missed.
    fn add(&mut self, round: &Self, number: usize) {
        self.killed += round.killed;
        self.missed.clone_from(&round.missed);
        if number == 0 {
            self.unviable = round.unviable;
        }
    }

    fn viable(&self) -> usize {
        self.killed + self.missed.len()
    }

    /// Killed mutants in percent of the viable ones; 100 of none.
    fn percent(&self) -> f64 {
        match self.viable() {
            0 => 100.0,
            viable => 100.0 * self.killed as f64 / viable as f64,
        }
    }

    fn reaches(&self, bar: f64) -> bool {
        self.percent() >= bar
    }

    fn line(&self, subject: &Subject) -> String {
        format!(
            "{:<12} {:>5.1}% killed ({} of {} viable, {} do not compile), bar {}%{}",
            subject.package,
            self.percent(),
            self.killed,
            self.viable(),
            self.unviable,
            subject.bar,
            if self.reaches(subject.bar) {
                ""
            } else {
                ": missed"
            }
        )
    }
}

/// `name` as a regular expression that matches nothing else.
fn escape(name: &str) -> String {
    let mut escaped = String::new();
    for c in name.chars() {
        // Not every punctuation: `\<` is the start of a word.
        if r"\.+*?()|[]{}^$#&-~".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECT: Subject = Subject {
        package: "lowp-format",
        rounds: &[],
        bar: 95.0,
    };

    fn tally(killed: usize, missed: usize) -> Tally {
        Tally {
            killed,
            missed: (0..missed).map(|i| format!("m{i}")).collect(),
            unviable: 3,
        }
    }

    #[test]
    fn the_bar_is_a_share_of_viable_mutants() {
        assert!(tally(95, 5).reaches(95.0));
        assert!(!tally(94, 5).reaches(95.0));
        assert!(tally(0, 0).reaches(95.0), "nothing to kill");
        assert!(!tally(0, 1).reaches(95.0));
        assert_eq!(
            tally(95, 5).line(&SUBJECT),
            "lowp-format   95.0% killed (95 of 100 viable, 3 do not compile), bar 95%"
        );
        assert!(tally(1, 1).line(&SUBJECT).ends_with("bar 95%: missed"));
    }

    #[test]
    fn lists_are_read_and_a_hanging_mutant_is_killed() {
        let folder = std::env::temp_dir().join(format!("lowp-mutants-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in [
            ("caught.txt", "a\nb\n"),
            ("timeout.txt", "c\n"),
            ("missed.txt", "d\n"),
            ("unviable.txt", ""),
        ] {
            assert!(Tally::read(&folder).is_err(), "{name} is missing");
            fs::write(folder.join(name), text).unwrap();
        }
        let read = Tally::read(&folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let missed = vec!["d".to_owned()];
        assert_eq!(
            read,
            Tally {
                killed: 3,
                missed,
                unviable: 0
            }
        );
    }

    #[test]
    fn a_later_round_decides_about_what_was_missed() {
        let mut all = Tally::default();
        all.add(&tally(6, 4), 0);
        all.add(
            &Tally {
                unviable: 0,
                ..tally(3, 1)
            },
            1,
        );
        assert_eq!((all.killed, all.missed.len(), all.unviable), (9, 1, 3));
        assert_eq!(all.percent(), 90.0);
    }

    #[test]
    fn every_crate_is_tested_by_its_own_tests_first() {
        for subject in &SUBJECTS {
            assert!(subject.rounds[0].contains(&subject.package));
            let packages = subject.rounds.concat();
            let repeated = |name: &&str| packages.iter().filter(|p| *p == name).count() > 1;
            assert!(!packages.iter().any(repeated), "{packages:?}");
        }
    }

    #[test]
    fn other_options_go_to_cargo_mutants() {
        #[derive(Debug, clap::Parser)]
        struct Line {
            #[command(flatten)]
            options: Options,
        }
        let line = [
            "x",
            "-p",
            "lowp-shard",
            "--shard",
            "3/20",
            "--in-diff",
            "a.diff",
            "-j",
            "2",
        ];
        let options = <Line as clap::Parser>::try_parse_from(line)
            .unwrap()
            .options;
        assert_eq!(options.package, ["lowp-shard"]);
        assert_eq!(options.shard.as_deref(), Some("3/20"));
        assert_eq!(options.args, ["--in-diff", "a.diff", "-j", "2"]);
        let unknown = <Line as clap::Parser>::try_parse_from(["x", "-p", "lowp-cli"]);
        assert!(unknown.is_err());
    }

    #[test]
    fn names_are_matched_as_they_are() {
        let name = "a.rs:3:5: replace | with ^ in f<B> -> Vec<u8>";
        assert_eq!(
            escape(name),
            r"a\.rs:3:5: replace \| with \^ in f<B> \-> Vec<u8>"
        );
    }
}

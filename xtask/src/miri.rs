//! `cargo xtask miri`: tests under Miri, which interprets a program and finds undefined behaviour: accesses outside of memory or of
//! what is not initialised, broken aliasing rules, data races. It also varies what floating-point functions leave open.

use std::env;
use std::process::Command;

use anyhow::{Result, ensure};
use clap::Args;

use crate::command::{run, succeeds, target_dir, workspace_root};

struct Subject {
    package: &'static str,
    /// What cargo runs of it.
    targets: &'static [&'static str],
    /// Beginnings of the names of its tests; all where there are none.
    modules: &'static [&'static str],
    /// Tests that Miri cannot run, or not within minutes.
    skipped: &'static [&'static str],
    /// Whether a short run has them, too.
    short: bool,
}

const SUBJECTS: [Subject; 5] = [
    Subject {
        package: "lowp-shard",
        targets: &["--test", "all"],
        modules: &["small_tensors::"],
        skipped: &[],
        short: true,
    },
    Subject {
        package: "lowp-optim",
        targets: &["--test", "all"],
        modules: &["counts::"],
        skipped: &[],
        short: true,
    },
    Subject {
        package: "lowp-format",
        targets: &["--test", "all"],
        modules: &["scale_rules::"],
        skipped: &[],
        short: true,
    },
    Subject {
        package: "lowp-format",
        targets: &["--test", "all"],
        modules: &[
            "format_laws::",
            "gather_laws::",
            "recipe_answers::",
            "recipe_options::",
        ],
        skipped: &SKIPPED,
        short: false,
    },
    Subject {
        package: "lowp-format",
        targets: &["--lib"],
        modules: &[],
        skipped: &SKIPPED,
        short: false,
    },
];

/// Tests of lowp-format that Miri does not run within minutes.
const SKIPPED: [&str; 5] = [
    "buffers_have_the_ingredients_of_the_orientations_that_they_serve",
    "cells_of_any_length_and_rows_of_any_number",
    "every_form_leads_back_to_every_other",
    "parts_are_of_what_forward_gathered_and_each_group_has_all_of_them",
    "swizzled_scales_lie_in_128x4_tiles",
];

/// What to run.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Only the casts, gathers, decodes and steps of small tensors.
    #[arg(long)]
    pub(crate) short: bool,
}

/// Why nothing runs without it.
pub(crate) const MISSING: &str =
    "no Miri; `rustup toolchain install nightly --component miri,rust-src` installs it";

/// Whether a nightly toolchain has Miri.
pub(crate) fn ready() -> bool {
    cargo(&["miri", "--version"]).is_ok_and(succeeds)
}

pub(crate) fn miri(options: &Options) -> Result<()> {
    ensure!(ready(), "{MISSING}");
    for subject in SUBJECTS.iter().filter(|s| s.short || !options.short) {
        let mut command = cargo(&["miri", "test", "--package", subject.package])?;
        command
            .args(subject.targets)
            .arg("--")
            .args(subject.modules);
        for test in subject.skipped {
            command.args(["--skip", test]);
        }
        run(command)?;
    }
    Ok(())
}

/// The cargo of the nightly toolchain, in a folder of its own for what it builds.
fn cargo(args: &[&str]) -> Result<Command> {
    let mut command = Command::new("rustup");
    // What a cargo tells the programs that it starts is of another toolchain.
    for (name, _) in env::vars_os() {
        let names = ["CARGO_PKG_", "CARGO_MANIFEST_", "RUSTUP_TOOLCHAIN"];
        let of_cargo = name.to_str().is_some_and(|name| {
            name == "CARGO" || names.iter().any(|start| name.starts_with(start))
        });
        if of_cargo {
            command.env_remove(name);
        }
    }
    command
        .args(["run", "nightly", "cargo"])
        .args(args)
        .current_dir(workspace_root()?)
        .env("CARGO_TARGET_DIR", target_dir()?.join("miri"))
        .env("LOWP_CUDA_KERNELS", "none")
        .env("PROPTEST_CASES", "1")
        // The pool of threads outlives the tests.
        .env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-ignore-leaks");
    Ok(command)
}

//! `cargo xtask ci`: the test run, and what else must hold before a change is merged.

use std::process::Stdio;

use anyhow::{Context, Result};

use crate::command::{cargo, run};
use crate::cuda;
use crate::package;
use crate::stages::Stages;
use crate::suite::{self, Options};

/// Lock file, the whole test run, crates built from their archives, documentation.
pub(crate) fn ci() -> Result<()> {
    let mut stages = Stages::default();
    let done = ci_stages(&mut stages);
    stages.finish(done)
}

fn ci_stages(stages: &mut Stages) -> Result<()> {
    // First: every later cargo call would quietly write a new lock file.
    stages.run("lock", lock_file)?;
    // Installs the compiler where there is none; the test run checks what was compiled last.
    stages.run("kernels", || cuda::cuda(&cuda::Options::default()))?;
    suite::test_stages(&Options::default(), stages)?;
    stages.run("archives", || package::package(true))?;
    stages.run("doc", documentation)
}

fn lock_file() -> Result<()> {
    let mut command = cargo(&["metadata", "--locked", "--format-version", "1"])?;
    // The metadata itself is of no interest here.
    command.stdout(Stdio::null());
    run(command)
        .context("Cargo.lock does not fit the manifests; run `cargo check` and commit Cargo.lock")
}

fn documentation() -> Result<()> {
    let args = [
        "doc",
        "--workspace",
        "--no-deps",
        "--locked",
        "--all-features",
    ];
    let mut command = cargo(&args)?;
    command.env("RUSTDOCFLAGS", "-Dwarnings");
    cuda::without_kernels(&mut command);
    run(command)
}

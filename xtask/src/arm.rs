//! `cargo xtask arm`: the workspace for 64-bit Arm, and tests of it in an emulator, QEMU.

use std::process::Command;

use anyhow::Result;
use clap::Args;

use crate::command::run;
use crate::cross::{self, Platform};
use crate::cuda;

/// QEMU, and Debian's libraries for it.
const EMULATOR: &str = "qemu-aarch64";
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// What to run.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Compile every crate, and run all tests of formats, kernels and shards. An emulator takes an hour for them.
    #[arg(long)]
    exhaustive: bool,
}

struct Subject {
    package: &'static str,
    targets: &'static [&'static str],
    /// Beginnings of the names of tests in a short run, all where there are none; `None` where a short run has nothing of it.
    short: Option<&'static [&'static str]>,
}

const SUBJECTS: [Subject; 5] = [
    Subject {
        package: "lowp-format",
        targets: &["--lib"],
        short: Some(&[]),
    },
    Subject {
        package: "lowp-kernels",
        targets: &["--lib"],
        short: Some(&[]),
    },
    Subject {
        package: "lowp-conformance",
        targets: &["--lib"],
        short: Some(&[
            "on_cpu::amax::",
            "on_cpu::momentum::",
            "on_cpu::round::",
            "on_cpu::update::updates_equal_the_reference",
            "on_cpu::values::all_bf16_values",
        ]),
    },
    Subject {
        package: "lowp-format",
        targets: &["--test", "all"],
        short: None,
    },
    Subject {
        package: "lowp-shard",
        targets: &["--test", "all"],
        short: None,
    },
];

pub(crate) fn arm(options: &Options) -> Result<()> {
    cross::check_program(EMULATOR, "qemu-user")?;
    if options.exhaustive {
        run(emulated(&["check", "--workspace", "--all-targets"])?)?;
    }
    for subject in &SUBJECTS {
        let names = match options.exhaustive {
            true => &[],
            false => match subject.short {
                Some(names) => names,
                None => continue,
            },
        };
        let mut command = emulated(&["test", "--package", subject.package])?;
        command.args(subject.targets).arg("--").args(names);
        run(command)?;
    }
    Ok(())
}

/// A cargo command for Arm whose programs run in the emulator, without CUDA.
fn emulated(args: &[&str]) -> Result<Command> {
    let mut command = Platform::ARM.cargo(args)?;
    command.env(
        "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
        format!("{EMULATOR} -L {LIBRARIES}"),
    );
    cuda::without_kernels(&mut command);
    Ok(command)
}

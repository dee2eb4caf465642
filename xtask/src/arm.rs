//! `cargo xtask arm`: the workspace for 64-bit Arm, and tests of it in an emulator, QEMU.

use std::process::Command;

use anyhow::{Result, ensure};
use clap::Args;

use crate::command::{answer, cargo, run, succeeds};
use crate::cuda;

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Debian's cross compiler, emulator and libraries.
const LINKER: &str = "aarch64-linux-gnu-gcc";
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
    check_tools()?;
    if options.exhaustive {
        let args = ["check", "--workspace", "--all-targets", "--target", TARGET];
        run(with_tools(cargo(&args)?))?;
    }
    for subject in &SUBJECTS {
        let names = match options.exhaustive {
            true => &[],
            false => match subject.short {
                Some(names) => names,
                None => continue,
            },
        };
        let args = ["test", "--target", TARGET, "--package", subject.package];
        let mut command = with_tools(cargo(&args)?);
        command.args(subject.targets).arg("--").args(names);
        run(command)?;
    }
    Ok(())
}

fn check_tools() -> Result<()> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut folder = Command::new(rustc);
    folder.args(["--print", "target-libdir", "--target", TARGET]);
    let folder = String::from_utf8(answer(folder)?)?;
    ensure!(
        std::path::Path::new(folder.trim()).is_dir(),
        "no standard library for {TARGET}; install it with `rustup target add {TARGET}`"
    );
    for (program, package) in [
        (LINKER, "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
        (EMULATOR, "qemu-user"),
    ] {
        let mut command = Command::new(program);
        command.arg("--version");
        ensure!(
            succeeds(command),
            "no {program}; install Debian's {package}"
        );
    }
    Ok(())
}

fn with_tools(mut command: Command) -> Command {
    command
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
            format!("{EMULATOR} -L {LIBRARIES}"),
        );
    cuda::without_kernels(&mut command);
    command
}

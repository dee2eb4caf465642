//! Programs for 64-bit Arm, built on another machine with Debian's cross compiler.

use std::ffi::OsStr;
use std::process::Command;

use anyhow::{Result, ensure};
use clap::Args;

use crate::command::{answer, cargo, succeeds};

/// What cargo calls the platform.
pub(crate) const ARM: &str = "aarch64-unknown-linux-gnu";
/// How the names of Debian's tools for it begin.
const PREFIX: &str = "aarch64-linux-gnu-";
/// Debian's packages of them, without a compiler of C++.
const PACKAGES: &str = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross";

/// What programs are built for.
#[derive(Debug, Default, Clone, Copy, Args)]
pub(crate) struct Platform {
    /// Build for 64-bit Arm, for the processors of GH200 and GB200. Needs a cross compiler where this machine is another.
    #[arg(long)]
    arm: bool,
}

impl Platform {
    pub(crate) const ARM: Self = Self { arm: true };

    /// The platform where this machine is another.
    pub(crate) fn cross(self) -> Option<&'static str> {
        (self.arm && !cfg!(target_arch = "aarch64")).then_some(ARM)
    }

    /// A cargo command that builds for the platform.
    ///
    /// # Errors
    /// A tool or the standard library is missing.
    pub(crate) fn cargo(self, args: &[&str]) -> Result<Command> {
        let mut command = cargo(args)?;
        if let Some(platform) = self.cross() {
            check_tools()?;
            command.args(["--target", platform]);
            with_linker(&mut command);
        }
        Ok(command)
    }

    /// The program of this name that makes or reads files of the platform: a compiler, `ar`, `strip`.
    pub(crate) fn tool(self, name: &str) -> Command {
        match self.cross() {
            Some(_) => Command::new(format!("{PREFIX}{name}")),
            None => Command::new(name),
        }
    }
}

/// Has cargo link programs for Arm with the cross compiler.
pub(crate) fn with_linker(command: &mut Command) {
    let linker = format!("{PREFIX}gcc");
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", linker);
}

fn check_tools() -> Result<()> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut folder = Command::new(rustc);
    folder.args(["--print", "target-libdir", "--target", ARM]);
    let folder = String::from_utf8(answer(folder)?)?;
    ensure!(
        std::path::Path::new(folder.trim()).is_dir(),
        "no standard library for {ARM}; install it with `rustup target add {ARM}`"
    );
    check_program(format!("{PREFIX}gcc"), PACKAGES)
}

/// Checks that a program is there, which is in these packages of Debian's.
pub(crate) fn check_program(program: impl AsRef<OsStr>, packages: &str) -> Result<()> {
    let program = program.as_ref();
    let mut command = Command::new(program);
    command.arg("--version");
    ensure!(
        succeeds(command),
        "no {}; install Debian's {packages}",
        program.display()
    );
    Ok(())
}

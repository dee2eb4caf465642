//! What is tested from Python. Without torch: the file commands, with the safetensors package that other programs use, against
//! numpy, and the table that sets peers beside the bench of a GPU. With torch: the package, and what transformers and
//! compressed-tensors make of exported models.

mod environment;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow, ensure};

use crate::command::{run, target_dir, workspace_root};
use crate::wheel;
pub(crate) use environment::{Environment, pip_install};

/// Test folders, from the workspace root.
const FILES: &[&str] = &["crates/lowp-cli/tests/python", "benches/peers/tests"];
const TORCH: &[&str] = &[
    "crates/lowp-python/tests",
    "crates/lowp-cli/tests/python_peers",
];
/// What they need, from the workspace root.
const FILES_PACKAGES: &str = "xtask/python/requirements.txt";
const TORCH_PACKAGES: &str = "xtask/python/torch.txt";
/// Set to install torch from any index, with CUDA's libraries where there is no other.
const ANY_TORCH: &str = "LOWP_TORCH";
/// Why there is no torch.
const NO_TORCH: &str = "torch is not installed, and its small build cannot be reached; LOWP_TORCH=1 installs the one with \
                        CUDA's libraries, a download of 3 GB";

/// Both stages, whose packages are installed while others compile.
pub(crate) struct Tests {
    /// Taken when it is waited for.
    python: Option<JoinHandle<Result<PathBuf>>>,
    has_torch: bool,
}

impl Tests {
    /// Begins to install what is missing.
    pub(crate) fn prepare() -> Result<Self> {
        let torch = Environment::new("torch", TORCH_PACKAGES)?;
        let has_torch = torch.is_ready()
            || std::env::var_os(ANY_TORCH).is_some_and(|value| value == "1")
            || environment::has_small_torch();
        let environment = if has_torch {
            torch
        } else {
            Environment::new("files", FILES_PACKAGES)?
        };
        let python = Some(thread::spawn(move || environment.python()));
        Ok(Self { python, has_torch })
    }

    /// Runs both stages, or says what is left out.
    pub(crate) fn run(mut self, stages: &mut crate::stages::Stages) -> Result<()> {
        let mut python = PathBuf::new();
        stages.run("python", || {
            let installation = self.python.take().context("it was waited for before")?;
            let installed = installation.join();
            python = installed.map_err(|_| anyhow!("the installation of packages panicked"))??;
            FILES
                .iter()
                .try_for_each(|folder| unittest(&python, folder, None))
        })?;
        if !self.has_torch {
            stages.skip("torch", NO_TORCH);
            return Ok(());
        }
        stages.run("torch", || {
            let package = wheel::install(&python)?;
            TORCH
                .iter()
                .try_for_each(|folder| unittest(&python, folder, Some(&package)))
        })
    }
}

impl Drop for Tests {
    /// Waits for an installation that goes on: `pip` would outlive this program and its lock, and the next run would remove the folder
    /// below it.
    fn drop(&mut self) {
        if let Some(installation) = self.python.take() {
            if !installation.is_finished() {
                eprintln!("xtask: waiting for the installation of Python packages to finish");
            }
            // Its error belongs to a stage that does not run.
            drop(installation.join());
        }
    }
}

/// Runs the tests of a folder with the `lowp` that the test stage built.
fn unittest(python: &Path, folder: &str, package: Option<&Path>) -> Result<()> {
    let lowp = target_dir()?.join(format!("debug/lowp{}", std::env::consts::EXE_SUFFIX));
    ensure!(
        lowp.is_file(),
        "{} is missing; the test stage builds it",
        lowp.display()
    );
    let mut command = Command::new(python);
    command
        .args(["-m", "unittest", "discover", "--start-directory"])
        .arg(workspace_root()?.join(folder))
        // The source tree stays clean.
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("LOWP", lowp.canonicalize()?);
    if let Some(package) = package {
        command.env("PYTHONPATH", package);
    }
    run(command).with_context(|| format!("tests of {folder}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_has_a_fixed_version() {
        for list in [FILES_PACKAGES, TORCH_PACKAGES, wheel::BUILDER] {
            let text = environment::packages(&workspace_root().unwrap().join(list)).unwrap();
            let packages: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
            assert!(!packages.is_empty(), "{text}");
            for package in packages {
                assert!(package.contains("=="), "{package} has no fixed version");
            }
        }
    }
}

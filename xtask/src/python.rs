//! What is tested from Python. Without torch: the file commands, with the safetensors package that other programs use, against
//! numpy, and the table that sets peers beside the bench of a GPU. With torch: the package, and what transformers and
//! compressed-tensors make of exported models.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, JoinHandle};

use anyhow::{Context, Error, Result, anyhow, ensure};

use crate::command::{run, target_dir, workspace_root};
use crate::environment::{self, Environment};
use crate::wheel;

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
    installation: Option<JoinHandle<Installed>>,
}

/// What could be installed.
struct Installed {
    /// The interpreter of both stages.
    python: Result<PathBuf>,
    torch: Torch,
}

enum Torch {
    There,
    /// Nobody asked for it, and it would be large.
    LeftOut,
    Failed(Error),
}

impl Tests {
    /// Begins to install what is missing. What is wrong with that belongs to the stage that needs it.
    pub(crate) fn prepare() -> Self {
        let small = || Environment::new("files", FILES_PACKAGES)?.python();
        Self::installing(move || installed(with_torch(), small))
    }

    fn installing(install: impl FnOnce() -> Installed + Send + 'static) -> Self {
        Self {
            installation: Some(thread::spawn(install)),
        }
    }

    /// Runs both stages, or says what is left out.
    pub(crate) fn run(mut self, stages: &mut crate::stages::Stages) -> Result<()> {
        let mut python = PathBuf::new();
        let mut torch = Torch::LeftOut;
        stages.run("python", || {
            let installation = self.installation.take();
            let installation = installation.context("it was waited for before")?;
            let installed = installation
                .join()
                .map_err(|_| anyhow!("the installation of packages panicked"))?;
            python = installed.python?;
            torch = installed.torch;
            FILES
                .iter()
                .try_for_each(|folder| unittest(&python, folder, None))
        })?;
        if matches!(torch, Torch::LeftOut) {
            stages.skip("torch", NO_TORCH);
            return Ok(());
        }
        stages.run("torch", || {
            if let Torch::Failed(why) = torch {
                return Err(why);
            }
            let package = wheel::install(&python)?;
            TORCH
                .iter()
                .try_for_each(|folder| unittest(&python, folder, Some(&package)))
        })
    }
}

/// The interpreter of an environment with torch, where torch is there, small or asked for.
fn with_torch() -> Result<Option<PathBuf>> {
    let environment = Environment::new("torch", TORCH_PACKAGES)?;
    let wanted = environment.is_ready()
        || std::env::var_os(ANY_TORCH).is_some_and(|value| value == "1")
        || environment::has_small_torch();
    wanted.then(|| environment.python()).transpose()
}

/// The environment with torch serves both stages; without it, `small` the first one.
fn installed(
    with_torch: Result<Option<PathBuf>>,
    small: impl FnOnce() -> Result<PathBuf>,
) -> Installed {
    let (python, torch) = match with_torch {
        Ok(Some(python)) => (Ok(python), Torch::There),
        Ok(None) => (small(), Torch::LeftOut),
        Err(why) => (small(), Torch::Failed(why)),
    };
    Installed { python, torch }
}

impl Drop for Tests {
    /// Waits for an installation that goes on: `pip` would outlive this program.
    fn drop(&mut self) {
        if let Some(installation) = self.installation.take() {
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
        // Several threads on busy cores wait for each other in every operation.
        .env("OMP_NUM_THREADS", "1")
        .env("LOWP", lowp.canonicalize()?);
    if let Some(package) = package {
        command.env("PYTHONPATH", package);
    }
    run(command).with_context(|| format!("tests of {folder}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn torch_that_cannot_be_had_fails_its_own_stage_alone() {
        let small = || Ok(PathBuf::from("small"));
        let no_torch = || Err(anyhow!("no index"));
        let found = installed(no_torch(), small);
        assert_eq!(found.python.unwrap(), PathBuf::from("small"));
        assert!(matches!(found.torch, Torch::Failed(why) if why.to_string() == "no index"));
        let found = installed(Ok(None), small);
        assert!(found.python.is_ok() && matches!(found.torch, Torch::LeftOut));
        let found = installed(Ok(Some(PathBuf::from("large"))), || unreachable!());
        assert_eq!(found.python.unwrap(), PathBuf::from("large"));
        assert!(matches!(found.torch, Torch::There));
    }

    #[test]
    fn what_fails_while_packages_are_installed_belongs_to_the_stage() {
        let tests = Tests::installing(|| installed(Ok(None), || Err(anyhow!("no index"))));
        let error = tests.run(&mut crate::stages::Stages::default());
        let error = format!("{:#}", error.unwrap_err());
        assert_eq!(error, "stage `python` failed: no index");
    }

    #[test]
    fn no_installation_outlives_the_run() {
        let over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&over);
        let tests = Tests::installing(move || {
            thread::sleep(Duration::from_millis(100));
            ended.store(true, Ordering::SeqCst);
            installed(Ok(None), || Err(anyhow!("no index")))
        });
        drop(tests);
        assert!(over.load(Ordering::SeqCst));
    }

    #[test]
    fn every_package_has_a_fixed_version() {
        for list in [
            FILES_PACKAGES,
            TORCH_PACKAGES,
            wheel::BUILDER,
            wheel::MANYLINUX_BUILDER,
        ] {
            let text = environment::packages(&workspace_root().unwrap().join(list)).unwrap();
            let packages: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
            assert!(!packages.is_empty(), "{text}");
            for package in packages {
                assert!(package.contains("=="), "{package} has no fixed version");
            }
        }
    }
}

//! What is tested from Python: the file commands, with the safetensors package that other programs use, against numpy; what
//! transformers and compressed-tensors make of exported models; and the table that sets peers beside the bench of a GPU.
//!
//! The packages are installed once, below the target folder, and again when the list of them or the interpreter changes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::command::{run, succeeds, target_dir, workspace_root};
use crate::wheel;

/// The tests of the file commands, from the workspace root.
const TESTS: &str = "crates/lowp-cli/tests/python";
/// Those of exported models, which need torch.
const INTERCHANGE: &str = "crates/lowp-cli/tests/python_peers";
/// Set to install torch from any index, with CUDA's libraries where there is no other.
const TORCH: &str = "LOWP_TORCH";
/// The index that has torch without them.
const SMALL_TORCH: &str = "https://download.pytorch.org/whl/cpu";
/// Those of the package for PyTorch, which need torch and the wheel.
const TORCH_PACKAGE: &str = "crates/lowp-python/tests";
/// The tests of the peers' table, which need no packages.
const PEERS: &str = "benches/peers/tests";
/// What every remedy ends with.
const OR_LEAVE_OUT: &str = "or leave these tests out with `cargo xtask test --no-python`";
/// Oldest interpreter that has `tomllib`, as Python writes it.
const OLDEST: &str = "(3, 11)";

/// Runs the tests with the `lowp` that the test stage built.
pub(crate) fn test() -> Result<()> {
    let folder = target_dir()?;
    let lowp = folder.join(format!("debug/lowp{}", std::env::consts::EXE_SUFFIX));
    ensure!(
        lowp.is_file(),
        "{} is missing; the test stage builds it",
        lowp.display()
    );
    let plain = environment(&folder.join("python-tests"), TESTS)?;
    let mut runs = vec![(plain.clone(), TESTS), (plain.clone(), PEERS)];
    let venv = folder.join("python-interchange");
    let package = folder.join("python-torch");
    if package.exists() || std::env::var_os(TORCH).is_some() || has_small_torch(&plain) {
        let python = environment(&package, TORCH_PACKAGE)?;
        wheel::install(&python)?;
        runs.push((python, TORCH_PACKAGE));
    } else {
        eprintln!("{TORCH_PACKAGE}: left out, as below");
    }
    if venv.exists() || std::env::var_os(TORCH).is_some() || has_small_torch(&plain) {
        runs.push((environment(&venv, INTERCHANGE)?, INTERCHANGE));
    } else {
        eprintln!(
            "{INTERCHANGE}: left out: {SMALL_TORCH} cannot be reached, and torch from other indexes is a download of 3 GB; \
             {TORCH}=1 installs it from there"
        );
    }
    for (python, tests) in &runs {
        let mut command = Command::new(python);
        command
            .args(["-m", "unittest", "discover", "--start-directory"])
            .arg(workspace_root()?.join(tests))
            // The source tree stays clean.
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("LOWP", lowp.canonicalize()?);
        run(command)?;
    }
    Ok(())
}

/// Whether torch can be had without CUDA's libraries.
fn has_small_torch(python: &Path) -> bool {
    let mut ask = Command::new(python);
    ask.args(["-m", "pip", "index", "versions", "torch", "--retries", "0"]);
    ask.args(["--timeout", "5", "--index-url", SMALL_TORCH]);
    ask.stdout(Stdio::null()).stderr(Stdio::null());
    succeeds(ask)
}

/// The interpreter of an environment at `venv` that has what `tests` require installed.
pub(crate) fn environment(venv: &Path, tests: &str) -> Result<PathBuf> {
    let requirements = &workspace_root()?.join(tests).join("requirements.txt");
    let (system, python) = if cfg!(windows) {
        ("python", venv.join("Scripts/python.exe"))
    } else {
        ("python3", venv.join("bin/python"))
    };
    let mut check = Command::new(system);
    let recent = format!("import sys; sys.exit(sys.version_info < {OLDEST})");
    check.args(["-c", &recent]);
    ensure!(
        succeeds(check),
        "{system} is missing, or older than {OLDEST}; install it (Debian: `apt-get install python3 python3-venv`), \
         {OR_LEAVE_OUT}"
    );
    let version = Command::new(system).arg("--version").output()?.stdout;
    let listed = fs::read_to_string(requirements)
        .with_context(|| format!("cannot read {}", requirements.display()))?;
    let needed = format!("# {}\n{listed}", String::from_utf8_lossy(&version).trim());
    if is_ready(venv, &needed) {
        return Ok(python);
    }

    if venv.exists() {
        fs::remove_dir_all(venv).with_context(|| format!("cannot remove {}", venv.display()))?;
    }
    let mut make = Command::new(system);
    make.args(["-m", "venv"]).arg(venv);
    run(make).with_context(|| {
        format!("no environment can be made; install venv (Debian: `apt-get install python3-venv`), {OR_LEAVE_OUT}")
    })?;
    let mut install = Command::new(&python);
    install
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ])
        // Each package is looked for in every index, also in one that cannot be reached: 1 s each with 2, 8 s with pip's 5.
        .args(["--retries", "2"])
        // Compiling numpy would take longer than every test together.
        .args(["--only-binary", ":all:", "--requirement"])
        .arg(requirements);
    run(install).with_context(|| {
        format!("the packages of {tests}/requirements.txt cannot be installed; connect to a package index, {OR_LEAVE_OUT}")
    })?;
    fs::write(stamp(venv), needed)?;
    Ok(python)
}

/// Says what was installed, last of all.
fn stamp(venv: &Path) -> PathBuf {
    venv.join("installed.txt")
}

fn is_ready(venv: &Path, needed: &str) -> bool {
    fs::read_to_string(stamp(venv)).is_ok_and(|installed| installed == needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_of_other_packages_is_not_ready() {
        let venv = std::env::temp_dir().join(format!("lowp-xtask-python-{}", std::process::id()));
        assert!(!is_ready(&venv, "numpy==2"));
        fs::create_dir_all(&venv).unwrap();
        assert!(!is_ready(&venv, ""));
        fs::write(stamp(&venv), "numpy==2").unwrap();
        assert!(is_ready(&venv, "numpy==2"));
        assert!(!is_ready(&venv, "numpy==3"));
        fs::remove_dir_all(&venv).unwrap();
    }

    #[test]
    fn every_package_has_a_fixed_version() {
        for tests in [TESTS, INTERCHANGE, TORCH_PACKAGE, wheel::BUILDER] {
            let path = workspace_root()
                .unwrap()
                .join(tests)
                .join("requirements.txt");
            let text = fs::read_to_string(path).unwrap();
            let is_package = |line: &&str| !line.starts_with(['#', '-']);
            let packages: Vec<&str> = text.lines().filter(is_package).collect();
            assert!(!packages.is_empty(), "{text}");
            for package in packages {
                assert!(package.contains("=="), "{package} has no fixed version");
            }
        }
    }
}

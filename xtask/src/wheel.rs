//! `cargo xtask wheel`: the package `lowp` for PyTorch as a wheel, which pip installs beside any version of torch.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::command::{remove, run, target_dir, workspace_root};
use crate::cuda;
use crate::environment::{Environment, pip_install};

const CRATE: &str = "crates/lowp-python";
/// What builds wheels, from the workspace root.
pub(crate) const BUILDER: &str = "xtask/python/wheel.txt";

/// What to build.
#[derive(Debug, Default, Args)]
pub(crate) struct Options {
    /// For the CPU alone, also where kernels are there.
    #[arg(long, conflicts_with = "cuda")]
    cpu: bool,

    /// With CUDA kernels; an error where they are not there and nvcc is not either.
    #[arg(long)]
    cuda: bool,

    /// Quick to build and slow to run, for tests.
    #[arg(long)]
    debug: bool,
}

pub(crate) fn wheel(options: &Options) -> Result<()> {
    let built = target_dir()?.join("cuda-kernels").is_dir();
    let cuda = !options.cpu && (options.cuda || built || cuda::ready());
    let wheel = build(cuda, options.debug)?;
    let bytes = fs::metadata(&wheel)?.len();
    let what = if cuda { "CPU and CUDA" } else { "CPU alone" };
    eprintln!("{what}, {:.1} MB: {}", bytes as f64 / 1e6, wheel.display());
    Ok(())
}

/// Builds the wheel for tests and unpacks it into a folder of its own, which PYTHONPATH can name.
pub(crate) fn install(python: &Path) -> Result<PathBuf> {
    let wheel = build(false, true)?;
    let folder = target_dir()?.join("python-package");
    remove(&folder)?;
    let mut install = pip_install(python);
    install.arg("--no-deps").arg("--target").arg(&folder);
    install.arg(wheel);
    run(install)?;
    Ok(folder)
}

fn build(cuda: bool, debug: bool) -> Result<PathBuf> {
    let target = target_dir()?;
    let python = Environment::new("wheel", BUILDER)?.python()?;
    // A folder of its own: what was built before does not count.
    let out = target.join(if debug { "wheels/debug" } else { "wheels" });
    for old in wheels(&out)? {
        fs::remove_file(old)?;
    }
    let mut command = Command::new(&python);
    command.args(["-m", "maturin", "build", "--locked", "--manifest-path"]);
    command.arg(workspace_root()?.join(CRATE).join("Cargo.toml"));
    command
        .arg("--out")
        .arg(&out)
        .arg("--target-dir")
        .arg(&target);
    // Linked against what this machine has: a wheel for this machine and those like it.
    command.args(["--compatibility", "linux", "--auditwheel", "skip"]);
    command.args(["--profile", if debug { "dev" } else { "release" }]);
    if cuda {
        command.args(["--features", "cuda"]);
    }
    run(command)?;
    let mut found = wheels(&out)?;
    ensure!(
        found.len() == 1,
        "{} wheels in {}",
        found.len(),
        out.display()
    );
    found.pop().context("no wheel")
}

/// The wheels in a folder, which need not be there.
fn wheels(folder: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            found.push(path);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_builder_is_the_one_that_the_package_names() {
        let root = workspace_root().unwrap();
        let read = |path: PathBuf| fs::read_to_string(path).unwrap();
        let installed = read(root.join(BUILDER));
        let version = installed.lines().find(|line| line.starts_with("maturin=="));
        let package = read(root.join(CRATE).join("pyproject.toml"));
        assert!(package.contains(version.unwrap()), "{package}");
    }

    #[test]
    fn wheels_alone_are_found() {
        let folder = std::env::temp_dir().join(format!("lowp-xtask-wheel-{}", std::process::id()));
        assert!(wheels(&folder).unwrap().is_empty());
        fs::create_dir_all(&folder).unwrap();
        for name in ["a.whl", "b.txt"] {
            fs::write(folder.join(name), "").unwrap();
        }
        assert_eq!(wheels(&folder).unwrap(), [folder.join("a.whl")]);
        fs::remove_dir_all(&folder).unwrap();
    }
}

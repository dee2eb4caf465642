//! `cargo xtask wheel`: the package `lowp` for PyTorch as a wheel, which pip installs beside any version of torch.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::command::{remove, run, succeeds, target_dir, workspace_root};
use crate::cross::{self, Platform};
use crate::cuda;
use crate::environment::{Environment, pip_install};

const CRATE: &str = "crates/lowp-python";
/// What builds wheels, from the workspace root.
pub(crate) const BUILDER: &str = "xtask/python/wheel.txt";
/// What builds those for PyPI: also a linker that knows which symbols older versions of glibc have.
pub(crate) const MANYLINUX_BUILDER: &str = "xtask/python/manylinux.txt";
/// The oldest glibc of wheels for PyPI, as their tag has it.
const MANYLINUX: &str = "manylinux_2_28";
/// Run by each interpreter that a wheel was installed for.
const LOADS: &str = "xtask/python/loads.py";
/// The oldest minor version of CPython that wheels are for, as their tag `cp310-abi3` says, and the newest that is looked for.
const VERSIONS: std::ops::RangeInclusive<u32> = 10..=19;

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

    /// For PyPI: for any Linux with glibc 2.28 or newer, and not only for those like this one.
    #[arg(long)]
    manylinux: bool,

    #[command(flatten)]
    platform: Platform,
}

pub(crate) fn wheel(options: &Options) -> Result<()> {
    let built = target_dir()?.join("cuda-kernels").is_dir();
    let cuda = !options.cpu && (options.cuda || built || cuda::ready());
    let python = builder(options.manylinux)?;
    let wheel = build(&python, cuda, options)?;
    match options.platform.cross() {
        Some(platform) => eprintln!("xtask: the wheel is for {platform} and is not loaded here"),
        None => check(&python, &wheel)?,
    }
    let bytes = fs::metadata(&wheel)?.len();
    let what = if cuda { "CPU and CUDA" } else { "CPU alone" };
    eprintln!("{what}, {:.1} MB: {}", bytes as f64 / 1e6, wheel.display());
    Ok(())
}

/// Builds the wheel for tests, checks it, and unpacks it into a folder of its own, which PYTHONPATH can name.
pub(crate) fn install(python: &Path) -> Result<PathBuf> {
    let builder = builder(false)?;
    let options = Options {
        debug: true,
        ..Options::default()
    };
    let wheel = build(&builder, false, &options)?;
    check(&builder, &wheel)?;
    let folder = target_dir()?.join("python-package");
    remove(&folder)?;
    let mut install = pip_install(python);
    install.arg("--no-deps").arg("--target").arg(&folder);
    install.arg(wheel);
    run(install)?;
    Ok(folder)
}

/// The interpreter that has what builds wheels.
fn builder(manylinux: bool) -> Result<PathBuf> {
    let list = if manylinux {
        MANYLINUX_BUILDER
    } else {
        BUILDER
    };
    Environment::new("wheel", list)?.python()
}

/// Installs a wheel into a fresh environment of every CPython of this machine that it is for, that of `builder` among them, by pip of
/// `builder`, and loads it there.
fn check(builder: &Path, wheel: &Path) -> Result<()> {
    let folder = target_dir()?.join("wheels/installed");
    let installed = folder.join(if cfg!(windows) {
        "Scripts/python.exe"
    } else {
        "bin/python"
    });
    for python in with_builder(interpreters(&folders()), builder) {
        remove(&folder)?;
        let mut make = Command::new(&python);
        make.args(["-m", "venv", "--without-pip"]).arg(&folder);
        run(make)?;
        let mut install = Command::new(builder);
        install.args(["-m", "pip", "--disable-pip-version-check", "--python"]);
        install.arg(&installed);
        install.args(["install", "--quiet", "--no-index", "--no-deps"]);
        install.arg("--no-compile").arg(wheel);
        run(install)?;
        let mut loads = Command::new(&installed);
        loads.arg(workspace_root()?.join(LOADS));
        loads.arg(env!("CARGO_PKG_VERSION"));
        run(loads).with_context(|| format!("{} with {}", wheel.display(), python.display()))?;
        eprintln!("xtask: the wheel loads in {}", python.display());
    }
    remove(&folder)
}

/// Where interpreters are looked for: the folders of PATH, and those of pyenv, whose shims run the selected version alone.
fn folders() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut found: Vec<_> = env::split_paths(&path).collect();
    let root = env::var_os("PYENV_ROOT").map(PathBuf::from);
    if let Some(root) = root.or_else(|| Some(env::home_dir()?.join(".pyenv"))) {
        let versions = fs::read_dir(root.join("versions"))
            .into_iter()
            .flatten()
            .flatten();
        found.extend(versions.map(|version| version.path().join("bin")));
    }
    found
}

/// The first CPython of each version in `folders` that runs. None on Windows, which has one name for all.
fn interpreters(folders: &[PathBuf]) -> Vec<PathBuf> {
    let runs = |python: &PathBuf| {
        let mut asks = Command::new(python);
        asks.args(["-c", "import venv"]);
        succeeds(asks)
    };
    let first = |minor| {
        let name = format!("python3.{minor}");
        folders.iter().map(|folder| folder.join(&name)).find(runs)
    };
    VERSIONS.filter_map(first).collect()
}

/// `found`, and the interpreter of `builder` where it has none of these names.
fn with_builder(mut found: Vec<PathBuf>, builder: &Path) -> Vec<PathBuf> {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if !found.iter().any(|python| real(python) == real(builder)) {
        found.push(builder.to_owned());
    }
    found
}

fn build(python: &Path, cuda: bool, options: &Options) -> Result<PathBuf> {
    let target = target_dir()?;
    // A folder of its own: what was built before does not count.
    let out = target.join(if options.debug {
        "wheels/debug"
    } else {
        "wheels"
    });
    for old in wheels(&out)? {
        fs::remove_file(old)?;
    }
    let mut command = Command::new(python);
    command.args(["-m", "maturin", "build", "--locked", "--manifest-path"]);
    command.arg(workspace_root()?.join(CRATE).join("Cargo.toml"));
    command
        .arg("--out")
        .arg(&out)
        .arg("--target-dir")
        .arg(&target);
    if let Some(platform) = options.platform.cross() {
        command.args(["--target", platform]);
        // zig has a linker of its own.
        if !options.manylinux {
            cross::with_linker(&mut command);
        }
    }
    if options.manylinux {
        // Whose zig it is: otherwise that of the first Python on PATH.
        command.env("CARGO_ZIGBUILD_PYTHON_PATH", python);
        command.args([
            "--zig",
            "--compatibility",
            MANYLINUX,
            "--auditwheel",
            "check",
        ]);
    } else {
        // Linked against what this machine has: a wheel for this machine and those like it.
        command.args(["--compatibility", "linux", "--auditwheel", "skip"]);
    }
    command.args(["--profile", if options.debug { "dev" } else { "release" }]);
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
        assert!(package.contains(&format!("\">=3.{}\"", VERSIONS.start())));
    }

    #[cfg(unix)]
    #[test]
    fn interpreters_that_run_are_found_once() {
        use std::os::unix::fs::PermissionsExt;

        let folder = env::temp_dir().join(format!("lowp-xtask-pythons-{}", std::process::id()));
        let [first, second] = ["a", "b"].map(|name| folder.join(name));
        let write = |folder: &Path, name: &str, code: u8| {
            fs::create_dir_all(folder).unwrap();
            let path = folder.join(name);
            fs::write(&path, format!("#!/bin/sh\nexit {code}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        write(&first, "python3.9", 0);
        write(&first, "python3.11", 1);
        let ten = write(&first, "python3.10", 0);
        write(&second, "python3.10", 0);
        let eleven = write(&second, "python3.11", 0);
        let found = interpreters(&[folder.join("none"), first, second]);
        assert_eq!(found, [ten.clone(), eleven.clone()]);
        // The builder is tried, and once.
        let builder = folder.join("python");
        std::os::unix::fs::symlink(&eleven, &builder).unwrap();
        assert_eq!(
            with_builder(Vec::new(), &builder).as_slice(),
            std::slice::from_ref(&builder)
        );
        assert_eq!(with_builder(found, &builder), [ten, eleven]);
        fs::remove_dir_all(&folder).unwrap();
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

//! Environments of Python packages for tests and builds: installed once for each list of packages and interpreter, and kept.

use std::env;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::command::{run, succeeds, target_dir, workspace_root};

/// Set to the folder that environments are kept in, for several checkouts to share; the target folder otherwise.
const FOLDER: &str = "LOWP_ENVIRONMENTS";
/// Oldest interpreter that has `tomllib`, as Python writes it.
const OLDEST: &str = "(3, 11)";
/// What every remedy ends with.
const OR_LEAVE_OUT: &str = "or leave these tests out with `cargo xtask test --no-python`";
/// The index that has torch without CUDA's libraries: 200 MB in place of 2.9 GB.
const SMALL_TORCH: &str = "https://download.pytorch.org/whl/cpu";
const SMALL_TORCH_HOST: &str = "download.pytorch.org:443";

/// An environment that may have to be installed first.
#[derive(Debug)]
pub(crate) struct Environment {
    folder: PathBuf,
    list: PathBuf,
}

impl Environment {
    /// The environment of the packages that `list` names, a path from the workspace root.
    pub(crate) fn new(name: &str, list: &str) -> Result<Self> {
        let kept = env::var_os(FOLDER).map_or_else(target_dir, |folder| Ok(folder.into()))?;
        let list = workspace_root()?.join(list);
        let mut hasher = DefaultHasher::new();
        (packages(&list)?, interpreter()?).hash(&mut hasher);
        let folder = kept.join(format!("python-{name}-{:016x}", hasher.finish()));
        Ok(Self { folder, list })
    }

    /// Whether nothing has to be installed.
    pub(crate) fn is_ready(&self) -> bool {
        self.stamp().is_file()
    }

    /// Its interpreter, after everything is installed.
    pub(crate) fn python(&self) -> Result<PathBuf> {
        let python = self.folder.join(if cfg!(windows) {
            "Scripts/python.exe"
        } else {
            "bin/python"
        });
        if let Some(parent) = self.folder.parent() {
            fs::create_dir_all(parent)
                .with_context(|| format!("cannot make {}", parent.display()))?;
        }
        // Of two runs that share the folder, one installs and the other waits.
        let lock = File::create(self.folder.with_extension("lock"))?;
        lock.lock()?;
        if !self.is_ready() {
            self.install(&python)?;
            fs::write(self.stamp(), "")?;
        }
        Ok(python)
    }

    fn install(&self, python: &Path) -> Result<()> {
        let folder = self.folder.display();
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder).with_context(|| format!("cannot remove {folder}"))?;
        }
        let mut make = Command::new(SYSTEM);
        make.args(["-m", "venv"]).arg(&self.folder);
        run(make).with_context(|| {
            format!("no environment can be made; install venv (Debian: `apt-get install python3-venv`), {OR_LEAVE_OUT}")
        })?;
        let mut install = pip_install(python);
        // Compiling numpy would take longer than every test together.
        install.args(["--retries", "2", "--only-binary", ":all:", "--requirement"]);
        install.arg(&self.list);
        if packages(&self.list)?.contains("torch==") && has_small_torch() {
            install.args(["--extra-index-url", SMALL_TORCH]);
        }
        run(install).with_context(|| {
            let list = self.list.display();
            format!("the packages of {list} cannot be installed; connect to a package index, {OR_LEAVE_OUT}")
        })
    }

    /// Written last of all.
    fn stamp(&self) -> PathBuf {
        self.folder.join("installed")
    }
}

#[cfg(windows)]
const SYSTEM: &str = "python";
#[cfg(not(windows))]
const SYSTEM: &str = "python3";

/// `pip install` without the lines that a test run does not need.
pub(crate) fn pip_install(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "--quiet"]);
    command.arg("--disable-pip-version-check");
    command
}

/// Whether torch can be had without CUDA's libraries.
pub(crate) fn has_small_torch() -> bool {
    let Ok(mut addresses) = SMALL_TORCH_HOST.to_socket_addrs() else {
        return false;
    };
    let limit = Duration::from_secs(5);
    addresses.any(|address| TcpStream::connect_timeout(&address, limit).is_ok())
}

/// The version of the interpreter, which must not be too old.
fn interpreter() -> Result<Vec<u8>> {
    let mut check = Command::new(SYSTEM);
    check.args([
        "-c",
        &format!("import sys; sys.exit(sys.version_info < {OLDEST})"),
    ]);
    ensure!(
        succeeds(check),
        "{SYSTEM} is missing, or older than {OLDEST}; install it (Debian: `apt-get install python3 python3-venv`), \
         {OR_LEAVE_OUT}"
    );
    Ok(Command::new(SYSTEM).arg("--version").output()?.stdout)
}

/// The text of a list, with the lists that it includes.
pub(super) fn packages(list: &Path) -> Result<String> {
    let text =
        fs::read_to_string(list).with_context(|| format!("cannot read {}", list.display()))?;
    let mut all = String::new();
    for line in text.lines() {
        match line.strip_prefix("-r ") {
            Some(other) => all += &packages(&list.with_file_name(other.trim()))?,
            None => {
                all += line;
                all += "\n";
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_is_ready_when_the_last_of_it_is_written() {
        let folder = env::temp_dir().join(format!("lowp-xtask-python-{}", std::process::id()));
        let list = folder.join("list.txt");
        let environment = Environment {
            folder: folder.clone(),
            list,
        };
        assert!(!environment.is_ready());
        fs::create_dir_all(&folder).unwrap();
        assert!(!environment.is_ready());
        fs::write(environment.stamp(), "").unwrap();
        assert!(environment.is_ready());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn lists_include_others() {
        let folder = tempfile();
        fs::write(folder.join("a.txt"), "x==1\n-r b.txt\n").unwrap();
        fs::write(folder.join("b.txt"), "y==2\n").unwrap();
        assert_eq!(packages(&folder.join("a.txt")).unwrap(), "x==1\ny==2\n");
        fs::remove_dir_all(&folder).unwrap();
    }

    fn tempfile() -> PathBuf {
        let folder = env::temp_dir().join(format!("lowp-xtask-lists-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }
}

//! Environments of Python packages for tests and builds: installed once for each list of packages and interpreter, and kept while they
//! are used.

use std::env;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};

use crate::command::{remove, run, succeeds, target_dir, workspace_root};

/// Set to the folder that environments are kept in, for several checkouts to share; the target folder otherwise.
const FOLDER: &str = "LOWP_ENVIRONMENTS";
/// Oldest interpreter that has `tomllib`, as Python writes it.
const OLDEST: &str = "(3, 11)";
/// What every remedy ends with.
const OR_LEAVE_OUT: &str = "or leave these tests out with `cargo xtask test --no-python`";
/// What the folder of an environment is called before its list.
const PREFIX: &str = "python-";
/// Environments that were not used for so long are removed: their list has changed, or their checkout is gone.
const UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);
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
        let folder = kept.join(format!("{PREFIX}{name}-{:016x}", hasher.finish()));
        Ok(Self { folder, list })
    }

    /// Whether nothing has to be installed.
    pub(crate) fn is_ready(&self) -> bool {
        self.stamp().is_file()
    }

    /// Its interpreter, after everything is installed.
    pub(crate) fn python(&self) -> Result<PathBuf> {
        if let Some(kept) = self.folder.parent() {
            fs::create_dir_all(kept).with_context(|| format!("cannot make {}", kept.display()))?;
        }
        // Of two runs that share the folder, one installs and the other waits.
        let lock = File::create(lock_of(&self.folder))?;
        lock.lock()?;
        if !self.is_ready() {
            self.install(|folder| install(folder, &self.list))?;
        }
        let stamp = File::options().write(true).open(self.stamp())?;
        stamp.set_modified(SystemTime::now())?;
        if let Some(kept) = self.folder.parent() {
            remove_unused(kept, SystemTime::now())?;
        }
        Ok(interpreter_of(&self.folder))
    }

    /// Has `fill` install into a folder that is renamed when it is whole. An installer that outlives a run which was killed writes there,
    /// and disturbs nobody. The scripts in it have that name in their first line; modules (`python -m`) do not care.
    fn install(&self, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let unfinished = format!("{}.{UNFINISHED}", process::id());
        let unfinished = self.folder.with_extension(unfinished);
        remove(&unfinished)?;
        if let Err(why) = fill(&unfinished) {
            if let Err(error) = remove(&unfinished) {
                eprintln!("xtask: {error:#}");
            }
            return Err(why);
        }
        fs::write(unfinished.join(STAMP), "")?;
        remove(&self.folder)?;
        fs::rename(&unfinished, &self.folder)
            .with_context(|| format!("cannot rename {}", unfinished.display()))
    }

    /// Written last of all, and again at every use.
    fn stamp(&self) -> PathBuf {
        self.folder.join(STAMP)
    }
}

/// The file in an environment that says that it is whole, and when it was used.
const STAMP: &str = "installed";
/// What the name of a folder ends with while it is filled.
const UNFINISHED: &str = "unfinished";

fn install(folder: &Path, list: &Path) -> Result<()> {
    let mut make = Command::new(SYSTEM);
    make.args(["-m", "venv"]).arg(folder);
    run(make).with_context(|| {
        format!("no environment can be made; install venv (Debian: `apt-get install python3-venv`), {OR_LEAVE_OUT}")
    })?;
    let mut install = pip_install(&interpreter_of(folder));
    // Compiling numpy would take longer than every test together.
    install.args(["--retries", "2", "--only-binary", ":all:", "--requirement"]);
    install.arg(list);
    if packages(list)?.contains("torch==") && has_small_torch() {
        install.args(["--extra-index-url", SMALL_TORCH]);
    }
    run(install).with_context(|| {
        let list = list.display();
        format!(
            "the packages of {list} cannot be installed; connect to a package index, {OR_LEAVE_OUT}"
        )
    })
}

/// Removes environments below `kept` that were not used for long, and what installations that were killed left.
fn remove_unused(kept: &Path, now: SystemTime) -> Result<()> {
    for entry in fs::read_dir(kept)? {
        let folder = entry?.path();
        let name = folder.file_name().and_then(|name| name.to_str());
        if !name.is_some_and(|name| name.starts_with(PREFIX)) || !is_unused(&folder, now) {
            continue;
        }
        // Nobody waits for what an installation that was killed left.
        if is_unfinished(&folder) {
            remove(&folder)?;
            continue;
        }
        // Another run may be about to use it.
        let lock = File::create(lock_of(&folder))?;
        if lock.try_lock().is_ok() && is_unused(&folder, now) {
            eprintln!("xtask: removing {}, unused for 30 days", folder.display());
            remove(&folder)?;
        }
    }
    Ok(())
}

/// Whether `folder` is an environment, or was to become one, that was last used long before `now`.
fn is_unused(folder: &Path, now: SystemTime) -> bool {
    let used = match fs::metadata(folder.join(STAMP)) {
        Err(_) if is_unfinished(folder) => fs::metadata(folder),
        used => used,
    };
    let used = used.and_then(|used| used.modified());
    used.is_ok_and(|used| now.duration_since(used).is_ok_and(|time| time > UNUSED))
}

/// Whether `folder` was to become an environment.
fn is_unfinished(folder: &Path) -> bool {
    folder.extension().is_some_and(|e| e == UNFINISHED)
}

/// What is locked while an environment is installed. It stays when the environment goes: another run may wait for it.
fn lock_of(folder: &Path) -> PathBuf {
    folder.with_extension("lock")
}

fn interpreter_of(folder: &Path) -> PathBuf {
    folder.join(if cfg!(windows) {
        "Scripts/python.exe"
    } else {
        "bin/python"
    })
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

pub(crate) fn packages(list: &Path) -> Result<String> {
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
    fn an_environment_is_there_when_it_is_whole() {
        let kept = tempfile("whole");
        let environment = Environment {
            folder: kept.join("python-a-1"),
            list: kept.join("list.txt"),
        };
        let names = || {
            let entries = fs::read_dir(&kept).unwrap();
            let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let failed = environment.install(|folder| {
            fs::create_dir(folder)?;
            anyhow::bail!("no index")
        });
        assert_eq!(failed.unwrap_err().to_string(), "no index");
        assert!(names().is_empty());
        // What cannot be removed is not the error to tell.
        let failed = environment.install(|folder| {
            fs::write(folder, "no folder")?;
            anyhow::bail!("no index")
        });
        assert_eq!(failed.unwrap_err().to_string(), "no index");
        for name in names() {
            fs::remove_file(kept.join(name)).unwrap();
        }
        // Left by a version that installed in place, and by an installer of a run that was killed, which goes on.
        let orphan = kept.join("python-a-1.0.unfinished");
        for folder in [&environment.folder, &orphan] {
            fs::create_dir(folder).unwrap();
        }
        assert!(!environment.is_ready());
        environment
            .install(|folder| {
                assert!(!environment.is_ready());
                fs::create_dir(folder)?;
                fs::write(folder.join("package"), "")?;
                Ok(())
            })
            .unwrap();
        assert!(environment.is_ready() && environment.folder.join("package").is_file());
        assert_eq!(names(), ["python-a-1", "python-a-1.0.unfinished"]);
        fs::remove_dir_all(&kept).unwrap();
    }

    #[test]
    fn environments_that_nobody_uses_are_removed() {
        let kept = tempfile("unused");
        for name in ["python-old-1", "python-used-2", "python-busy-3", "others-4"] {
            fs::create_dir(kept.join(name)).unwrap();
            fs::write(kept.join(name).join(STAMP), "").unwrap();
        }
        // Nothing of these (`wheel::install`).
        fs::create_dir(kept.join("python-package")).unwrap();
        fs::create_dir(kept.join("python-old-1.7.unfinished")).unwrap();
        let busy = File::create(lock_of(&kept.join("python-busy-3"))).unwrap();
        busy.lock().unwrap();
        let later = SystemTime::now() + UNUSED + Duration::from_secs(60);
        let used = File::options()
            .write(true)
            .open(kept.join("python-used-2").join(STAMP));
        used.unwrap().set_modified(later).unwrap();
        let left = |now: SystemTime| {
            remove_unused(&kept, now).unwrap();
            let entries = fs::read_dir(&kept).unwrap().map(|e| e.unwrap().path());
            let mut left: Vec<_> = entries
                .filter(|path| path.is_dir())
                .map(|path| path.file_name().unwrap().to_owned())
                .collect();
            left.sort();
            left
        };
        assert_eq!(left(SystemTime::now()).len(), 6);
        let kept_names = [
            "others-4",
            "python-busy-3",
            "python-package",
            "python-used-2",
        ];
        assert_eq!(left(later), kept_names);
        // The locks of environments stay, and others there are none.
        assert!(!lock_of(&kept.join("python-old-1.7.unfinished")).exists());
        fs::remove_dir_all(&kept).unwrap();
    }

    #[test]
    fn lists_include_others() {
        let folder = tempfile("lists");
        fs::write(folder.join("a.txt"), "x==1\n-r b.txt\n").unwrap();
        fs::write(folder.join("b.txt"), "y==2\n").unwrap();
        assert_eq!(packages(&folder.join("a.txt")).unwrap(), "x==1\ny==2\n");
        fs::remove_dir_all(&folder).unwrap();
    }

    fn tempfile(name: &str) -> PathBuf {
        let folder = env::temp_dir().join(format!("lowp-xtask-{name}-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }
}

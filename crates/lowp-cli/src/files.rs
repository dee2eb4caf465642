//! Result files that are either whole or absent, and known to be writable before hours of work.

use crate::usage::UsageError;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Finds out whether [`write_atomically`] could write `path` now; `option` names it in the error.
///
/// # Errors
/// A [`UsageError`] if `path` is no file name, exists as something else than a regular file, or lies in a folder that
/// is missing or cannot be written.
pub(crate) fn check_writable(option: &str, path: &Path) -> Result<(), UsageError> {
    let refuse = |why: &dyn std::fmt::Display| {
        UsageError::new(format!("{option}: cannot write {}: {why}", path.display()))
    };
    let target = Target::of(path).map_err(|e| refuse(&e))?;
    File::create(&target.temporary)
        .and_then(|_| fs::remove_file(&target.temporary))
        .map_err(|e| refuse(&e))
}

/// Writes `contents` to a temporary name beside `path`, syncs it and renames it into place.
///
/// # Errors
/// If the file cannot be created, written or renamed; the temporary file is removed then.
pub(crate) fn write_atomically(path: &Path, contents: &str) -> Result<()> {
    let write = || {
        let Target { file, temporary } = Target::of(path)?;
        let written = File::create(&temporary).and_then(|mut out| {
            out.write_all(contents.as_bytes())?;
            out.sync_all()?;
            fs::rename(&temporary, &file)
        });
        if written.is_err() {
            // The first error is the one worth reporting; a leftover temporary file does no harm.
            let _ = fs::remove_file(&temporary);
        }
        written
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// The file behind a path, links followed, and the name that it is written under first.
struct Target {
    file: PathBuf,
    temporary: PathBuf,
}

impl Target {
    fn of(path: &Path) -> io::Result<Self> {
        let file = match fs::canonicalize(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(error),
        };
        // A rename would replace a device or a pipe by a file.
        if fs::metadata(&file).is_ok_and(|data| !data.is_file()) {
            return Err(io::Error::other("it exists and is no regular file"));
        }
        let name = file
            .file_name()
            .ok_or_else(|| io::Error::other("it is no file name"))?;
        let mut temporary = OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}.tmp", std::process::id()));
        Ok(Self {
            temporary: file.with_file_name(temporary),
            file,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_a_file_and_leaves_nothing_else() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("out.json");
        check_writable("--json", &path)?;
        assert_eq!(fs::read_dir(dir.path())?.count(), 0);
        write_atomically(&path, "one")?;
        check_writable("--json", &path)?;
        write_atomically(&path, "two")?;
        assert_eq!(fs::read_to_string(&path)?, "two");
        assert_eq!(fs::read_dir(dir.path())?.count(), 1);
        Ok(())
    }

    #[test]
    fn names_the_file_it_cannot_write() {
        let path = Path::new("/no/such/folder/x");
        let error = write_atomically(path, "").unwrap_err();
        assert!(error.to_string().contains("/no/such/folder/x"));
        let error = check_writable("--json", path).unwrap_err().to_string();
        assert!(error.starts_with("--json: cannot write /no/such/folder/x"));
    }

    #[test]
    fn only_regular_files_are_replaced() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let error = check_writable("--json", dir.path()).unwrap_err();
        assert!(error.to_string().contains("no regular file"), "{error}");
        assert!(write_atomically(dir.path(), "").is_err());
        assert!(check_writable("--json", &dir.path().join("..")).is_err());
        Ok(())
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_a_link() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "old")?;
        std::os::unix::fs::symlink(&file, &link)?;
        write_atomically(&link, "new")?;
        assert!(fs::symlink_metadata(&link)?.is_symlink());
        assert_eq!(fs::read_to_string(&file)?, "new");
        Ok(())
    }
}

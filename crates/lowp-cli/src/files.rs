//! Result files that are either whole or absent.

use anyhow::{Context, Result};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// Writes `contents` to a temporary name beside `path`, syncs it and renames it into place.
///
/// # Errors
/// If the file cannot be created, written or renamed; the temporary file is removed then.
pub(crate) fn write_atomically(path: &Path, contents: &str) -> Result<()> {
    let name = path
        .file_name()
        .with_context(|| format!("{} is not a file name", path.display()))?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let written = File::create(&temporary).and_then(|mut file| {
        file.write_all(contents.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    });
    if written.is_err() {
        // The first error is the one worth reporting; a leftover temporary file does no harm.
        let _ = fs::remove_file(&temporary);
    }
    written.with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_a_file_and_leaves_nothing_else() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("out.json");
        write_atomically(&path, "one")?;
        write_atomically(&path, "two")?;
        assert_eq!(fs::read_to_string(&path)?, "two");
        assert_eq!(fs::read_dir(dir.path())?.count(), 1);
        Ok(())
    }

    #[test]
    fn names_the_file_it_cannot_write() {
        let error = write_atomically(Path::new("/no/such/folder/x"), "").unwrap_err();
        assert!(error.to_string().contains("/no/such/folder/x"));
    }
}

//! Result files of commands: named by their option where they cannot be written, before hours of work.

use crate::output::shown;
use crate::usage::UsageError;
use anyhow::{Context, Result};
use lowp_file::files::{self, resolve};
use lowp_file::json::from_python;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub(crate) use lowp_file::files::read_regular;

/// Most bytes of a file of settings or measurements.
const MAX_BYTES: u64 = 16 << 20;

/// The value of a JSON file that `option` names, with 0 for `NaN` and `Infinity` of Python.
pub(crate) fn read_json(option: &str, path: &str) -> Result<Value, UsageError> {
    let file = shown(path);
    let bytes = read_regular(Path::new(path), MAX_BYTES);
    let bytes = bytes.map_err(|e| UsageError::new(format!("{option} {file}: {e}")))?;
    from_python(bytes).map_err(|e| UsageError::new(format!("{option} {file} is not JSON: {e}")))
}

/// Finds out whether [`write_atomically`] could write `path` now; `option` names it in the error.
pub(crate) fn check_writable(option: &str, path: &Path) -> Result<(), UsageError> {
    let unwritable = |e| UsageError::new(format!("{option}: cannot write {}: {e}", path.display()));
    files::check_writable(path).map_err(unwritable)
}

/// Rejects two options of which one names an output and the other the same file, also through links.
pub(crate) fn check_distinct<'a>(
    inputs: impl IntoIterator<Item = (&'static str, &'a Path)>,
    outputs: impl IntoIterator<Item = (&'static str, &'a Path)>,
) -> Result<(), UsageError> {
    // What cannot be resolved is reported where it is opened.
    let place = |(option, path): (&'static str, &Path)| Some((option, resolve(path).ok()?));
    let mut taken: Vec<(&str, PathBuf)> = inputs.into_iter().filter_map(place).collect();
    for (option, path) in outputs.into_iter().filter_map(place) {
        if let Some((other, _)) = taken.iter().find(|(_, other)| *other == path) {
            let text = format!("{other} and {option} name the same path; give another name");
            return Err(UsageError::new(text));
        }
        taken.push((option, path));
    }
    Ok(())
}

/// Writes `contents` to a temporary name next to `path`, syncs it and renames it into place.
pub(crate) fn write_atomically(path: &Path, contents: &str) -> Result<()> {
    let written = files::write_atomically(path, contents);
    written.with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_file_it_cannot_write() {
        let path = Path::new("/no/such/folder/x");
        let error = write_atomically(path, "").unwrap_err();
        assert!(error.to_string().contains("/no/such/folder/x"));
        let error = check_writable("--json", path).unwrap_err().to_string();
        assert!(error.starts_with("--json: cannot write /no/such/folder/x"));
    }
}

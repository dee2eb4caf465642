//! The headers that kernels include and that say what `src/cuda/table` says: written by `cargo xtask cuda`, checked by the build script.

use std::fs;
use std::path::{Path, PathBuf};

use lowp_nvcc::{Result, write};

#[path = "../src/cuda/table/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the backend uses the rest")]
mod table;

/// Where they are, below the folder of the kernels.
const HEADERS: &str = "include/lowp";

/// Writes the headers of the table below `cuda` that are not up to date.
///
/// # Errors
/// They cannot be written.
#[allow(dead_code, reason = "the build script writes nothing into the sources")]
pub(crate) fn write_headers(cuda: &Path) -> Result<()> {
    stale_headers(cuda).try_for_each(|(path, text)| write(&path, text.as_bytes()))
}

/// Whether the headers of the table below `cuda` say what the table says.
///
/// # Errors
/// They do not.
#[allow(
    dead_code,
    reason = "xtask writes them, and checks them in tests alone"
)]
pub(crate) fn check_headers(cuda: &Path) -> Result<()> {
    match stale_headers(cuda).next() {
        None => Ok(()),
        Some((path, _)) => Err(format!(
            "{} is not what src/cuda/table says; run `cargo xtask cuda`, which writes it",
            path.display()
        )),
    }
}

/// Headers that say something else, and what they should say.
fn stale_headers(cuda: &Path) -> impl Iterator<Item = (PathBuf, String)> + use<> {
    let folder = cuda.join(HEADERS);
    table::headers()
        .into_iter()
        .map(move |(name, text)| (folder.join(name), text))
        .filter(|(path, text)| !fs::read_to_string(path).is_ok_and(|found| found == *text))
}

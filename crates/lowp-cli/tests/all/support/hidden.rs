//! What commands leave beside what they were asked for.

use std::path::Path;

/// The hidden names in `folder`, in order.
pub(crate) fn hidden(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).expect("a folder").flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.starts_with('.')).collect();
    names.sort();
    names
}

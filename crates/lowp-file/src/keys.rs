//! The keys of a file's metadata that are ours, and their version.

use crate::error::{Result, file_error, mend_file};
use crate::remedy::Remedy;
use crate::text::shown;
use std::collections::HashMap;
use std::path::Path;

/// What every key of ours begins with.
const PREFIX: &str = "lowp.";
/// The key of the contract's version.
pub(crate) const FORMAT_KEY: &str = "lowp.format";
/// The version that is written and read.
pub(crate) const FORMAT: &str = "1";
/// What the key of a tensor begins with; its name follows.
pub(crate) const TENSOR_PREFIX: &str = "lowp.tensor.";

pub(crate) fn key(name: &str) -> String {
    format!("{TENSOR_PREFIX}{name}")
}

/// Whether a key is one of ours, to be left out when metadata are copied.
pub(crate) fn is_ours(key: &str) -> bool {
    key.starts_with(PREFIX)
}

/// Checks the keys of ours among those of one file: they say their version, and are those of it. A file without any is
/// somebody else's.
pub(crate) fn check_keys(path: &Path, metadata: &HashMap<String, String>) -> Result<()> {
    if let Some(rank) = lowp_checkpoint::rank_of_file(metadata) {
        return Err(mend_file(
            path,
            format!("the part that rank {} has of a checkpoint", shown(rank)),
            Remedy::GiveCheckpoint,
        ));
    }
    let ours = || metadata.keys().filter(|key| is_ours(key));
    let Some(first) = ours().min() else {
        return Ok(());
    };
    let Some(version) = metadata.get(FORMAT_KEY) else {
        return Err(file_error!(
            path,
            "it has the metadata '{}' and no {FORMAT_KEY}, which says how they are read; copy all metadata of the file that \
                 lowp wrote, or quantize the model again",
            shown(first)
        ));
    };
    if version != FORMAT {
        return Err(file_error!(
            path,
            "{FORMAT_KEY} is '{}' and this program reads '{FORMAT}'; use the lowp that wrote it",
            shown(version)
        ));
    }
    let known = |key: &str| key == FORMAT_KEY || key.starts_with(TENSOR_PREFIX);
    match ours().filter(|key| !known(key)).min() {
        None => Ok(()),
        Some(key) => Err(file_error!(
            path,
            "the metadata key '{}' is none of {FORMAT_KEY} '{FORMAT}', which has {TENSOR_PREFIX}NAME alone; use the lowp that \
                 wrote it, or give the key another name",
            shown(key)
        )),
    }
}

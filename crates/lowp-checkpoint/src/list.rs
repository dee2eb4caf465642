//! The list of what a rank wrote. It lies next to the rank's file until the first rank has made the index of all lists: ranks tell each
//! other only how long theirs are.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::CheckpointError;
use crate::folder::put;
use crate::index::{Written, checksum};

/// What a rank tells the others of its list.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) pieces: usize,
    pub(crate) bytes: u64,
    checksum: String,
}

fn path_of(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank:05}.list"))
}

pub(crate) fn write(
    folder: &Path,
    rank: usize,
    written: &Written,
) -> Result<Told, CheckpointError> {
    let path = path_of(folder, rank);
    let bytes = postcard::to_stdvec(written).map_err(std::io::Error::other);
    let bytes = bytes.map_err(CheckpointError::io(&path, "write"))?;
    put(&path, &bytes)?;
    Ok(Told {
        pieces: written.pieces.len(),
        bytes: bytes.len() as u64,
        checksum: checksum(&bytes),
    })
}

/// Reads the list of `rank`, which is as it was `told`, and removes it.
pub(crate) fn take(folder: &Path, rank: usize, told: &Told) -> Result<Written, CheckpointError> {
    let path = path_of(folder, rank);
    let bytes = fs::read(&path).map_err(CheckpointError::io(&path, "read"))?;
    if checksum(&bytes) != told.checksum {
        let (found, expected) = (bytes.len(), told.bytes);
        let why = format!("its {found} bytes are not the {expected} that rank {rank} wrote");
        return Err(CheckpointError::damaged(&path, why));
    }
    let written = postcard::from_bytes(&bytes);
    let written = written.map_err(|e| CheckpointError::damaged(&path, e.to_string()))?;
    fs::remove_file(&path).map_err(CheckpointError::io(&path, "remove"))?;
    Ok(written)
}

//! One rank's file.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype as Stored, SafeTensorError, View};

use crate::folder::sync;
use crate::index::{FileRecord, Written, checksum, file_name};
use crate::{CheckpointError, Dtype, Piece};

/// The key of a file's metadata that names its checkpoint.
pub(crate) const ID: &str = "lowp.checkpoint";
/// The key of a file's metadata that names its rank.
pub(crate) const RANK: &str = "lowp.rank";

impl View for &Piece {
    fn dtype(&self) -> Stored {
        stored(self.dtype)
    }

    fn shape(&self) -> &[usize] {
        &self.block.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// The dtype in the file.
pub(crate) fn stored(dtype: Dtype) -> Stored {
    match dtype {
        Dtype::F32 => Stored::F32,
        Dtype::U8 => Stored::U8,
    }
}

/// Checks pieces before anything is written.
pub(crate) fn check(pieces: &[Piece]) -> Result<(), CheckpointError> {
    let mut names: Vec<&str> = pieces.iter().map(|piece| piece.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        let name = pair[0].to_owned();
        return Err(CheckpointError::TwoPieces { name });
    }
    for piece in pieces {
        let (block, full) = (piece.block, piece.full);
        if !block.lies_in(full) {
            let name = piece.name.clone();
            return Err(CheckpointError::NoBlock { name, full, block });
        }
        let entries = block.entries();
        let needed = entries.and_then(|n| n.checked_mul(piece.dtype.bytes()));
        if needed != Some(piece.bytes.len()) {
            return Err(CheckpointError::PieceBytes {
                name: piece.name.clone(),
                found: piece.bytes.len(),
                needed: needed.unwrap_or(usize::MAX),
            });
        }
    }
    Ok(())
}

/// Writes the file of `rank` into `folder`, and waits until it is on the disk.
pub(crate) fn write(
    folder: &Path,
    rank: usize,
    id: &str,
    pieces: &[Piece],
) -> Result<Written, CheckpointError> {
    let name = file_name(rank);
    let path = folder.join(&name);
    let about = [(ID, id.to_owned()), (RANK, rank.to_string())];
    let about: HashMap<String, String> = about.map(|(key, value)| (key.to_owned(), value)).into();
    let views = pieces.iter().map(|piece| (piece.name.as_str(), piece));
    safetensors::serialize_to_file(views, Some(about), &path).map_err(|error| match error {
        SafeTensorError::IoError(error) => CheckpointError::io(&path, "write")(error),
        error => CheckpointError::io(&path, "write")(std::io::Error::other(error)),
    })?;
    sync(&path)?;
    let bytes = fs::metadata(&path).map_err(CheckpointError::io(&path, "read the length of"))?;
    let record = |piece: &Piece| {
        let sum = checksum(&piece.bytes);
        (
            piece.name.clone(),
            piece.dtype,
            piece.full,
            piece.block,
            sum,
        )
    };
    Ok(Written {
        file: FileRecord {
            name,
            bytes: bytes.len(),
        },
        pieces: pieces.iter().map(record).collect(),
    })
}

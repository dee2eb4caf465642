//! One rank's file.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::Path;

use safetensors::tensor::Dtype as Stored;

use crate::header::{self, HEADER_LENGTH, HeaderEntry, header};
use crate::index::{FileRecord, Written, checksum, file_name};
use crate::{CheckpointError, Dtype, Late, Piece};

/// Longest header of a file that is read, and so written: that of about a million tensors. Tests have few.
pub(crate) const MAX_HEADER: u64 = if cfg!(test) {
    1 << 18
} else {
    header::MAX_HEADER as u64
};

/// The key of a file's metadata that names its checkpoint.
pub(crate) const ID: &str = "lowp.checkpoint";
/// The key of a file's metadata that names its rank.
pub(crate) const RANK: &str = "lowp.rank";

/// The rank whose file of a checkpoint has these `metadata`; `None` of any other safetensors file.
pub fn rank_of_file(metadata: &HashMap<String, String>) -> Option<&str> {
    metadata.get(ID)?;
    metadata.get(RANK).map(String::as_str)
}

pub(crate) fn stored(dtype: Dtype) -> Stored {
    match dtype {
        Dtype::F32 => Stored::F32,
        Dtype::U8 => Stored::U8,
    }
}

/// Checks pieces before anything is written.
pub(crate) fn check(pieces: &[Piece<Late>]) -> Result<(), CheckpointError> {
    let mut names: Vec<&str> = pieces.iter().map(|piece| piece.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(CheckpointError::Invalid(format!(
            "tensor '{}' has two pieces on one rank; give the part of each rank as one piece",
            pair[0]
        )));
    }
    for Piece {
        name,
        dtype,
        full,
        block,
        bytes,
    } in pieces
    {
        if !block.lies_in(*full) {
            return Err(CheckpointError::no_block(name, *full, *block));
        }
        let needed = block.entries().and_then(|n| n.checked_mul(dtype.bytes()));
        if needed != Some(bytes.len()) {
            let (found, needed) = (bytes.len(), needed.unwrap_or(usize::MAX));
            return Err(CheckpointError::Invalid(format!(
                "tensor '{name}': {found} bytes for a block of {needed}"
            )));
        }
    }
    Ok(())
}

/// Writes the file of `rank` into `folder`, and waits until it is on the disk.
pub(crate) fn write(
    folder: &Path,
    rank: usize,
    id: &str,
    mut pieces: Vec<Piece<Late>>,
) -> Result<Written, CheckpointError> {
    let name = file_name(rank);
    let path = folder.join(&name);
    let about = [(ID, id.to_owned()), (RANK, rank.to_string())];
    let about: BTreeMap<String, String> = about.map(|(key, value)| (key.to_owned(), value)).into();
    // Wide entries first, so that every tensor is aligned.
    pieces.sort_by_key(|piece| Reverse(piece.dtype.bytes()));
    let entries = pieces.iter().map(|piece| HeaderEntry {
        name: &piece.name,
        dtype: stored(piece.dtype),
        shape: &piece.block.shape,
        bytes: piece.bytes.len(),
    });
    let header = header(entries, &about).map_err(std::io::Error::other);
    let header = header.map_err(CheckpointError::io(&path, "write"))?;
    let bytes = (header.len() - HEADER_LENGTH) as u64;
    if bytes > MAX_HEADER {
        return Err(CheckpointError::TooLong {
            path,
            what: "the header",
            pieces: pieces.len(),
            bytes,
            most: MAX_HEADER,
        });
    }
    let data: usize = pieces.iter().map(|piece| piece.bytes.len()).sum();
    let length = (header.len() + data) as u64;
    let failed = || CheckpointError::write(&path, length);
    let mut file = File::create(&path).map_err(CheckpointError::io(&path, "create"))?;
    let mut put = |bytes: &[u8]| file.write_all(bytes);
    put(&header).map_err(failed())?;
    let mut records = Vec::new();
    // One piece after the other, so that no more of them than that on its way is in memory twice.
    for piece in pieces {
        let (name, kind) = (piece.name, (piece.dtype, piece.full, piece.block));
        let bytes = match piece.bytes.wait() {
            Ok(bytes) => bytes,
            Err(why) => return Err(CheckpointError::NoBytes { name, why }),
        };
        put(&bytes).map_err(failed())?;
        records.push((name, kind.0, kind.1, kind.2, checksum(&bytes)));
    }
    file.sync_all().map_err(failed())?;
    Ok(Written {
        file: FileRecord {
            name,
            bytes: length,
        },
        pieces: records,
    })
}

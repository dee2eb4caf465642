//! [`Index`]: the content of `index.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use twox_hash::XxHash3_64;

use crate::{Block, CheckpointError, Dtype};

/// The version that this crate writes and reads.
pub(crate) const VERSION: u64 = 1;
/// Longest index that is read, and so written: that of about ten million pieces. Tests have few pieces.
pub(crate) const MAX_INDEX: u64 = if cfg!(test) { 1 << 20 } else { 1 << 30 };
/// Most bytes of the lists that it is made of, all ranks' together: the first rank has them in memory.
pub(crate) const MAX_LISTS: u64 = MAX_INDEX;
/// Its name in the folder.
pub(crate) const INDEX: &str = "index.json";

/// The checksum of `bytes`: XXH3 of 64 bits without a seed, as sixteen hexadecimal digits.
pub fn checksum(bytes: &[u8]) -> String {
    format!("{:016x}", XxHash3_64::oneshot(bytes))
}

/// The file: the index as it stands there, and a checksum of its bytes. Numbers do not all survive a change to another text.
#[derive(Debug, Serialize, Deserialize)]
struct Document<'a> {
    version: u64,
    checksum: String,
    #[serde(borrow)]
    index: &'a RawValue,
}

/// The version, whatever else a file has.
#[derive(Debug, Deserialize)]
struct Version {
    version: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Index {
    /// The same in the index and in every file of one checkpoint.
    pub(crate) id: String,
    pub(crate) step: u64,
    pub(crate) tensors: BTreeMap<String, TensorRecord>,
    /// By rank.
    pub(crate) files: Vec<FileRecord>,
    /// What the trainer wrote down.
    pub(crate) about: Value,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TensorRecord {
    pub(crate) dtype: Dtype,
    pub(crate) shape: [usize; 2],
    pub(crate) pieces: Vec<PieceRecord>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PieceRecord {
    /// The rank whose file has it.
    pub(crate) rank: usize,
    pub(crate) block: Block,
    pub(crate) checksum: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct FileRecord {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) file: FileRecord,
    pub(crate) pieces: Vec<(String, Dtype, [usize; 2], Block, String)>,
}

impl Index {
    pub(crate) fn new(
        (id, step): (String, u64),
        ranks: Vec<Written>,
        about: Value,
    ) -> Result<Self, String> {
        let mut tensors: BTreeMap<String, TensorRecord> = BTreeMap::new();
        let mut files = Vec::new();
        for (rank, written) in ranks.into_iter().enumerate() {
            files.push(written.file);
            for (name, dtype, shape, block, checksum) in written.pieces {
                let record = tensors.entry(name.clone()).or_insert(TensorRecord {
                    dtype,
                    shape,
                    pieces: Vec::new(),
                });
                if (record.dtype, record.shape) != (dtype, shape) {
                    return Err(format!(
                        "tensor '{name}' is {dtype:?} {shape:?} on rank {rank} and {:?} {:?} on another",
                        record.dtype, record.shape
                    ));
                }
                record.pieces.push(PieceRecord {
                    rank,
                    block,
                    checksum,
                });
            }
        }
        let index = Self {
            id,
            step,
            tensors,
            files,
            about,
        };
        index.check()?;
        Ok(index)
    }

    /// The file as text, without spaces: there may be millions of pieces.
    pub(crate) fn render(&self) -> Result<String, serde_json::Error> {
        let index = RawValue::from_string(serde_json::to_string(self)?)?;
        let document = Document {
            version: VERSION,
            checksum: checksum(index.get().as_bytes()),
            index: &index,
        };
        Ok(serde_json::to_string(&document)? + "\n")
    }

    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |why: String| CheckpointError::damaged(path, why);
        let json = |error: serde_json::Error| damaged(format!("it is no index: {error}"));
        let Version { version } = serde_json::from_str(text).map_err(json)?;
        if version != VERSION {
            let why = format!(
                "the checkpoint has version {version}, but this program reads version {VERSION}; use the program that wrote it"
            );
            return Err(CheckpointError::other(path, why));
        }
        let document: Document<'_> = serde_json::from_str(text).map_err(json)?;
        if checksum(document.index.get().as_bytes()) != document.checksum {
            return Err(damaged("its checksum is another one".to_owned()));
        }
        let index: Self = serde_json::from_str(document.index.get()).map_err(json)?;
        index.check().map_err(damaged)?;
        Ok(index)
    }

    pub(crate) fn pieces(&self) -> usize {
        self.tensors
            .values()
            .map(|tensor| tensor.pieces.len())
            .sum()
    }

    /// Checks that files have plain names, and that the pieces of each tensor lie in it, apart from each other, and make it up.
    fn check(&self) -> Result<(), String> {
        for (rank, file) in self.files.iter().enumerate() {
            if file.name != file_name(rank) {
                return Err(format!(
                    "the file of rank {rank} is called '{}' and not '{}'",
                    file.name,
                    file_name(rank)
                ));
            }
        }
        for (name, tensor) in &self.tensors {
            let wrong = |what: &str| Err(format!("tensor '{name}': {what}"));
            let Some(all) = Block::whole(tensor.shape).entries() else {
                return wrong("its shape cannot be");
            };
            if all.checked_mul(tensor.dtype.bytes()).is_none() {
                return wrong("its shape cannot be");
            }
            let ranks: BTreeSet<usize> = tensor.pieces.iter().map(|piece| piece.rank).collect();
            if ranks.len() != tensor.pieces.len() {
                return wrong("it has two pieces on one rank");
            }
            let mut sum = 0usize;
            for piece in &tensor.pieces {
                if piece.rank >= self.files.len() || !piece.block.lies_in(tensor.shape) {
                    return wrong("a piece lies outside of it, or on no rank");
                }
                // Within the shape, so that neither product nor sum of pieces apart goes over.
                sum = sum.saturating_add(piece.block.entries().unwrap_or(usize::MAX));
            }
            if sum != all {
                return wrong(&format!("its pieces have {sum} entries of {all}"));
            }
            if overlap(&tensor.pieces) {
                return wrong("its pieces overlap");
            }
        }
        Ok(())
    }
}

/// Whether two of `pieces` have an entry in common: a sweep over the rows, with the columns of the blocks that a row meets.
fn overlap(pieces: &[PieceRecord]) -> bool {
    let mut blocks: Vec<Block> = pieces.iter().map(|piece| piece.block).collect();
    blocks.retain(|block| block.entries() != Some(0));
    blocks.sort();
    // By first column: the column behind the last. By row behind the last: first columns.
    let mut columns: BTreeMap<usize, usize> = BTreeMap::new();
    let mut ends: BTreeSet<(usize, usize)> = BTreeSet::new();
    for block in blocks {
        let ([row, col], [rows, cols]) = (block.start, block.shape);
        while let Some(&(end, start)) = ends.first().filter(|(end, _)| *end <= row) {
            ends.remove(&(end, start));
            columns.remove(&start);
        }
        let before = columns.range(..=col).next_back();
        let after = columns.range(col..).next();
        if before.is_some_and(|(_, end)| *end > col)
            || after.is_some_and(|(start, _)| *start < col + cols)
        {
            return true;
        }
        columns.insert(col, col + cols);
        ends.insert((row + rows, col));
    }
    false
}

/// Whether what the trainer wrote down can be read again: an index of too many levels cannot.
pub(crate) fn check_about(about: &Value) -> Result<(), CheckpointError> {
    // One level more, as in the index.
    let text = serde_json::to_string(&[about]);
    let read = text.and_then(|text| serde_json::from_str::<Value>(&text));
    read.map(drop).map_err(|why| {
        CheckpointError::Invalid(format!(
            "the trainer's notes in the checkpoint could not be read again: {why}"
        ))
    })
}

pub(crate) fn file_name(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

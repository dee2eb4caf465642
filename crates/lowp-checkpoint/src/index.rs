//! [`Index`]: the content of `index.json`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use twox_hash::XxHash3_64;

use crate::{Block, CheckpointError, Dtype};

/// The version that this crate writes and reads.
pub(crate) const VERSION: u64 = 1;
/// Its name in the folder.
pub(crate) const INDEX: &str = "index.json";

/// The checksum of `bytes`: XXH3 of 64 bits without a seed, as sixteen hexadecimal digits.
pub fn checksum(bytes: &[u8]) -> String {
    format!("{:016x}", XxHash3_64::oneshot(bytes))
}

/// The file: the index, and a checksum of it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Document {
    pub(crate) version: u64,
    /// Of [`Document::index`] as compact JSON.
    pub(crate) checksum: String,
    pub(crate) index: Value,
}

/// What a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Index {
    /// The same in the index and in every file of one checkpoint.
    pub(crate) id: String,
    pub(crate) step: u64,
    /// By name.
    pub(crate) tensors: BTreeMap<String, TensorRecord>,
    /// By rank.
    pub(crate) files: Vec<FileRecord>,
    /// What the trainer wrote down.
    pub(crate) about: Value,
}

/// A tensor and its pieces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TensorRecord {
    pub(crate) dtype: Dtype,
    pub(crate) shape: [usize; 2],
    pub(crate) pieces: Vec<PieceRecord>,
}

/// A piece.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PieceRecord {
    /// The rank whose file has it.
    pub(crate) rank: usize,
    pub(crate) block: Block,
    pub(crate) checksum: String,
}

/// The file of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct FileRecord {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

/// What a rank says of its file.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) file: FileRecord,
    pub(crate) pieces: Vec<(String, Dtype, [usize; 2], Block, String)>,
}

impl Index {
    /// The index of what all ranks wrote.
    ///
    /// # Errors
    /// Pieces that do not make up their tensors.
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

    /// The file as text.
    pub(crate) fn render(&self) -> Result<String, serde_json::Error> {
        let index = serde_json::to_value(self)?;
        let document = Document {
            version: VERSION,
            checksum: checksum(&serde_json::to_vec(&index)?),
            index,
        };
        Ok(serde_json::to_string_pretty(&document)? + "\n")
    }

    /// The index in `text`, the content of `path`.
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |why: String| CheckpointError::damaged(path, why);
        let json = |error: serde_json::Error| damaged(format!("it is no index: {error}"));
        let document: Value = serde_json::from_str(text).map_err(json)?;
        let version = document["version"].as_u64();
        if let Some(found) = version.filter(|found| *found != VERSION) {
            return Err(CheckpointError::Version {
                path: path.to_owned(),
                found,
                known: VERSION,
            });
        }
        let document: Document = serde_json::from_value(document).map_err(json)?;
        let compact = serde_json::to_vec(&document.index).map_err(json)?;
        if checksum(&compact) != document.checksum {
            return Err(damaged("its checksum is another one".to_owned()));
        }
        let index: Self = serde_json::from_value(document.index).map_err(json)?;
        index.check().map_err(damaged)?;
        Ok(index)
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

/// Whether two of `pieces` have an entry in common. Few pieces share rows, so that neighbours by first row are compared until
/// rows end.
fn overlap(pieces: &[PieceRecord]) -> bool {
    let mut blocks: Vec<Block> = pieces.iter().map(|piece| piece.block).collect();
    blocks.retain(|block| block.entries() != Some(0));
    blocks.sort();
    // Sorted by first row, then by first column: cuts of columns alone are apart if neighbours are.
    let same_rows = |a: &Block, b: &Block| (a.start[0], a.shape[0]) == (b.start[0], b.shape[0]);
    if blocks.windows(2).all(|pair| same_rows(&pair[0], &pair[1])) {
        return blocks
            .windows(2)
            .any(|pair| pair[0].common(pair[1]).is_some());
    }
    blocks.iter().enumerate().any(|(at, block)| {
        let end = block.start[0] + block.shape[0];
        let rest = blocks[at + 1..].iter();
        let mut near = rest.take_while(|other| other.start[0] < end);
        near.any(|other| block.common(*other).is_some())
    })
}

/// The name of the file of `rank`.
pub(crate) fn file_name(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

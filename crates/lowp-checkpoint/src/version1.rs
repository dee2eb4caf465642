//! The index of checkpoints of version 1, which has a record of every piece, with its checksum.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use serde_json::Value;

use crate::index::{FileRecord, Index, Kinds, file_name};
use crate::{Block, Dtype};

#[derive(Deserialize)]
struct Old {
    id: String,
    step: u64,
    tensors: BTreeMap<String, Tensor>,
    files: Vec<OldFile>,
    about: Value,
}

#[derive(Deserialize)]
struct Tensor {
    dtype: Dtype,
    shape: [usize; 2],
    pieces: Vec<Piece>,
}

#[derive(Deserialize)]
struct Piece {
    rank: usize,
    block: Block,
    checksum: String,
}

#[derive(Deserialize)]
struct OldFile {
    name: String,
    bytes: u64,
}

/// The index of version 1 in `text`, as one of today; it is not checked.
pub(crate) fn parse(text: &str) -> Result<Index, String> {
    let old: Old =
        serde_json::from_str(text).map_err(|error| format!("it is no index: {error}"))?;
    let mut files = Vec::new();
    for (rank, OldFile { name, bytes }) in old.files.into_iter().enumerate() {
        let needed = file_name(rank);
        if name != needed {
            return Err(format!(
                "the file of rank {rank} is called '{name}' and not '{needed}'"
            ));
        }
        let checksum = String::new();
        files.push(FileRecord { bytes, checksum });
    }
    let mut checksums = vec![HashMap::new(); files.len()];
    let (mut kinds, mut tensors) = (Kinds::default(), BTreeMap::new());
    for (name, tensor) in old.tensors {
        let Tensor {
            dtype,
            shape,
            pieces,
        } = tensor;
        let mut blocks = Vec::new();
        for Piece {
            rank,
            block,
            checksum,
        } in pieces
        {
            if block.is_empty() && block.lies_in(shape) {
                continue;
            }
            let sum = u64::from_str_radix(&checksum, 16);
            let sum = sum.map_err(|_| format!("tensor '{name}': '{checksum}' is no checksum"))?;
            let Some(of_rank) = checksums.get_mut(rank) else {
                return Err(format!("tensor '{name}': a piece lies on no rank"));
            };
            if of_rank.insert(name.clone(), sum).is_some() {
                return Err(format!("tensor '{name}': it has two pieces on one rank"));
            }
            blocks.push((rank, block));
        }
        tensors.insert(name, kinds.number(dtype, shape, blocks));
    }
    Ok(Index {
        id: old.id,
        step: old.step,
        files,
        kinds: kinds.all,
        tensors,
        about: old.about,
        checksums: Some(checksums),
    })
}

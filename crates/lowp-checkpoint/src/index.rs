//! [`Index`]: the content of `index.json`. Tensors of one dtype and shape that are cut alike over the ranks have one entry together, a
//! [`Kind`]: its length does not depend on the number of their pieces.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use twox_hash::XxHash3_64;

use crate::spans::{Span, overlap, spans_of};
use crate::{Block, CheckpointError, Dtype, header};

/// Longest header of a file that is read, and so written: that of about a million tensors. Tests have few.
pub(crate) const MAX_HEADER: u64 = if cfg!(test) {
    1 << 18
} else {
    header::MAX_HEADER as u64
};
/// Longest index that is read, and so written. Tests have few pieces.
pub(crate) const MAX_INDEX: u64 = if cfg!(test) { 1 << 20 } else { 1 << 30 };
/// Its name in the folder.
pub(crate) const INDEX: &str = "index.json";
/// Bytes of a piece that have one checksum, so that who needs a part of a piece reads little else.
pub(crate) const CHUNK: usize = if cfg!(test) { 1 << 6 } else { 1 << 16 };

/// The checksum of `bytes`: XXH3 of 64 bits without a seed, as sixteen hexadecimal digits.
pub fn checksum(bytes: &[u8]) -> String {
    format!("{:016x}", XxHash3_64::oneshot(bytes))
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Index {
    /// The same in the index and in every file of one checkpoint.
    pub(crate) id: String,
    pub(crate) step: u64,
    /// By rank.
    pub(crate) files: Vec<FileRecord>,
    pub(crate) kinds: Vec<Kind>,
    /// The number of the kind of each tensor.
    pub(crate) tensors: BTreeMap<String, usize>,
    /// What the trainer wrote down.
    pub(crate) about: Value,
    /// Of version 1: the checksums of each rank's pieces, by tensor. Later ones are in the files of the ranks.
    #[serde(skip)]
    pub(crate) checksums: Option<Vec<HashMap<String, u64>>>,
}

/// How tensors are cut over the ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Kind {
    pub(crate) dtype: Dtype,
    pub(crate) shape: [usize; 2],
    pub(crate) spans: Vec<Span>,
}

/// The kinds of tensors that were seen, each once.
#[derive(Debug, Default)]
pub(crate) struct Kinds {
    pub(crate) all: Vec<Kind>,
    numbers: HashMap<Kind, usize>,
}

impl Kinds {
    /// The number of the kind of a tensor, whose pieces are blocks of ranks.
    pub(crate) fn number(
        &mut self,
        dtype: Dtype,
        shape: [usize; 2],
        mut pieces: Vec<(usize, Block)>,
    ) -> usize {
        pieces.sort_unstable();
        let spans = spans_of(pieces);
        let kind = Kind {
            dtype,
            shape,
            spans,
        };
        let next = self.all.len();
        let number = *self.numbers.entry(kind.clone()).or_insert(next);
        if number == next {
            self.all.push(kind);
        }
        number
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct FileRecord {
    pub(crate) bytes: u64,
    /// The checksum of all that stands before the pieces; of version 1 none.
    pub(crate) checksum: String,
}

/// What the pieces of a rank take, all together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) bytes: u64,
    pub(crate) chunks: u64,
}

/// The number of checksums of a piece of `bytes` bytes.
pub(crate) const fn chunks(bytes: usize) -> usize {
    bytes.div_ceil(CHUNK)
}

impl Index {
    pub(crate) fn pieces(&self) -> usize {
        let kinds = self.tensors.values().map(|&kind| &self.kinds[kind]);
        kinds.map(Kind::pieces).sum()
    }

    pub(crate) fn kind(&self, name: &str) -> Option<&Kind> {
        self.kinds.get(*self.tensors.get(name)?)
    }

    /// Bytes of the file of `rank` before its pieces, the checksums included.
    pub(crate) fn head_bytes(&self, rank: usize, held: Held) -> Option<u64> {
        let head = self.files[rank].bytes.checked_sub(held.bytes)?;
        let header = head.checked_sub(8)?.checked_sub(self.listed(held))?;
        (header <= MAX_HEADER).then_some(head)
    }

    /// Bytes of the checksums in a file with the pieces `held`.
    fn listed(&self, held: Held) -> u64 {
        match self.checksums {
            Some(_) => 0,
            None => 8 * held.chunks,
        }
    }

    /// What the pieces of each rank take.
    pub(crate) fn held(&self) -> Result<Vec<Held>, String> {
        let too_large = || "its tensors are larger than can be".to_owned();
        let mut tensors = vec![0u64; self.kinds.len()];
        for &kind in self.tensors.values() {
            tensors[kind] += 1;
        }
        // What is added at a rank counts for the ranks after it, too, until it is taken off.
        let mut added = vec![[0i128; 2]; self.files.len() + 1];
        for (kind, tensors) in self.kinds.iter().zip(tensors) {
            for span in &kind.spans {
                let bytes = span.block.bytes(kind.dtype).ok_or_else(too_large)?;
                let each = [bytes, chunks(bytes)].map(|x| i128::from(tensors) * x as i128);
                for (value, each) in [0, 1].into_iter().zip(each) {
                    added[span.rank][value] += each;
                    added[span.rank + span.count][value] -= each;
                }
            }
        }
        let mut sums = [0i128; 2];
        let held = added[..self.files.len()].iter().map(|added| {
            sums = [sums[0] + added[0], sums[1] + added[1]];
            let [bytes, chunks] = sums.map(u64::try_from);
            let held = bytes.and_then(|bytes| {
                Ok(Held {
                    bytes,
                    chunks: chunks?,
                })
            });
            held.map_err(|_| too_large())
        });
        held.collect()
    }

    /// Checks that the pieces of each tensor lie in it, apart from each other, and make it up, and that files are as long as their pieces.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (number, kind) in self.kinds.iter().enumerate() {
            if let Err(what) = kind.check(self.files.len()) {
                let name = self.tensors.iter().find(|(_, kind)| **kind == number);
                let name = name.map_or("", |(name, _)| name);
                return Err(format!("tensor '{name}': {what}"));
            }
        }
        let unknown = self
            .tensors
            .iter()
            .find(|(_, kind)| **kind >= self.kinds.len());
        if let Some((name, _)) = unknown {
            return Err(format!("tensor '{name}': it is of no kind"));
        }
        let lengths = self.files.iter().map(|file| file.bytes);
        let mut all = lengths
            .clone()
            .try_fold(0u64, |all, bytes| all.checked_add(bytes));
        all = all.filter(|all| i64::try_from(*all).is_ok());
        if all.is_none() {
            return Err("its files are larger than can be".to_owned());
        }
        for (rank, held) in self.held()?.into_iter().enumerate() {
            if self.head_bytes(rank, held).is_none() {
                let (
                    bytes,
                    Held {
                        bytes: needed,
                        chunks,
                    },
                ) = (self.files[rank].bytes, held);
                return Err(format!(
                    "the file of rank {rank} has {bytes} bytes, which is no length for {needed} bytes of pieces with {chunks} checksums"
                ));
            }
        }
        Ok(())
    }
}

impl Kind {
    pub(crate) fn pieces(&self) -> usize {
        self.spans.iter().map(|span| span.count).sum()
    }

    fn check(&self, ranks: usize) -> Result<(), String> {
        let whole = Block::whole(self.shape);
        let Some(all) = whole.bytes(self.dtype).and(whole.entries()) else {
            return Err("its shape cannot be".to_owned());
        };
        let (mut sum, mut unions) = (0usize, Vec::new());
        for span in &self.spans {
            let union = span.union().filter(|union| union.lies_in(self.shape));
            let last = span.rank.checked_add(span.count);
            let (Some(union), true) = (union, last.is_some_and(|last| last <= ranks)) else {
                return Err("a piece lies outside of it, or on no rank".to_owned());
            };
            if union.is_empty() {
                return Err("it has an empty piece".to_owned());
            }
            // Within the shape, so that neither product nor sum of pieces apart goes over.
            sum = sum.saturating_add(union.entries().unwrap_or(usize::MAX));
            unions.push(union);
        }
        if sum != all {
            return Err(format!("its pieces have {sum} entries of {all}"));
        }
        if overlap(unions) {
            return Err("its pieces overlap".to_owned());
        }
        Ok(())
    }
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

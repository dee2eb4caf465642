//! A folder of token ids: `tokens.json` and the shards that it lists. [`TokenWriter`] writes one.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use lowp_file::files::{read_regular, write_atomically};
use serde::{Deserialize, Serialize};

use super::shard::{IdDtype, Shard, unreadable};
use crate::error::TrainError;

/// The index of a folder.
pub(super) const INDEX: &str = "tokens.json";
/// Longest index that is read.
const MAX_INDEX: u64 = 64 << 20;
/// Tokens of a shard, about.
const SHARD: u64 = 1 << 28;

/// What `tokens.json` says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenIndex {
    /// `u16` or `u32`, little-endian.
    pub dtype: String,
    /// Ids that there may be: one more than the largest.
    pub vocab: usize,
    /// The largest id, where there is one.
    pub largest: Option<u32>,
    /// The id after each document, where there is one.
    pub end: Option<u32>,
    /// Tokens of all shards.
    pub tokens: u64,
    /// Documents of all shards.
    pub documents: u64,
    /// Whether only some tokens count in the loss.
    pub masked: bool,
    /// The file and digest of the tokenizer.
    pub tokenizer: String,
    /// The shards, in order.
    pub shards: Vec<ShardIndex>,
}

/// Files of a shard: `NAME.bin` has ids, `NAME.ends` where documents end, as u64 in tokens of the shard, and `NAME.mask` a byte for each
/// token, 0 where it does not count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardIndex {
    /// The name of the shard's files, without their ends.
    pub name: String,
    /// Tokens of the shard.
    pub tokens: u64,
}

/// The index of the folder `folder`.
pub(super) fn index(folder: &Path) -> Result<TokenIndex, TrainError> {
    let path = folder.join(INDEX);
    let text = read_regular(&path, MAX_INDEX).map_err(|e| unreadable(&path, e))?;
    serde_json::from_slice(&text).map_err(|e| unreadable(&path, e))
}

/// The shards of the folder `folder`.
pub(super) fn shards(folder: &Path, index: &TokenIndex) -> Result<Vec<Shard>, TrainError> {
    let dtype = match index.dtype.as_str() {
        "u16" => IdDtype::U16,
        "u32" => IdDtype::U32,
        other => {
            let why = format!("its dtype is {other}; there are u16 and u32");
            return Err(unreadable(&folder.join(INDEX), why));
        }
    };
    let open = |ShardIndex { name, tokens }: &ShardIndex| {
        let with = |end: &str| folder.join(format!("{name}.{end}"));
        if Path::new(name).components().count() != 1 || name.starts_with('.') {
            return Err(unreadable(
                &folder.join(INDEX),
                format!("{name:?} is no name of a shard"),
            ));
        }
        let shard = Shard::open(&with("bin"), 0, dtype, *tokens)?.whole()?;
        let shard = shard.with_ends(ends(&with("ends"), *tokens)?);
        match index.masked {
            true => shard.with_mask(&with("mask")),
            false => Ok(shard),
        }
    };
    index.shards.iter().map(open).collect()
}

/// Where documents of a shard of `tokens` tokens end, by the file at `path`.
fn ends(path: &Path, tokens: u64) -> Result<Vec<u64>, TrainError> {
    let bytes = read_regular(path, u64::MAX).map_err(|e| unreadable(path, e))?;
    let (ends, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        let why = format!("it has {} bytes, no multiple of 8", bytes.len());
        return Err(unreadable(path, why));
    }
    let ends: Vec<u64> = ends.iter().map(|&end| u64::from_le_bytes(end)).collect();
    let last = ends.last().copied().unwrap_or(0);
    if !ends.is_sorted() {
        return Err(unreadable(path, "its documents are not in order"));
    }
    match last == tokens {
        true => Ok(ends),
        false => {
            let why = format!("its last document ends at token {last} of {tokens}");
            Err(unreadable(path, why))
        }
    }
}

/// Writes a folder of tokens, document by document. Without [`TokenWriter::finish`] there is no index, and the folder is no data.
#[derive(Debug)]
pub struct TokenWriter {
    folder: PathBuf,
    index: TokenIndex,
    /// Tokens of a shard.
    most: u64,
    shard: Option<Open>,
}

/// The shard that is written.
#[derive(Debug)]
struct Open {
    ids: BufWriter<File>,
    ends: BufWriter<File>,
    mask: Option<BufWriter<File>>,
}

/// The ids of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenIds {
    /// One more than the largest id.
    pub vocab: usize,
    /// The id that follows each document; `None` where none does.
    pub end: Option<u32>,
}

impl TokenWriter {
    /// Of these ids, in the folder `folder`, which is made. `masked` documents say which
    /// tokens count.
    ///
    /// # Errors
    /// The folder cannot be made, or it has tokens already.
    pub fn new(
        folder: &Path,
        ids: TokenIds,
        masked: bool,
        tokenizer: String,
    ) -> Result<Self, TrainError> {
        fs::create_dir_all(folder).map_err(|e| unwritable(folder, e))?;
        if folder.join(INDEX).exists() {
            return Err(unwritable(
                folder,
                "it has tokens already; give another folder",
            ));
        }
        let TokenIds { vocab, end } = ids;
        let dtype = match vocab {
            0..=0x1_0000 => "u16",
            _ => "u32",
        };
        Ok(Self {
            folder: folder.to_owned(),
            index: TokenIndex {
                dtype: dtype.to_owned(),
                vocab,
                end,
                masked,
                tokenizer,
                ..TokenIndex::default()
            },
            most: SHARD,
            shard: None,
        })
    }

    /// With shards of about `most` tokens.
    #[must_use]
    pub fn shards_of(self, most: u64) -> Self {
        Self { most, ..self }
    }

    /// Adds a document: its ids, and which of them count where the documents are masked. The id of its end is added, and counts.
    ///
    /// # Errors
    /// An id beyond the vocabulary, or a file that cannot be written.
    pub fn document(&mut self, ids: &[u32], counted: &[bool]) -> Result<(), TrainError> {
        let vocab = self.index.vocab;
        let end = self.index.end;
        let all = || ids.iter().copied().chain(end);
        if let Some(id) = all().find(|&id| id as usize >= vocab) {
            let why = format!("token {id} is beyond the vocabulary of {vocab}");
            return Err(unwritable(&self.folder, why));
        }
        if self.index.masked && counted.len() != ids.len() {
            let (found, expected) = (counted.len(), ids.len());
            let why = format!("{expected} tokens have a mask of {found}");
            return Err(unwritable(&self.folder, why));
        }
        let folder = self.folder.clone();
        let failed = |e| unwritable(&folder, e);
        let narrow = self.index.dtype == "u16";
        let (most, shard) = (self.most, self.open()?);
        for id in all() {
            let bytes = id.to_le_bytes();
            let bytes = if narrow { &bytes[..2] } else { &bytes[..] };
            shard.ids.write_all(bytes).map_err(failed)?;
        }
        if let Some(mask) = &mut shard.mask {
            let counted = counted.iter().copied().chain(end.map(|_| true));
            let bytes: Vec<u8> = counted.map(u8::from).collect();
            mask.write_all(&bytes).map_err(failed)?;
        }
        let added = all().count() as u64;
        let last = self.index.shards.last_mut();
        let written = last.map_or(0, |last| {
            last.tokens += added;
            last.tokens
        });
        self.index.tokens += added;
        self.index.largest = self.index.largest.max(all().max());
        self.index.documents += 1;
        if let Some(shard) = &mut self.shard {
            shard
                .ends
                .write_all(&written.to_le_bytes())
                .map_err(failed)?;
        }
        match written >= most {
            true => self.close(),
            false => Ok(()),
        }
    }

    /// Writes the index, and returns it.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn finish(mut self) -> Result<TokenIndex, TrainError> {
        self.close()?;
        let text = serde_json::to_string_pretty(&self.index)? + "\n";
        let written = write_atomically(&self.folder.join(INDEX), &text);
        written.map_err(|e| unwritable(&self.folder, e))?;
        Ok(self.index)
    }

    fn open(&mut self) -> Result<&mut Open, TrainError> {
        if self.shard.is_none() {
            let name = format!("tokens-{:05}", self.index.shards.len());
            let create = |end: &str| {
                let path = self.folder.join(format!("{name}.{end}"));
                let file = File::create(&path).map_err(|e| unwritable(&path, e))?;
                Ok::<_, TrainError>(BufWriter::with_capacity(1 << 20, file))
            };
            let shard = Open {
                ids: create("bin")?,
                ends: create("ends")?,
                mask: match self.index.masked {
                    true => Some(create("mask")?),
                    false => None,
                },
            };
            self.index.shards.push(ShardIndex { name, tokens: 0 });
            self.shard = Some(shard);
        }
        let none = || unwritable(&self.folder, "no shard is open");
        self.shard.as_mut().ok_or_else(none)
    }

    fn close(&mut self) -> Result<(), TrainError> {
        let Some(mut shard) = self.shard.take() else {
            return Ok(());
        };
        let files = [&mut shard.ids, &mut shard.ends].into_iter();
        for file in files.chain(&mut shard.mask) {
            let done = file.flush().and_then(|()| file.get_ref().sync_all());
            done.map_err(|e| unwritable(&self.folder, e))?;
        }
        Ok(())
    }
}

fn unwritable(path: &Path, why: impl std::fmt::Display) -> TrainError {
    TrainError::Data(format!("cannot write tokens to {}: {why}", path.display()))
}

//! [`Shard`]: a file of token ids, which are read where they are asked for.

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::TrainError;

/// How a file stores ids, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdDtype {
    U8,
    U16,
    I32,
    U32,
    I64,
}

impl IdDtype {
    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::I32 | Self::U32 => 4,
            Self::I64 => 8,
        }
    }

    /// Ids that are negative or beyond 32 bits become [`u32::MAX`], which is in no vocabulary.
    fn decode(self, bytes: &[u8]) -> Vec<u32> {
        let signed = |id: i64| u32::try_from(id).unwrap_or(u32::MAX);
        match self {
            Self::U8 => bytes.iter().map(|&id| u32::from(id)).collect(),
            Self::U16 => {
                let (ids, _) = bytes.as_chunks();
                ids.iter()
                    .map(|&id| u16::from_le_bytes(id).into())
                    .collect()
            }
            Self::U32 => {
                let (ids, _) = bytes.as_chunks();
                ids.iter().map(|&id| u32::from_le_bytes(id)).collect()
            }
            Self::I32 => {
                let (ids, _) = bytes.as_chunks();
                ids.iter()
                    .map(|&id| signed(i32::from_le_bytes(id).into()))
                    .collect()
            }
            Self::I64 => {
                let (ids, _) = bytes.as_chunks();
                ids.iter()
                    .map(|&id| signed(i64::from_le_bytes(id)))
                    .collect()
            }
        }
    }
}

/// Token ids of a file, one document after the other.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: File,
    /// Where the first id begins.
    start: u64,
    dtype: IdDtype,
    pub(super) tokens: u64,
    /// Where documents end, in tokens; nothing where the file does not say it.
    pub(super) ends: Vec<u64>,
    /// A byte for each token: whether it counts as a target.
    mask: Option<(PathBuf, File)>,
}

impl Shard {
    /// `tokens` ids from byte `start` of the file at `path`.
    pub(super) fn open(
        path: &Path,
        start: u64,
        dtype: IdDtype,
        tokens: u64,
    ) -> Result<Self, TrainError> {
        let file = open(path)?;
        let length = file.metadata().map_err(|e| unreadable(path, e))?.len();
        let needed = tokens
            .checked_mul(dtype.bytes())
            .and_then(|bytes| bytes.checked_add(start));
        if needed.is_none_or(|needed| needed > length) {
            return Err(unreadable(
                path,
                format!("it has {length} bytes, too few for {tokens} tokens"),
            ));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            start,
            dtype,
            tokens,
            ends: Vec::new(),
            mask: None,
        })
    }

    /// The same, where the file has nothing after its ids.
    pub(super) fn whole(self) -> Result<Self, TrainError> {
        let length = self.file.metadata();
        let length = length.map_err(|e| unreadable(&self.path, e))?.len();
        let (tokens, needed) = (self.tokens, self.start + self.tokens * self.dtype.bytes());
        match length == needed {
            true => Ok(self),
            false => Err(unreadable(
                &self.path,
                format!("it has {length} bytes, and its {tokens} tokens take {needed}"),
            )),
        }
    }

    /// With documents that end there.
    pub(super) fn with_ends(self, ends: Vec<u64>) -> Self {
        Self { ends, ..self }
    }

    /// With a file of one byte for each token.
    pub(super) fn with_mask(self, path: &Path) -> Result<Self, TrainError> {
        let file = open(path)?;
        let length = file.metadata().map_err(|e| unreadable(path, e))?.len();
        if length != self.tokens {
            let tokens = self.tokens;
            return Err(unreadable(
                path,
                format!("it has {length} bytes for {tokens} tokens"),
            ));
        }
        Ok(Self {
            mask: Some((path.to_owned(), file)),
            ..self
        })
    }

    /// Whether only some tokens count as targets.
    pub(super) fn is_masked(&self) -> bool {
        self.mask.is_some()
    }

    /// The ids of `tokens`.
    pub(super) fn ids(&self, tokens: Range<u64>) -> Result<Vec<u32>, TrainError> {
        let width = self.dtype.bytes();
        let start = self.start + tokens.start * width;
        let bytes = read(&self.file, start, (tokens.end - tokens.start) * width);
        let bytes = bytes.map_err(|e| unreadable(&self.path, e))?;
        Ok(self.dtype.decode(&bytes))
    }

    /// Which of `tokens` count as targets.
    pub(super) fn counted(&self, tokens: Range<u64>) -> Result<Vec<bool>, TrainError> {
        let len = tokens.end - tokens.start;
        let Some((path, file)) = &self.mask else {
            return Ok((0..len).map(|_| true).collect());
        };
        let bytes = read(file, tokens.start, len).map_err(|e| unreadable(path, e))?;
        Ok(bytes.into_iter().map(|byte| byte != 0).collect())
    }
}

/// `len` bytes of `file` from `start` on.
fn read(file: &File, start: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    #[cfg(unix)]
    std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, start)?;
    #[cfg(windows)]
    {
        let mut done = 0;
        while done < bytes.len() {
            let at = start + done as u64;
            match std::os::windows::fs::FileExt::seek_read(file, &mut bytes[done..], at)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
    }
    Ok(bytes)
}

pub(super) fn open(path: &Path) -> Result<File, TrainError> {
    File::open(path).map_err(|e| unreadable(path, e))
}

pub(super) fn unreadable(path: &Path, why: impl Display) -> TrainError {
    TrainError::Data(format!("`data`: cannot read {}: {why}", path.display()))
}

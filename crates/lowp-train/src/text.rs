//! The text, and the batches as a function of seed, step and sequence number.

use super::model::Batch;
use crate::files::read_regular;
use crate::usage::UsageError;
use lowp_format::Philox;
use std::fmt::Display;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// See data/README.md for source and licence.
static BUNDLED: &[u8] = include_bytes!("../../data/moby-dick.txt");

/// Longest text that is read.
const MAX_BYTES: u64 = 1 << 32;

/// A text cut into training and validation split.
#[derive(Debug)]
pub(crate) struct Corpus {
    text: Vec<u8>,
    /// Where the validation split begins.
    split: usize,
    seq: usize,
    digest: String,
}

impl Corpus {
    /// The bundled book, or the text at `path`, for sequences of `seq` bytes.
    ///
    /// # Errors
    /// A file that cannot be read, is no regular file or longer than [`MAX_BYTES`], a folder without files or with more bytes in them,
    /// or a text that is too short for one sequence in its last tenth.
    pub(crate) fn load(path: Option<&Path>, seq: usize) -> Result<Self, UsageError> {
        let text = match path {
            Some(path) if path.is_dir() => read_folder(path, MAX_BYTES)?,
            Some(path) => read(path, MAX_BYTES)?,
            None => BUNDLED.to_vec(),
        };
        let split = text.len() - text.len() / 10;
        if text.len() - split < seq + 1 || split < seq + 1 {
            let message = format!(
                "{} of {} bytes is too short for --seq {seq}: at least {} bytes are needed, or shorter sequences",
                path.map_or_else(
                    || "the text".to_owned(),
                    |path| format!("--data {}", path.display())
                ),
                text.len(),
                10 * (seq + 1)
            );
            return Err(UsageError::new(message));
        }
        let digest = format!(
            "{} bytes, digest {}",
            text.len(),
            lowp_checkpoint::checksum(&text)
        );
        Ok(Self {
            text,
            split,
            seq,
            digest,
        })
    }

    /// The length of the text and a checksum of it.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// Sequences `range` of the global batch of `step`: every split of a batch over ranks sees the same sequences.
    pub(crate) fn train(&self, seed: u64, step: usize, range: Range<usize>) -> Batch {
        let starts = (self.split - self.seq) as u64;
        // Bit 63 keeps batches apart from every other use of the seed.
        let random = Philox::new(seed, (1 << 63) | step as u64);
        self.batch(range.map(|i| {
            let start = random.below(i as u64, starts);
            usize::try_from(start).unwrap_or(0) // below the length of the text
        }))
    }

    /// Sequences `range` out of `total` spread evenly over the validation split.
    pub(crate) fn validation(&self, total: usize, range: Range<usize>) -> Batch {
        let last = self.text.len() - self.split - self.seq - 1;
        self.batch(range.map(|i| self.split + last * i / total.max(1)))
    }

    fn batch(&self, starts: impl Iterator<Item = usize>) -> Batch {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for start in starts {
            inputs.extend_from_slice(&self.text[start..start + self.seq]);
            targets.extend_from_slice(&self.text[start + 1..start + 1 + self.seq]);
        }
        Batch {
            inputs: Arc::from(inputs),
            targets: Arc::from(targets),
        }
    }
}

fn read(path: &Path, most: u64) -> Result<Vec<u8>, UsageError> {
    read_regular(path, most).map_err(|e| cannot_read(path, e))
}

fn cannot_read(path: &Path, error: impl Display) -> UsageError {
    UsageError::new(format!("--data: cannot read {}: {error}", path.display()))
}

/// The files of `folder` and its folders, one after the other in the order of their paths. Links are not followed.
fn read_folder(folder: &Path, most: u64) -> Result<Vec<u8>, UsageError> {
    let mut found = Files {
        paths: Vec::new(),
        left: most,
    };
    let too_long = || {
        let folder = folder.display();
        UsageError::new(format!(
            "--data: the files of {folder} and its folders have more than {most} bytes, which is the most that is read; name a \
             smaller folder"
        ))
    };
    if !found.add(folder)? {
        return Err(too_long());
    }
    if found.paths.is_empty() {
        let folder = folder.display();
        return Err(UsageError::new(format!(
            "--data: {folder} and its folders have no files; name a folder with text in it"
        )));
    }
    found.paths.sort();
    let mut text = Vec::new();
    for path in found.paths {
        let bytes = read(&path, most)?;
        // They may have grown meanwhile.
        if bytes.len() as u64 > most - text.len() as u64 {
            return Err(too_long());
        }
        text.extend(bytes);
    }
    Ok(text)
}

/// Regular files, and the bytes that may still be read.
struct Files {
    paths: Vec<PathBuf>,
    left: u64,
}

impl Files {
    /// Adds those of `folder` and its folders, unless they are too long.
    fn add(&mut self, folder: &Path) -> Result<bool, UsageError> {
        for entry in fs::read_dir(folder).map_err(|e| cannot_read(folder, e))? {
            let entry = entry.map_err(|e| cannot_read(folder, e))?;
            let path = entry.path();
            let kind = entry.file_type().map_err(|e| cannot_read(&path, e))?;
            if kind.is_dir() {
                if !self.add(&path)? {
                    return Ok(false);
                }
            } else if kind.is_file() {
                let length = entry.metadata().map_err(|e| cannot_read(&path, e))?.len();
                match self.left.checked_sub(length) {
                    Some(left) => self.left = left,
                    None => return Ok(false),
                }
                self.paths.push(path);
            }
        }
        Ok(true)
    }
}

/// The sequences of `total` that rank `rank` of `ranks` handles: consecutive, and at most one more than any other.
pub(crate) fn share(total: usize, ranks: usize, rank: usize) -> Range<usize> {
    let (each, extra) = (total / ranks, total % ranks);
    let start = rank * each + rank.min(extra);
    start..start + each + usize::from(rank < extra)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_batch() {
        let sizes: Vec<_> = (0..3).map(|r| share(16, 3, r)).collect();
        assert_eq!(sizes, [0..6, 6..11, 11..16]);
    }

    #[test]
    fn a_folder_is_its_files_in_order() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        let error = Corpus::load(Some(path), 4).unwrap_err().to_string();
        assert!(error.contains("have no files"), "{error}");
        fs::create_dir(path.join("b")).expect("a folder");
        for (name, text) in [("c", "third "), ("a", "first "), ("b/x", "second ")] {
            fs::write(path.join(name), text.repeat(9)).expect("a file");
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink(path.join("a"), path.join("z")).expect("a link");
        let corpus = Corpus::load(Some(path), 4).expect("a text");
        let expected = ["first ", "second ", "third "].map(|text| text.repeat(9));
        assert_eq!(corpus.text, expected.concat().into_bytes());
        let error = read_folder(path, 60).unwrap_err().to_string();
        assert!(error.contains("more than 60 bytes"), "{error}");
    }

    #[test]
    fn a_split_batch_is_the_whole_batch() -> Result<(), UsageError> {
        let corpus = Corpus::load(None, 32)?;
        let whole = corpus.train(1, 7, 0..16);
        let parts: Vec<u8> = (0..3)
            .flat_map(|r| corpus.train(1, 7, share(16, 3, r)).inputs.to_vec())
            .collect();
        assert_eq!(*whole.inputs, *parts);
        assert_eq!(whole.inputs[1..32], whole.targets[..31]);
        Ok(())
    }

    #[test]
    fn the_bundled_text_is_clean_and_long_enough() {
        assert!(BUNDLED.len() > 1_000_000);
        assert!(
            BUNDLED
                .iter()
                .all(|&b| b == b'\n' || (32..127).contains(&b))
        );
    }
}

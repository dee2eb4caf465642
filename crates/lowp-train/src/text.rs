//! [`Text`]: bytes of text, cut into sequences.

use std::fmt::Display;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lowp_file::files::read_regular;
use lowp_format::Philox;

use crate::batch::Batch;
use crate::data::Data;
use crate::error::TrainError;

/// Longest text that is read.
const MAX_BYTES: u64 = 1 << 32;

/// A text whose last tenth is the validation split.
#[derive(Clone, Debug)]
pub struct Text {
    text: Vec<u8>,
    /// Where the validation split begins.
    split: usize,
    seq: usize,
    digest: String,
}

impl Text {
    /// `text`, for sequences of `seq` bytes.
    ///
    /// # Errors
    /// A text that is too short for one sequence in its last tenth.
    pub fn new(text: Vec<u8>, seq: usize) -> Result<Self, TrainError> {
        Self::named(text, seq, "the text")
    }

    /// The file at `path`, or all files of the folder at `path` and its folders, in the order of their paths and without links; at most
    /// 4 GiB in all.
    ///
    /// # Errors
    /// A file that cannot be read, is no regular file or too long, a folder without files or with too much in it, or a text that is too
    /// short.
    pub fn read(path: &Path, seq: usize) -> Result<Self, TrainError> {
        let text = match path.is_dir() {
            true => read_folder(path, MAX_BYTES)?,
            false => read(path, MAX_BYTES)?,
        };
        Self::named(text, seq, &format!("`data` {}", path.display()))
    }

    fn named(text: Vec<u8>, seq: usize, name: &str) -> Result<Self, TrainError> {
        let split = text.len() - text.len() / 10;
        if !(1..MAX_BYTES as usize).contains(&seq) {
            return Err(TrainError::Data(format!(
                "`seq` must be from 1 to {}, not {seq}",
                MAX_BYTES - 1
            )));
        }
        if text.len() - split < seq + 1 || split < seq + 1 {
            return Err(TrainError::Data(format!(
                "{name} of {} bytes is too short for `seq` {seq}: at least {} bytes are needed, or shorter sequences",
                text.len(),
                10 * (seq + 1)
            )));
        }
        let checksum = lowp_checkpoint::checksum(&text);
        let digest = format!("{} bytes, digest {checksum}", text.len());
        Ok(Self {
            text,
            split,
            seq,
            digest,
        })
    }

    fn batch(&self, starts: impl Iterator<Item = usize>) -> Batch {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for start in starts {
            inputs.extend(tokens(&self.text[start..start + self.seq]));
            targets.extend(tokens(&self.text[start + 1..start + 1 + self.seq]));
        }
        Batch::new(inputs, targets)
    }
}

impl Data for Text {
    type Batch = Batch;

    fn train(&self, seed: u64, step: usize, range: Range<usize>) -> Result<Batch, TrainError> {
        let starts = (self.split - self.seq) as u64;
        // Bit 63 keeps batches apart from every other use of the seed.
        let random = Philox::new(seed, (1 << 63) | step as u64);
        Ok(self.batch(range.map(|i| {
            let start = random.below(i as u64, starts);
            usize::try_from(start).unwrap_or(0) // below the length of the text
        })))
    }

    fn validation(&self, total: usize, range: Range<usize>) -> Result<Batch, TrainError> {
        let last = self.text.len() - self.split - self.seq - 1;
        Ok(self.batch(range.map(|i| self.split + last * i / total.max(1))))
    }

    fn tokens(&self) -> usize {
        self.seq
    }

    fn unit(&self) -> &'static str {
        "byte"
    }

    fn digest(&self) -> String {
        self.digest.clone()
    }
}

fn tokens(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.iter().map(|&byte| u32::from(byte))
}

fn read(path: &Path, most: u64) -> Result<Vec<u8>, TrainError> {
    read_regular(path, most).map_err(|e| cannot_read(path, e))
}

fn cannot_read(path: &Path, error: impl Display) -> TrainError {
    TrainError::Data(format!("`data`: cannot read {}: {error}", path.display()))
}

/// The files of `folder` and its folders, one after the other in the order of their paths. Links are not followed.
fn read_folder(folder: &Path, most: u64) -> Result<Vec<u8>, TrainError> {
    let mut found = Files {
        paths: Vec::new(),
        left: most,
    };
    let too_long = || {
        let folder = folder.display();
        TrainError::Data(format!(
            "`data`: the files of {folder} and its folders have more than {most} bytes, which is the most that is read; name a \
             smaller folder"
        ))
    };
    if !found.add(folder)? {
        return Err(too_long());
    }
    if found.paths.is_empty() {
        let folder = folder.display();
        return Err(TrainError::Data(format!(
            "`data`: {folder} and its folders have no files; name a folder with text in it"
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
    fn add(&mut self, folder: &Path) -> Result<bool, TrainError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_its_files_in_order() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        let error = Text::read(path, 4).unwrap_err().to_string();
        assert!(error.contains("have no files"), "{error}");
        fs::create_dir(path.join("b")).expect("a folder");
        for (name, text) in [("c", "third "), ("a", "first "), ("b/x", "second ")] {
            fs::write(path.join(name), text.repeat(9)).expect("a file");
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink(path.join("a"), path.join("z")).expect("a link");
        let corpus = Text::read(path, 4).expect("a text");
        let expected = ["first ", "second ", "third "].map(|text| text.repeat(9));
        assert_eq!(corpus.text, expected.concat().into_bytes());
        let error = read_folder(path, 60).unwrap_err().to_string();
        assert!(error.contains("more than 60 bytes"), "{error}");
    }

    #[test]
    fn a_split_batch_is_the_whole_batch() -> Result<(), TrainError> {
        let corpus = Text::new((0..=255).cycle().take(5000).collect(), 32)?;
        let whole = corpus.train(1, 7, 0..16)?;
        let mut parts = Vec::new();
        for rank in 0..3 {
            let part = corpus.train(1, 7, crate::data::share(16, 3, rank))?;
            parts.extend_from_slice(&part.inputs);
        }
        assert_eq!(*whole.inputs, *parts);
        assert_eq!(whole.inputs[1..32], whole.targets[..31]);
        Ok(())
    }
}

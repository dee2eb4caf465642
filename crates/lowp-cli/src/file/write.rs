//! Writes safetensors files whose tensors are made one after the other.

use super::header::MAX_HEADER;
use super::input_error::input_error;
use super::model::Tensor;
use super::progress::Progress;
use super::target::Draft;
use crate::output::shown;
use anyhow::{Context, Result, ensure};
use safetensors::Dtype;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Where the bytes of an output tensor come from.
#[derive(Clone, Copy, Debug)]
pub(super) enum ItemSource<'a> {
    /// A tensor of the input, unchanged.
    Input(Tensor<'a>),
    /// Part `part` of what [`Outputs::make`] returns for `job`.
    Made {
        job: usize,
        part: usize,
        number: bool,
    },
}

/// One output tensor.
#[derive(Clone, Debug)]
pub(super) struct Item<'a> {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: usize,
    pub(super) source: ItemSource<'a>,
}

impl<'a> Item<'a> {
    /// A tensor of the input, unchanged.
    pub(super) fn input(tensor: Tensor<'a>) -> Self {
        Self {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            bytes: tensor.len(),
            source: ItemSource::Input(tensor),
        }
    }
}

/// A pass over the jobs of a file, by the parts that it makes. The format sorts tensors by dtype, so that the numbers of all jobs come before the
/// arrays of any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// Parts of one number.
    Numbers,
    /// All others.
    Arrays,
}

/// Takes bytes, piece by piece.
pub(super) type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

/// What a job made; its parts become bytes one at a time.
pub(super) trait Parts {
    /// How many of its parts are numbers.
    fn numbers(&self) -> usize {
        0
    }

    /// Hands the bytes of one part that was made to `sink`.
    ///
    /// # Errors
    /// There is no such part, or whatever `sink` returns.
    fn write(&self, part: usize, sink: &mut Sink<'_>) -> Result<()>;
}

/// Makes the parts of a job that belong to a pass.
pub(super) type Make<'a> = Box<dyn Fn(usize, Pass) -> Result<Box<dyn Parts + 'a>> + 'a>;

/// Everything that goes into one file.
pub(super) struct Outputs<'a> {
    pub(super) items: Vec<Item<'a>>,
    pub(super) metadata: BTreeMap<String, String>,
    /// Makes tensors. The order of the calls follows from names and dtypes alone, never from sizes.
    pub(super) make: Make<'a>,
    /// Bytes of the input that `make` reads, and tells its progress, each time it makes a job.
    pub(super) sources: Vec<usize>,
}

impl<'a> Outputs<'a> {
    /// Bytes of all tensors.
    pub(super) fn bytes(&self) -> usize {
        self.items.iter().map(|item| item.bytes).sum()
    }

    /// What the progress of writing everything adds up to.
    pub(super) fn work(&self) -> usize {
        self.bytes() + reads(&sorted(&self.items), &self.sources)
    }

    /// Rejects names that are there twice.
    ///
    /// # Errors
    /// Names the first such tensor.
    pub(super) fn check(&self) -> Result<()> {
        check_names(&self.items)
    }

    /// Writes the file.
    ///
    /// # Errors
    /// A tensor cannot be made, or the file cannot be written.
    pub(super) fn write(&self, draft: &mut Draft, progress: &Progress) -> Result<()> {
        let items = sorted(&self.items);
        draft.write(&header(&items, &self.metadata)?)?;
        let mut maker = self.maker();
        for item in items {
            maker.write(item, &mut |bytes| {
                draft.write(bytes)?;
                progress.add(bytes.len());
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Makes the bytes of items, one at a time.
    pub(super) fn maker(&self) -> Maker<'_, 'a> {
        Maker::new(&self.make)
    }
}

/// Rejects names that are there twice.
///
/// # Errors
/// Names the first such tensor.
pub(super) fn check_names(items: &[Item<'_>]) -> Result<()> {
    let mut seen = BTreeSet::new();
    match items.iter().find(|item| !seen.insert(item.name.as_str())) {
        None => Ok(()),
        Some(item) => Err(input_error(format!(
            "two output tensors would be called '{}'; rename one in the input, or leave it out",
            shown(&item.name)
        ))),
    }
}

/// The items in the order in which they are written, which is that of the safetensors package: wide dtypes first, so
/// that every tensor is aligned.
pub(super) fn sorted<'i, 'a>(items: &'i [Item<'a>]) -> Vec<&'i Item<'a>> {
    let mut items: Vec<&Item<'_>> = items.iter().collect();
    items.sort_by_key(|item| (Reverse(item.dtype), item.name.as_str()));
    items
}

/// Bytes of `sources` that are read when a [`Maker`] writes all items in this order: those of a job once for its numbers
/// and once each time that its arrays begin, which may be again after those of another job.
pub(super) fn reads(items: &[&Item<'_>], sources: &[usize]) -> usize {
    let (mut last, mut numbers, mut total) = (None, BTreeSet::new(), 0);
    for item in items {
        if let ItemSource::Made { job, number, .. } = item.source {
            let made = if number {
                numbers.insert(job)
            } else {
                last.replace(job) != Some(job)
            };
            if made {
                total += sources.get(job).copied().unwrap_or(0);
            }
        }
    }
    total
}

/// The name that the format keeps for the metadata.
const METADATA: &str = "__metadata__";
/// The header ends at a multiple of this.
const ALIGNMENT: usize = 8;

/// What the header holds under one key.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    Tensor {
        data_offsets: [usize; 2],
        dtype: Dtype,
        shape: &'a [usize],
    },
    Metadata(&'a BTreeMap<String, String>),
}

/// The bytes before the first tensor, of items that are [`sorted`]. Keys are sorted, so that equal contents give equal
/// files.
pub(super) fn header(items: &[&Item<'_>], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let mut entries: BTreeMap<&str, Entry<'_>> = BTreeMap::new();
    if !metadata.is_empty() {
        entries.insert(METADATA, Entry::Metadata(metadata));
    }
    let mut start = 0;
    for item in items {
        let end = start + item.bytes;
        let entry = Entry::Tensor {
            data_offsets: [start, end],
            dtype: item.dtype,
            shape: &item.shape,
        };
        entries.insert(&item.name, entry);
        start = end;
    }
    let mut text = serde_json::to_vec(&entries)?;
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    if text.len() > MAX_HEADER {
        return Err(input_error(format!(
            "the header of the output would have {} bytes and the format allows {MAX_HEADER}; quantize fewer tensors \
             (--tensors, --ignore)",
            text.len()
        )));
    }
    let length = text.len() as u64;
    text.splice(0..0, length.to_le_bytes());
    Ok(text)
}

/// What one file's tensors share while they are made.
pub(super) struct Maker<'m, 'a> {
    make: &'m Make<'a>,
    /// The job whose arrays were made last.
    made: Option<(usize, Box<dyn Parts + 'a>)>,
    /// The numbers of jobs that have made theirs, and how many are still to be written: only those of tensors whose
    /// names come between each other's.
    numbers: BTreeMap<usize, (usize, Box<dyn Parts + 'a>)>,
}

impl<'m, 'a> Maker<'m, 'a> {
    /// One for the items whose jobs `make` makes, each of which is written once.
    pub(super) fn new(make: &'m Make<'a>) -> Self {
        Self {
            make,
            made: None,
            numbers: BTreeMap::new(),
        }
    }

    /// Hands the bytes of `item` to `sink`. Items of one job that follow each other share its work.
    ///
    /// # Errors
    /// It cannot be made, or whatever `sink` returns.
    pub(super) fn write(&mut self, item: &Item<'_>, sink: &mut Sink<'_>) -> Result<()> {
        let mut written = 0;
        let mut counted = |bytes: &[u8]| {
            written += bytes.len();
            sink(bytes)
        };
        self.make(item, &mut counted)
            .with_context(|| format!("'{}'", shown(&item.name)))?;
        ensure!(
            written == item.bytes,
            "'{}': {written} bytes were made where {} were announced",
            shown(&item.name),
            item.bytes
        );
        Ok(())
    }

    fn make(&mut self, item: &Item<'_>, sink: &mut Sink<'_>) -> Result<()> {
        match item.source {
            ItemSource::Input(tensor) => tensor.pieces(0..tensor.len(), |_, bytes| sink(bytes)),
            ItemSource::Made {
                job,
                part,
                number: true,
            } => {
                let (left, made) = match self.numbers.remove(&job) {
                    Some(numbers) => numbers,
                    None => {
                        let made = (self.make)(job, Pass::Numbers)?;
                        (made.numbers(), made)
                    }
                };
                made.write(part, sink)?;
                if left > 1 {
                    self.numbers.insert(job, (left - 1, made));
                }
                Ok(())
            }
            ItemSource::Made { job, part, .. } => {
                if self.made.as_ref().is_none_or(|(last, _)| *last != job) {
                    // Room for the next job first.
                    self.made = None;
                    self.made = Some((job, (self.make)(job, Pass::Arrays)?));
                }
                let (_, made) = self.made.as_ref().context("nothing was made")?;
                made.write(part, sink)
            }
        }
    }
}

//! Writes safetensors files whose tensors are made when their turn comes.

use super::model::Tensor;
use super::progress::Progress;
use super::refuse::refuse;
use anyhow::{Context, Result};
use safetensors::tensor::View;
use safetensors::{Dtype, serialize_to_file};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// Where the bytes of an output tensor come from.
#[derive(Clone, Copy, Debug)]
pub(super) enum From<'a> {
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
    pub(super) from: From<'a>,
}

impl<'a> Item<'a> {
    /// A tensor of the input, unchanged.
    pub(super) fn input(tensor: Tensor<'a>) -> Self {
        Self {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            bytes: tensor.len(),
            from: From::Input(tensor),
        }
    }
}

/// Which parts of a job are made. The format sorts tensors by dtype, so that the numbers of all jobs come before the
/// arrays of any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// Parts of one number; the others stay empty.
    Numbers,
    /// All others; the numbers stay empty.
    Arrays,
}

/// Makes the wanted parts of a job.
pub(super) type Make<'a> = Box<dyn Fn(usize, Want) -> Result<Vec<Vec<u8>>> + 'a>;

/// Everything that goes into one file.
pub(super) struct Outputs<'a> {
    pub(super) items: Vec<Item<'a>>,
    pub(super) metadata: BTreeMap<String, String>,
    /// Makes tensors. The order of the calls follows from names and dtypes alone, never from sizes.
    pub(super) make: Make<'a>,
}

impl Outputs<'_> {
    /// Bytes of all tensors.
    pub(super) fn bytes(&self) -> usize {
        self.items.iter().map(|item| item.bytes).sum()
    }

    /// Refuses names that are there twice.
    ///
    /// # Errors
    /// Names the first such tensor.
    pub(super) fn check(&self) -> Result<()> {
        let mut seen = BTreeSet::new();
        match self
            .items
            .iter()
            .find(|item| !seen.insert(item.name.as_str()))
        {
            None => Ok(()),
            Some(item) => Err(refuse(format!(
                "two output tensors would be called '{}'; rename one in the input, or leave it out",
                item.name
            ))),
        }
    }

    /// Writes the file at `path`.
    ///
    /// # Errors
    /// A tensor cannot be made, or the file cannot be written.
    pub(super) fn write(&self, path: &Path, progress: &Progress) -> Result<()> {
        let state = State {
            outputs: self,
            progress,
            made: RefCell::new(None),
            numbers: RefCell::new(BTreeMap::new()),
            failure: RefCell::new(None),
        };
        let views = self.items.iter().map(|item| {
            (
                item.name.as_str(),
                Lazy {
                    item,
                    state: &state,
                },
            )
        });
        let metadata: HashMap<String, String> = self.metadata.clone().into_iter().collect();
        let metadata = (!metadata.is_empty()).then_some(metadata);
        let written = serialize_to_file(views, metadata, path);
        if let Some(failure) = state.failure.into_inner() {
            return Err(failure);
        }
        written.with_context(|| format!("cannot write {}", path.display()))
    }
}

/// A job and those of its parts that are not written yet.
type Made = (usize, Vec<Option<Vec<u8>>>);

/// What one file's tensors share while it is written.
struct State<'a> {
    outputs: &'a Outputs<'a>,
    progress: &'a Progress,
    /// The job made last.
    made: RefCell<Option<Made>>,
    /// Numbers by job and part, until their turn.
    numbers: RefCell<BTreeMap<(usize, usize), Vec<u8>>>,
    /// What went wrong first; nothing is made after it.
    failure: RefCell<Option<anyhow::Error>>,
}

impl State<'_> {
    fn number(&self, job: usize, part: usize) -> Result<Vec<u8>> {
        let mut numbers = self.numbers.borrow_mut();
        if !numbers.contains_key(&(job, part)) {
            let parts = (self.outputs.make)(job, Want::Numbers)?;
            let parts = parts.into_iter().enumerate();
            numbers.extend(parts.map(|(part, bytes)| ((job, part), bytes)));
        }
        numbers
            .remove(&(job, part))
            .context("there is no such part")
    }

    fn array(&self, job: usize, part: usize) -> Result<Vec<u8>> {
        let mut made = self.made.borrow_mut();
        let there = |(last, parts): &Made| *last == job && parts[part].is_some();
        if !made.as_ref().is_some_and(there) {
            // Room for the next job first.
            *made = None;
            let parts = (self.outputs.make)(job, Want::Arrays)?;
            *made = Some((job, parts.into_iter().map(Some).collect()));
        }
        let part = made.as_mut().and_then(|(_, parts)| parts[part].take());
        part.context("there is no such part")
    }
}

/// One tensor of the file.
struct Lazy<'a> {
    item: &'a Item<'a>,
    state: &'a State<'a>,
}

impl View for Lazy<'_> {
    fn dtype(&self) -> Dtype {
        self.item.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.item.shape
    }

    fn data_len(&self) -> usize {
        self.item.bytes
    }

    /// The bytes; empty after a failure, which [`Outputs::write`] reports.
    fn data(&self) -> Cow<'_, [u8]> {
        if self.state.failure.borrow().is_some() {
            return Cow::Borrowed(&[]);
        }
        let bytes = match self.item.from {
            From::Input(tensor) => tensor.to_vec(),
            From::Made {
                job,
                part,
                number: true,
            } => self.state.number(job, part),
            From::Made { job, part, .. } => self.state.array(job, part),
        };
        match bytes {
            Ok(bytes) => {
                self.state.progress.add(bytes.len());
                Cow::Owned(bytes)
            }
            Err(error) => {
                *self.state.failure.borrow_mut() =
                    Some(error.context(format!("'{}'", self.item.name)));
                Cow::Borrowed(&[])
            }
        }
    }
}

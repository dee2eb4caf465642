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
    /// Part `part` of what [`Outputs::make`] returns for `job`; a part that is one number is kept until its turn.
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

/// Everything that goes into one file.
pub(super) struct Outputs<'a> {
    pub(super) items: Vec<Item<'a>>,
    pub(super) metadata: BTreeMap<String, String>,
    /// Makes all parts of a job. It may be called twice for a job: numbers come first in a file, and a job's arrays are
    /// not kept until their turn. The order of the calls follows from names and dtypes alone, never from sizes.
    pub(super) make: Box<dyn Fn(usize) -> Result<Vec<Vec<u8>>> + 'a>,
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
    fn part(&self, job: usize, part: usize) -> Result<Vec<u8>> {
        if let Some(number) = self.numbers.borrow_mut().remove(&(job, part)) {
            return Ok(number);
        }
        let mut made = self.made.borrow_mut();
        if made
            .as_ref()
            .is_none_or(|(last, parts)| *last != job || parts[part].is_none())
        {
            // Room for the next job first.
            *made = None;
            let parts = (self.outputs.make)(job)?;
            for item in &self.outputs.items {
                if let From::Made {
                    job: of,
                    part,
                    number: true,
                } = item.from
                    && of == job
                {
                    self.numbers
                        .borrow_mut()
                        .insert((job, part), parts[part].clone());
                }
            }
            *made = Some((job, parts.into_iter().map(Some).collect()));
        }
        let (_, parts) = made.as_mut().context("nothing was made")?;
        parts[part].take().context("a part was asked for twice")
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
            From::Input(tensor) => tensor.bytes().map(|bytes| bytes.to_vec()),
            From::Made { job, part, .. } => self.state.part(job, part),
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

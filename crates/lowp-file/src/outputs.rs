//! [`Outputs`]: the tensors of a model that is written, in one file, or in several of limited size with an index, as Hugging Face keeps
//! them.

use crate::dtypes::OutputDtype;
use crate::error::Result;
use crate::fields::Field;
use crate::interchange::hub::{INDEX, WEIGHTS};
use crate::json::json_text;
use crate::keys;
use crate::meta::{Quantized, Text};
use crate::output::path::{Draft, OutputFolder};
use crate::progress::Progress;
use crate::write::{Item, ItemSource, Make, check_names, fill, header, sorted};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Tensors that lie in one file, with what its metadata say of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Group<'a> {
    /// What it is sorted by.
    pub(crate) name: String,
    pub(crate) items: Vec<Item<'a>>,
    pub(crate) metadata: BTreeMap<String, String>,
}

impl<'a> Group<'a> {
    pub(crate) fn of(item: Item<'a>) -> Self {
        Self {
            name: item.name.clone(),
            items: vec![item],
            metadata: BTreeMap::new(),
        }
    }

    /// The values of what a file holds of `tensor`, which are made of `job`.
    pub(crate) fn decoded(job: usize, tensor: &Quantized, float: OutputDtype) -> Self {
        let dims = match tensor.shard {
            None => tensor.text.shape.clone(),
            Some(_) => vec![tensor.shape.rows, tensor.shape.cols],
        };
        let name = tensor.name.clone();
        Self::of(Item::made(job, 0, name, float.into(), dims))
    }

    /// The `fields` of the quantized tensor `name`, which are made of `job`, and what `text` says of it.
    pub(crate) fn quantized(job: usize, name: &str, fields: &[Field], text: &Text) -> Result<Self> {
        let said = (keys::key(name), serde_json::to_string(text)?);
        Ok(Self {
            name: name.to_owned(),
            items: Item::fields(job, name, fields),
            metadata: BTreeMap::from([said]),
        })
    }
}

/// Everything that is written, and how it is made.
pub(crate) struct Outputs<'a> {
    pub(crate) groups: Vec<Group<'a>>,
    /// What the metadata of every file say.
    pub(crate) metadata: BTreeMap<String, String>,
    /// Makes tensors. The order of the calls follows from names and dtypes alone, never from sizes.
    pub(crate) make: Make<'a>,
    /// Bytes of the input that `make` reads, and tells its progress, each time it makes a job.
    pub(crate) sources: Vec<usize>,
}

impl<'a> Outputs<'a> {
    pub(crate) fn sorted(
        mut groups: Vec<Group<'a>>,
        metadata: BTreeMap<String, String>,
        make: Make<'a>,
    ) -> Self {
        groups.sort_by(|a, b| a.name.cmp(&b.name));
        Self {
            groups,
            metadata,
            make,
            sources: Vec::new(),
        }
    }

    pub(crate) fn items(&self) -> impl Iterator<Item = &Item<'a>> {
        items(&self.groups)
    }

    pub(crate) fn check(&self) -> Result<()> {
        check_names(self.items())
    }

    /// What the progress of writing everything adds up to, in files of at most `most` bytes of tensors: each job that has a tensor in a
    /// file is made once.
    pub(crate) fn work(&self, most: u64) -> usize {
        let job = |item: &Item<'_>| match item.source {
            ItemSource::Made { job, .. } => Some(job),
            ItemSource::Input(_) => None,
        };
        let read = |job: usize| self.sources.get(job).copied().unwrap_or(0);
        let of_file = |groups| {
            let jobs: BTreeSet<usize> = items(groups).filter_map(job).collect();
            bytes(groups) + jobs.into_iter().map(read).sum::<usize>()
        };
        self.files(most).into_iter().map(of_file).sum()
    }

    /// Writes the file of `groups`.
    pub(crate) fn write_file(
        &self,
        groups: &[Group<'a>],
        draft: &mut Draft,
        progress: &dyn Progress,
    ) -> Result<()> {
        let mut metadata = self.metadata.clone();
        metadata.extend(groups.iter().flat_map(|group| group.metadata.clone()));
        let items = sorted(items(groups));
        let header = header(&items, &metadata)?;
        draft.write_at(0, &header)?;
        let begin = header.len() as u64;
        fill(draft, begin, &items, &self.make, progress, |item| {
            Ok(Some(item.bytes))
        })
    }

    /// Writes the files into `target`, each of at most `most` bytes of tensors unless one group has more. Returns the bytes.
    pub(crate) fn write(
        &self,
        target: &OutputFolder,
        most: u64,
        progress: &dyn Progress,
    ) -> Result<u64> {
        let files = self.files(most);
        let mut written = 0;
        let mut places = Map::new();
        for (number, groups) in files.iter().enumerate() {
            let name = match files.len() {
                1 => WEIGHTS.to_owned(),
                count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            let mut draft = target.create(&name)?;
            self.write_file(groups, &mut draft, progress)?;
            written += draft.finish()?;
            for item in items(groups) {
                places.insert(item.name.clone(), Value::String(name.clone()));
            }
        }
        if files.len() > 1 {
            let total = bytes(&self.groups);
            let index = json!({ "metadata": { "total_size": total }, "weight_map": places });
            written += target.write_text(INDEX, &json_text(&index)?)?;
        }
        Ok(written)
    }

    /// The groups of each file, in order. There is a file even where there is no group.
    fn files(&self, most: u64) -> Vec<&[Group<'a>]> {
        let (mut files, mut start, mut room) = (Vec::new(), 0, most);
        for (at, group) in self.groups.iter().enumerate() {
            let bytes = bytes(std::slice::from_ref(group)) as u64;
            if bytes > room && at > start {
                files.push(&self.groups[start..at]);
                (start, room) = (at, most);
            }
            room = room.saturating_sub(bytes);
        }
        files.push(&self.groups[start..]);
        files
    }
}

fn items<'g, 'a>(groups: &'g [Group<'a>]) -> impl Iterator<Item = &'g Item<'a>> {
    groups.iter().flat_map(|group| &group.items)
}

pub(crate) fn bytes(groups: &[Group<'_>]) -> usize {
    items(groups).map(|item| item.bytes).sum()
}

//! Weights in one file, or in several of limited size with an index, as Hugging Face keeps them.

use crate::error::Result;
use crate::interchange::hub::{INDEX, WEIGHTS};
use crate::progress::Progress;
use crate::target::FolderTarget;
use crate::write::{Item, Make, Outputs, check_names};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Tensors that lie in one file, with what its metadata say of them.
#[derive(Debug, Default)]
pub(crate) struct Group<'a> {
    pub(crate) items: Vec<Item<'a>>,
    pub(crate) metadata: BTreeMap<String, String>,
}

impl<'a> Group<'a> {
    /// One tensor.
    pub(crate) fn of(item: Item<'a>) -> Self {
        Self {
            items: vec![item],
            metadata: BTreeMap::new(),
        }
    }

    /// The name of its first tensor.
    pub(crate) fn name(&self) -> &str {
        self.items.first().map_or("", |item| item.name.as_str())
    }

    fn bytes(&self) -> u64 {
        self.items.iter().map(|item| item.bytes as u64).sum()
    }
}

/// Everything that is written, and how it is made.
pub(crate) struct Weights<'a> {
    pub(crate) groups: Vec<Group<'a>>,
    /// What the metadata of every file say.
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) make: Make<'a>,
    /// Bytes of the input that each job reads, where its progress tells of them.
    pub(crate) sources: Vec<usize>,
}

impl<'a> Weights<'a> {
    /// What goes into one file, on its own.
    pub(crate) fn into_outputs(self) -> Outputs<'a> {
        let mut outputs = Outputs {
            items: Vec::new(),
            metadata: self.metadata,
            make: self.make,
            sources: self.sources,
        };
        for group in self.groups {
            outputs.items.extend(group.items);
            outputs.metadata.extend(group.metadata);
        }
        outputs
    }

    /// Rejects names that are there twice.
    pub(crate) fn check(&self) -> Result<()> {
        let items: Vec<Item<'_>> = self
            .groups
            .iter()
            .flat_map(|group| group.items.clone())
            .collect();
        check_names(&items)
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> u64 {
        self.groups.iter().map(Group::bytes).sum()
    }

    /// All of them as the content of one file.
    fn outputs<'s>(&'s self, groups: &[&'s Group<'s>]) -> Outputs<'s> {
        let mut metadata = self.metadata.clone();
        for group in groups {
            metadata.extend(group.metadata.clone());
        }
        Outputs {
            items: groups
                .iter()
                .flat_map(|group| group.items.clone())
                .collect(),
            metadata,
            make: Box::new(|job| (self.make)(job)),
            sources: self.sources.clone(),
        }
    }

    /// What the progress of writing everything adds up to, in files of at most `most` bytes of tensors.
    pub(crate) fn work(&self, most: u64) -> usize {
        let files = self.files(most);
        files.iter().map(|groups| self.outputs(groups).work()).sum()
    }

    /// As one file.
    pub(crate) fn whole(&self) -> Outputs<'_> {
        self.outputs(&self.groups.iter().collect::<Vec<_>>())
    }

    /// Writes the files into `target`, each of at most `most` bytes of tensors unless one group has more. Returns the bytes.
    pub(crate) fn write(
        &self,
        target: &FolderTarget,
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
            let outputs = self.outputs(groups);
            let mut draft = target.create(&name)?;
            outputs.write(&mut draft, progress)?;
            written += draft.finish()?;
            for item in &outputs.items {
                places.insert(item.name.clone(), Value::String(name.clone()));
            }
        }
        if files.len() > 1 {
            let index = json!({ "metadata": { "total_size": self.bytes() }, "weight_map": places });
            written += write_text(target, INDEX, &json_text(&index)?)?;
        }
        Ok(written)
    }

    /// The groups of each file, in order. There is a file even where there is no group.
    fn files(&self, most: u64) -> Vec<Vec<&Group<'_>>> {
        let (mut files, mut room) = (vec![Vec::new()], most);
        for group in &self.groups {
            let bytes = group.bytes();
            let full = bytes > room && files.last().is_some_and(|file| !file.is_empty());
            if full {
                files.push(Vec::new());
                room = most;
            }
            room = room.saturating_sub(bytes);
            if let Some(file) = files.last_mut() {
                file.push(group);
            }
        }
        files
    }
}

/// A JSON document as text.
pub(crate) fn json_text(value: &Value) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// Writes a text into `target`. Returns the bytes.
pub(crate) fn write_text(target: &FolderTarget, name: &str, text: &str) -> Result<u64> {
    let mut draft = target.create(name)?;
    draft.write(text.as_bytes())?;
    draft.finish()
}

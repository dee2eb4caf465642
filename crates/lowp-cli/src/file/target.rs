//! Output paths: known to be writable before work begins, and whole or absent after it.

use super::refuse::refuse;
use crate::files::{NewFile, NewFolder};
use anyhow::{Context, Result};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// A file that will appear under its name when it is complete.
#[derive(Debug)]
pub(super) struct FileTarget(NewFile);

impl FileTarget {
    /// Takes `path` as the output of a command that reads `inputs`.
    ///
    /// # Errors
    /// It cannot be written, or it is an input.
    pub(super) fn new<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        let file = NewFile::at(path).map_err(|e| refused(path, e))?;
        let same = |input: &Path| fs::canonicalize(input).is_ok_and(|input| input == file.path());
        if inputs.into_iter().any(same) {
            return Err(refused(path, "it is the input; give another name"));
        }
        Ok(Self(file))
    }

    /// Lets `write` fill a file under a temporary name, then gives it its own.
    ///
    /// # Errors
    /// Whatever `write` returns, or the system refuses; nothing is left behind then.
    pub(super) fn fill(self, write: impl FnOnce(&mut Draft) -> Result<()>) -> Result<()> {
        let Self(file) = self;
        let path = file.path().to_owned();
        Draft::fill(&file.draft(), &path, write)?;
        file.publish().with_context(|| cannot_write(&path))
    }
}

/// A folder that will appear under its name when all of its files are complete.
#[derive(Debug)]
pub(super) struct FolderTarget(NewFolder);

impl FolderTarget {
    /// Takes `path` as the folder to write: absent, or empty.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn new(path: &Path) -> Result<Self> {
        NewFolder::at(path).map(Self).map_err(|e| refused(path, e))
    }

    /// Makes the file called `name` in it; may be called from several threads.
    ///
    /// # Errors
    /// Whatever `write` returns, or the system refuses.
    pub(super) fn fill_file(
        &self,
        name: &str,
        write: impl FnOnce(&mut Draft) -> Result<()>,
    ) -> Result<()> {
        Draft::fill(&self.0.draft().join(name), &self.0.path().join(name), write)
    }

    /// Gives the folder its name.
    ///
    /// # Errors
    /// The system refuses; nothing is left behind then.
    pub(super) fn publish(self) -> Result<()> {
        let path = self.0.path().to_owned();
        self.0.publish().with_context(|| cannot_write(&path))
    }
}

/// A file that is being written.
#[derive(Debug)]
pub(super) struct Draft {
    out: BufWriter<File>,
    /// What it will be called.
    name: PathBuf,
}

impl Draft {
    /// Lets `write` make the file at `path`, which will be called `name`, and makes sure that it is on the disk.
    fn fill(path: &Path, name: &Path, write: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let file = File::create(path).with_context(|| cannot_write(name))?;
        let mut draft = Self {
            out: BufWriter::new(file),
            name: name.to_owned(),
        };
        write(&mut draft)?;
        draft
            .out
            .flush()
            .and_then(|()| draft.out.get_ref().sync_all())
            .with_context(|| cannot_write(name))
    }

    /// Appends `bytes`.
    ///
    /// # Errors
    /// The system refuses, for want of space most often.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out
            .write_all(bytes)
            .with_context(|| cannot_write(&self.name))
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

fn refused(path: &Path, why: impl Display) -> anyhow::Error {
    refuse(format!("-o: {}: {why}", cannot_write(path)))
}

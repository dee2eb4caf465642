//! [`OutputFile`] and [`OutputFolder`]: paths that commands write, which are no inputs; and [`Draft`], a file while it is written.

use super::background::{BackgroundFile, Deferred};
use super::unpublished::Unpublished;
use crate::error::{Context, FileError, Result};
use crate::limits::hinted;
use crate::region::Region;
use std::fmt::Display;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// A file that will appear under its name when it is complete.
#[derive(Debug)]
pub struct OutputFile(Unpublished);

impl OutputFile {
    /// Takes `path` as the output of a command that reads `inputs`.
    pub(crate) fn new<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        let file = Unpublished::file(path).map_err(|e| output_error(path, e))?;
        let same = |input: &Path| fs::canonicalize(input).is_ok_and(|input| input == file.path());
        if inputs.into_iter().any(same) {
            return Err(output_error(path, "it is the input; give another name"));
        }
        Ok(Self(file))
    }

    /// Lets `write` fill a file under a temporary name, then gives it its own, unless `check` fails. Returns its length.
    pub(crate) fn fill(
        self,
        write: impl FnOnce(&mut Draft) -> Result<()>,
        check: impl FnOnce() -> Result<()>,
    ) -> Result<u64> {
        let Self(file) = self;
        let path = file.path().to_owned();
        let mut draft = Draft::new(file.create().map(BackgroundFile::new), &path)?;
        let made = write(&mut draft).and_then(|()| draft.finish());
        // An input that was changed is reported as such, whatever failed because of it.
        check()?;
        let written = made?;
        file.publish().with_context(|| cannot_write(&path))?;
        Ok(written)
    }
}

/// A folder that will appear under its name when all of its files are complete.
#[derive(Debug)]
pub struct OutputFolder(Unpublished);

impl OutputFolder {
    /// Takes `path` as the folder to write, absent or empty, of a command that reads `inputs`. It may lie in a folder of an input:
    /// what is read was listed before.
    pub(crate) fn new<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        if let Ok(folder) = fs::canonicalize(path) {
            let is_in = |input: &Path| {
                let input = fs::canonicalize(input);
                input.is_ok_and(|input| input.parent() == Some(&*folder))
            };
            if inputs.into_iter().any(is_in) {
                return Err(output_error(
                    path,
                    "it is the folder of the input; give another name",
                ));
            }
        }
        Unpublished::folder(path)
            .map(Self)
            .map_err(|e| output_error(path, e))
    }

    pub(crate) fn create(&self, name: &str) -> Result<Draft> {
        self.create_by(name, BackgroundFile::new)
    }

    /// The same for one of many files that are written at a time.
    pub(crate) fn create_small(&self, name: &str) -> Result<Draft> {
        self.create_by(name, BackgroundFile::small)
    }

    fn create_by(&self, name: &str, out: fn(File) -> BackgroundFile) -> Result<Draft> {
        let file = File::create(self.0.place().join(name));
        Draft::new(file.map(out), &self.0.path().join(name))
    }

    pub(crate) fn write_text(&self, name: &str, text: &str) -> Result<u64> {
        let mut draft = self.create(name)?;
        draft.write(text.as_bytes())?;
        draft.finish()
    }

    pub(crate) fn publish(self) -> Result<()> {
        let path = self.0.path().to_owned();
        self.0.publish().with_context(|| cannot_write(&path))
    }
}

#[derive(Debug)]
pub(crate) struct Draft {
    out: BackgroundFile,
    name: PathBuf,
    written: u64,
}

impl Draft {
    fn new(out: io::Result<BackgroundFile>, name: &Path) -> Result<Self> {
        Ok(Self {
            out: out.map_err(hinted).with_context(|| cannot_write(name))?,
            name: name.to_owned(),
            written: 0,
        })
    }

    fn named<T>(name: &Path, done: io::Result<T>) -> Result<T> {
        done.with_context(|| cannot_write(name))
    }

    pub(crate) fn finish(self) -> Result<u64> {
        Self::named(&self.name, self.out.finish())?;
        Ok(self.written)
    }

    /// Writes `bytes` to the place that begins at byte `at`. Every place is written once, in any order.
    pub(crate) fn write_at(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        self.written += bytes.len() as u64;
        Self::named(&self.name, self.out.write_at(at, bytes))
    }

    /// The same of bytes that are read when they are written, which may be later; `region` says where each lies from there.
    pub(crate) fn write_deferred(
        &mut self,
        at: u64,
        region: Region,
        bytes: Box<dyn Deferred>,
    ) -> Result<()> {
        self.written += region.placed(bytes.len()) as u64;
        Self::named(&self.name, self.out.write_deferred(at, region, bytes))
    }

    /// Waits until at most `most` bytes of what was given by [`Draft::write_deferred`] are left.
    pub(crate) fn settle(&mut self, most: usize) -> Result<()> {
        Self::named(&self.name, self.out.settle(most))
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_at(self.written, bytes)
    }

    pub(crate) fn len(&self) -> u64 {
        self.written
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

fn output_error(path: &Path, why: impl Display) -> FileError {
    FileError::Output(format!("{}: {why}", cannot_write(path)))
}

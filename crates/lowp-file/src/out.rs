//! [`Out`]: where a model is written: one file, or a folder as Hugging Face keeps models.

use crate::error::Result;
use crate::model::Model;
use crate::output::path::{OutputFile, OutputFolder};
use crate::outputs::Outputs;
use crate::progress::Progress;
use std::path::Path;

/// A place for a model, which appears there when it is complete.
#[derive(Debug)]
pub enum Out {
    /// One file.
    File(OutputFile),
    /// A folder, with most bytes of tensors in a file of it.
    Folder(OutputFolder, u64),
}

impl Out {
    /// Most bytes of tensors in a file of a folder, unless something else is asked for.
    pub const MOST_BYTES: u64 = 5_000_000_000;

    /// The file `path`, made of `inputs`.
    ///
    /// # Errors
    /// It cannot be written, or is an input.
    pub fn file<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        OutputFile::new(path, inputs).map(Self::File)
    }

    /// The folder `path`, absent or empty, made of `inputs`, with at most `most` bytes of tensors in a file; the parts of a tensor stay
    /// together.
    ///
    /// # Errors
    /// It cannot be written, or is the folder of an input.
    pub fn folder<'a>(
        path: &Path,
        inputs: impl IntoIterator<Item = &'a Path>,
        most: u64,
    ) -> Result<Self> {
        OutputFolder::new(path, inputs).map(|folder| Self::Folder(folder, most))
    }

    /// Writes `outputs`, which are made of `inputs`, and in a folder what `add_files` puts there, which returns its bytes. Returns the bytes of
    /// all files.
    pub(crate) fn write<'m>(
        self,
        inputs: impl IntoIterator<Item = &'m Model>,
        outputs: &Outputs<'_>,
        progress: &dyn Progress,
        add_files: impl FnOnce(&OutputFolder) -> Result<u64>,
    ) -> Result<u64> {
        outputs.check()?;
        let mut inputs = inputs.into_iter();
        let mut steady = || inputs.try_for_each(|model| model.steady(Ok(())));
        match self {
            Self::File(target) => {
                progress.begin(outputs.work(u64::MAX));
                target.fill(
                    |draft| outputs.write_file(&outputs.groups, draft, progress),
                    steady,
                )
            }
            Self::Folder(target, most) => {
                progress.begin(outputs.work(most));
                let written = outputs.write(&target, most, progress);
                let written = written.and_then(|bytes| Ok(bytes + add_files(&target)?));
                // An input that was changed is reported as such, whatever failed because of it.
                steady()?;
                let written = written?;
                target.publish()?;
                Ok(written)
            }
        }
    }
}

//! [`Out`]: where a command writes a model: one file, or a folder as Hugging Face keeps models.

use super::input_error::input_error;
use super::interchange::shards::Weights;
use super::interchange::size::Size;
use super::model::Model;
use super::progress::Progress;
use super::target::{FileTarget, FolderTarget, output_error};
use anyhow::Result;
use std::path::{Path, PathBuf};

/// The options of commands that write a model.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct OutArgs {
    /// What to write: one file where it ends in .safetensors, else a folder, absent or empty, with model.safetensors or several
    /// files and their index, and what lies beside the weights in the folder of the input
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,

    /// Most bytes of tensors in a file of a folder; the parts of a tensor stay together [default: 5GB]
    #[arg(long, value_name = "SIZE")]
    max_shard_size: Option<Size>,
}

/// A place for a model.
#[derive(Debug)]
pub(super) enum Out {
    File(FileTarget),
    /// With most bytes of tensors in a file.
    Folder(FolderTarget, u64),
}

impl OutArgs {
    /// Takes it as the output of a command that reads `inputs`.
    ///
    /// # Errors
    /// It cannot be written, or is an input.
    pub(super) fn open<'a>(&self, inputs: impl IntoIterator<Item = &'a Path>) -> Result<Out> {
        let output = &self.output;
        let ends = |end: &str| {
            let text = output.as_os_str().as_encoded_bytes();
            text.ends_with(end.as_bytes())
        };
        if ends(".json") {
            return Err(output_error(
                output,
                "it ends as the index of a sharded model does, and would be read as one; give a name that ends in .safetensors, or \
                 that of a folder",
            ));
        }
        if ends(".safetensors") {
            if self.max_shard_size.is_some() {
                return Err(input_error(format!(
                    "--max-shard-size: -o {} is one file, which is not cut; give the name of a folder, or leave --max-shard-size out",
                    output.display()
                )));
            }
            return Ok(Out::File(FileTarget::new(output, inputs)?));
        }
        if output.is_file() {
            return Err(output_error(
                output,
                "it exists and is a file, and a name that does not end in .safetensors is that of a folder; give another name",
            ));
        }
        let folder = FolderTarget::new(output, inputs)?;
        Ok(Out::Folder(
            folder,
            self.max_shard_size.unwrap_or_default().0,
        ))
    }
}

impl Out {
    /// Writes `weights`, which are made of `inputs`, and in a folder what `beside` puts there, which returns its bytes. Returns the bytes of
    /// all files.
    ///
    /// # Errors
    /// A tensor cannot be made, a file cannot be written, or an input was changed; nothing is left behind then.
    pub(super) fn write<'m>(
        self,
        inputs: impl IntoIterator<Item = &'m Model>,
        weights: &Weights<'_>,
        progress: &Progress,
        beside: impl FnOnce(&FolderTarget) -> Result<u64>,
    ) -> Result<u64> {
        let mut inputs = inputs.into_iter();
        let mut steady = || inputs.try_for_each(|model| model.steady(Ok(())));
        match self {
            Self::File(target) => {
                let outputs = weights.whole();
                progress.begin(outputs.work());
                target.fill(|draft| outputs.write(draft, progress), steady)
            }
            Self::Folder(target, most) => {
                progress.begin(weights.work(most));
                let written = weights.write(&target, most, progress);
                let written = written.and_then(|bytes| Ok(bytes + beside(&target)?));
                // What fails of an input that was changed is told as that.
                steady()?;
                let written = written?;
                target.publish()?;
                Ok(written)
            }
        }
    }
}

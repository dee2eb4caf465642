//! [`OutArgs`]: where a command writes a model: one file, or a folder as Hugging Face keeps models.

use super::size::bytes;
use crate::usage::input_error;
use anyhow::Result;
use lowp_file::Out;
use std::path::{Path, PathBuf};

/// The options of commands that write a model.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct OutArgs {
    /// Output: a file if the name ends in .safetensors, otherwise a folder that is absent or empty. The folder gets
    /// model.safetensors, or several files and their index, and the other files of the input folder
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,

    /// Maximum bytes of tensors per file of a folder; the buffers of a tensor stay in one file [default: 5GB]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    max_shard_size: Option<u64>,
}

impl OutArgs {
    /// Takes it as the output of a command that reads `inputs`.
    pub(super) fn open<'a>(&self, inputs: impl IntoIterator<Item = &'a Path>) -> Result<Out> {
        let output = &self.output;
        let wrong =
            |why: &str| input_error(format!("-o: cannot write {}: {why}", output.display()));
        let ends = |end: &str| {
            let text = output.as_os_str().as_encoded_bytes();
            text.ends_with(end.as_bytes())
        };
        if ends(".json") {
            return Err(wrong(
                "a name that ends in .json would be read as the index of a sharded model; give a name that ends in .safetensors, or the \
                 name of a folder",
            ));
        }
        if ends(".safetensors") {
            if self.max_shard_size.is_some() {
                return Err(input_error(format!(
                    "--max-shard-size: -o {} is one file, which cannot be split; give the name of a folder, or leave --max-shard-size out",
                    output.display()
                )));
            }
            return Ok(Out::file(output, inputs)?);
        }
        if output.is_file() {
            return Err(wrong(
                "a name that does not end in .safetensors is a folder, but a file of this name exists; give another name",
            ));
        }
        let most = self.max_shard_size.unwrap_or(Out::MOST_BYTES);
        Ok(Out::folder(output, inputs, most)?)
    }
}

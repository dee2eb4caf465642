//! [`OutArgs`]: where a command writes a model: one file, or a folder as Hugging Face keeps models.

use super::size::bytes;
use crate::usage::input_error;
use anyhow::Result;
use lowp_file::Out;
use std::path::{Path, PathBuf};

/// The options of commands that write a model.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct OutArgs {
    /// What to write: one file where it ends in .safetensors, else a folder, absent or empty, with model.safetensors or several
    /// files and their index, and what lies beside the weights in the folder of the input
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,

    /// Most bytes of tensors in a file of a folder; the parts of a tensor stay together [default: 5GB]
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
            return Ok(Out::file(output, inputs)?);
        }
        if output.is_file() {
            return Err(wrong(
                "it exists and is a file, and a name that does not end in .safetensors is that of a folder; give another name",
            ));
        }
        let most = self.max_shard_size.unwrap_or(Out::MOST_BYTES);
        Ok(Out::folder(output, inputs, most)?)
    }
}

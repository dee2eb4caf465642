//! The file commands: quantize, shard, inspect and compare safetensors files (docs/decisions/0005-files.md).

mod args;
mod checkpoint_of;
mod dequantize;
mod export;
mod import;
mod inspect;
mod names;
mod out;
mod progress;
mod quantize;
mod remedy;
mod select;
mod shard;
mod size;
mod summary;
#[cfg(test)]
mod tests;
mod unshard;
mod verify;

pub(crate) use names::USAGES;

use crate::usage::input_error;
use anyhow::Result;
use clap::Subcommand;
use lowp_file::FileError;

/// The file commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Quantize(quantize::Args),
    Dequantize(dequantize::Args),
    Shard(shard::Args),
    Unshard(unshard::Args),
    Inspect(inspect::Args),
    Verify(verify::Args),
    Export(export::Args),
    Import(import::Args),
}

pub(crate) fn main(command: &Command) -> Result<()> {
    let done = match command {
        Command::Quantize(args) => quantize::main(args),
        Command::Dequantize(args) => dequantize::main(args),
        Command::Shard(args) => shard::main(args),
        Command::Unshard(args) => unshard::main(args),
        Command::Inspect(args) => inspect::main(args),
        Command::Verify(args) => verify::main(args),
        Command::Export(args) => export::main(args),
        Command::Import(args) => import::main(args),
    };
    done.map_err(|error| match error.downcast::<FileError>() {
        Ok(FileError::Output(why)) => input_error(format!("-o: {why}")),
        Ok(FileError::Mend { what, remedy }) => {
            input_error(format!("{what}; {}", remedy::said(&remedy)))
        }
        Ok(error) => error.into(),
        Err(error) => error,
    })
}

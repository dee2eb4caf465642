//! The file commands: quantize, shard, inspect and compare safetensors files (docs/decisions/0005-files.md).

mod args;
mod bands;
mod behind;
mod cast;
mod decoding;
mod dequantize;
mod difference;
mod export;
mod fields;
mod flat;
mod foreign;
mod groups;
mod header;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod hostile_models;
mod import;
mod input_error;
mod inspect;
mod interchange;
mod map;
mod meta;
mod model;
mod names;
mod options;
mod out;
mod pack;
mod place;
mod progress;
mod quantize;
mod ranks;
mod round;
mod saved;
mod select;
mod shard;
mod source;
mod spare;
mod stamp;
mod stats;
mod summary;
mod target;
mod unpack;
mod unshard;
mod verify;
mod verify_source;
mod write;

use anyhow::Result;
use clap::Subcommand;

pub(crate) use options::Options;

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

/// Runs one file command.
///
/// # Errors
/// Input that cannot be read or taken, output that cannot be written, or files that differ.
pub(crate) fn main(command: &Command) -> Result<()> {
    match command {
        Command::Quantize(args) => quantize::main(args),
        Command::Dequantize(args) => dequantize::main(args),
        Command::Shard(args) => shard::main(args),
        Command::Unshard(args) => unshard::main(args),
        Command::Inspect(args) => inspect::main(args),
        Command::Verify(args) => verify::main(args),
        Command::Export(args) => export::main(args),
        Command::Import(args) => import::main(args),
    }
}

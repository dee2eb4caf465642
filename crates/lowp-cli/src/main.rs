//! The `lowp` command.

mod columns;
mod file;
mod files;
mod output;
mod train;
mod usage;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// A training step allocates and frees tens of megabytes of activations; the system allocator
/// returns them to the kernel each time, and page faults take a quarter of the step.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Low-precision sharded training weights: see what they cost and what they save.
#[derive(Debug, Parser)]
#[command(name = "lowp", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(train::Args),
    #[command(flatten)]
    File(file::Command),
}

fn main() -> ExitCode {
    one_candle_thread();
    let result = match Cli::parse().command {
        Command::Train(args) => train::main(args),
        Command::File(command) => file::main(&command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(usage::exit_code(&error))
        }
    }
}

/// Ranks are the parallelism here. candle's own worker pool is shared by all of them and waits by spinning, which
/// doubles the time of a training step on two cores.
fn one_candle_thread() {
    const VARIABLE: &str = "CANDLE_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: called first thing in `main`, before any other thread exists that could read the environment.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

//! The `lowp` command.

mod bench;
mod columns;
mod completions;
mod device;
mod file;
mod files;
mod freed;
#[cfg(feature = "cuda")]
mod gpus;
mod losses;
mod one_of;
mod output;
mod plan;
mod recipes;
mod reshard;
mod sharding;
mod signals;
mod tokenize;
mod train;
mod usage;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use lowp_file::process::Hooks;
use std::process::ExitCode;

/// A training step allocates and frees tens of megabytes of activations; the system allocator
/// returns them to the kernel each time, and page faults take a quarter of the step.
#[cfg(not(test))]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Train, quantize, shard, check and convert models with FP8, MX and NVFP4 weights.
#[derive(Debug, Parser)]
#[command(
    name = "lowp",
    version,
    arg_required_else_help = true,
    max_term_width = 110,
    after_help = "Examples:
  lowp train                                   train a small transformer, and its fp32 baseline
  lowp recipes                                 list the values of --recipe
  lowp plan --shape 4096x1024 --world-size 8   what the ranks store and send of one weight
  lowp quantize model.safetensors -o q.safetensors --recipe NAME
  lowp completions bash > ~/.local/share/bash-completion/completions/lowp

Exit code: 0 success; 1 the work failed; 2 the arguments cannot work, or another run saves or logs
to the same folder, which is found before the work begins. If a signal ends a command, its exit
status reports that signal. A failed write to standard error, or a reader of standard output that
stops early, does not change the exit code."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(Box<train::Args>),
    Tokenize(tokenize::Args),
    Plan(plan::Args),
    Recipes(recipes::Args),
    Bench(bench::Args),
    Losses(losses::Args),
    Completions(completions::Args),
    #[command(flatten)]
    File(file::Command),
}

fn main() -> ExitCode {
    before_threads();
    let are_set = lowp_file::process::set_hooks(Hooks {
        before_temporary: tidy_on_signals,
        before_map: watch_maps,
        after_free: freed::give_back,
    });
    debug_assert!(are_set, "nobody else sets hooks in this program");
    #[cfg(unix)]
    if let Err(error) = signals::survive_large_files() {
        output::note(&format!(
            "error: no signal handler can be installed: {error}"
        ));
        return ExitCode::FAILURE;
    }
    let mut expanded = match train::expand(std::env::args_os().collect()) {
        Ok(expanded) => expanded,
        Err(error) => {
            output::note(&format!("error: {error}"));
            return ExitCode::from(2);
        }
    };
    let args = std::mem::take(&mut expanded.args);
    let cli = match Cli::try_parse_from(recipes::join_switches(args.into_iter())) {
        Ok(cli) => cli,
        Err(error) => {
            let code = usage::explain(&error);
            // The first line says what is wrong; others list options, among them what an option needs beside it.
            let text = error.to_string();
            let named = match error.kind() {
                ErrorKind::MissingRequiredArgument => Some(&*text),
                _ => text.lines().next(),
            };
            let named = named.filter(|_| error.use_stderr());
            let origin = named.and_then(|text| expanded.origin(text));
            origin.iter().for_each(|line| output::note(line));
            return code;
        }
    };
    let result = match cli.command {
        Command::Train(args) => train::main(&args),
        Command::Tokenize(args) => tokenize::main(&args),
        Command::Plan(args) => plan::main(&args),
        Command::Recipes(args) => recipes::main(&args),
        Command::Bench(args) => bench::main(&args),
        Command::Losses(args) => losses::main(&args),
        Command::Completions(args) => completions::main(&args, &mut Cli::command()),
        Command::File(command) => file::main(&command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, also where `RUST_BACKTRACE` has candle put a backtrace into its errors.
            let error_text = lowp_comm::without_backtraces(&format!("{error:#}"));
            output::note(&format!("error: {error_text}"));
            let code = usage::exit_code(&error);
            let names_none = code == 2 && !error_text.contains("--");
            let options = || names_none.then(|| expanded.options()).flatten();
            let origin = expanded.origin(&error_text).or_else(options);
            origin.iter().for_each(|line| output::note(line));
            ExitCode::from(code)
        }
    }
}

/// Has what is not finished removed when a signal ends the process.
fn tidy_on_signals() -> std::io::Result<()> {
    #[cfg(unix)]
    signals::listen()?;
    Ok(())
}

/// Gives reads of a mapped file that became shorter an answer.
fn watch_maps() {
    #[cfg(target_os = "linux")]
    lowp_file::lost_pages::watch();
}

/// What candle reads from the environment, unless somebody has said something else there.
///
/// Ranks are the parallelism here. candle's own worker pool is shared by all of them and waits by spinning, which
/// doubles the time of a training step on two cores. candle 0.11 reads its size from the environment and nowhere else.
const THREADS: (&str, &str) = ("CANDLE_NUM_THREADS", "1");

#[expect(
    unsafe_code,
    reason = "sets an environment variable before any thread exists"
)]
fn before_threads() {
    let (variable, value) = THREADS;
    if std::env::var_os(variable).is_none() {
        // SAFETY: called first thing in `main`, before any other thread exists that could read the environment.
        unsafe { std::env::set_var(variable, value) };
    }
}

//! `lowp train`: trains the baseline and the chosen recipes, then tells how they compare.

mod args;
mod config;
mod corpus;
mod json;
mod progress;
mod recipes;
mod report;
mod result;
mod run;
mod svg;
mod table;
mod variant;

pub(crate) use args::Args;

use crate::files::write_atomically;
use anyhow::Result;
use config::Config;
use corpus::Corpus;
use progress::Progress;
use recipes::Run;
use result::RunResult;

/// Runs the command.
///
/// # Errors
/// Bad arguments, unreadable data, a failing rank, or a result file that cannot be written.
pub(crate) fn main(args: Args) -> Result<()> {
    let config = Config::new(&args)?;
    let corpus = Corpus::load(args.data.as_deref(), config.model.seq)?;
    let mut runs = Vec::new();
    for run in &config.runs {
        runs.push(train(run, &config, &corpus)?);
    }
    print!("{}", table::render(&runs));
    if let Some(path) = &args.json {
        write_atomically(path, &json::render(&config, &runs)?)?;
    }
    if let Some(path) = &args.report {
        write_atomically(path, &report::render(&config, &runs)?)?;
    }
    Ok(())
}

fn train(run: &Run, config: &Config, corpus: &Corpus) -> Result<RunResult> {
    let progress = Progress::new(&run.name, config.steps);
    let result = run::run(run, config, corpus, &progress)?;
    progress.finish();
    Ok(result)
}

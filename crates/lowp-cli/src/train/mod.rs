//! `lowp train`: trains the baseline and the chosen recipes, then tells how they compare.

mod args;
mod config;
mod corpus;
mod engine;
mod exchange;
mod json;
mod plain;
mod progress;
mod recipes;
mod report;
mod result;
mod run;
mod schedule;
mod svg;
mod table;

pub(crate) use args::Args;

use crate::files::write_atomically;
use anyhow::Result;
use config::Config;
use corpus::Corpus;
use exchange::Exchange;
use plain::Plain;
use progress::Progress;
use result::RunResult;

/// Runs the command.
///
/// # Errors
/// Bad arguments, unreadable data, a failing rank, or a result file that cannot be written.
pub(crate) fn main(args: Args) -> Result<()> {
    let config = Config::new(&args)?;
    let corpus = Corpus::load(args.data.as_deref(), config.model.seq)?;
    let mut runs = Vec::new();
    for name in &config.runs {
        runs.push(train(name, &config, &corpus)?);
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

fn train(name: &str, config: &Config, corpus: &Corpus) -> Result<RunResult> {
    let progress = Progress::new(name, config.steps);
    let connect = Exchange::group(config.mesh.ranks())
        .into_iter()
        .map(|exchange| move || Ok(Plain::new(config, exchange)))
        .collect();
    let result = run::run(name, config, corpus, connect, &progress)?;
    progress.finish();
    Ok(result)
}

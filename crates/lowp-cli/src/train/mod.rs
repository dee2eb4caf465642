//! `lowp train`: trains the baseline and the chosen recipes, then tells how they compare.

mod args;
mod checkpoints;
mod config;
mod corpus;
#[cfg(feature = "cuda")]
mod gpu;
mod json;
mod memory;
mod model;
mod network;
mod progress;
mod rank;
mod recipes;
mod record;
mod reference;
mod report;
mod result;
mod run;
mod shapes;
pub(crate) mod svg;
mod table;
mod world;

pub(crate) use args::{Args, DEFAULT_RECIPE, ShardingName, SizeArgs};
pub(crate) use config::{
    check_heads, check_model, check_ranges, check_sharding, grad_wire, reshard,
};
pub(crate) use model::{GptConfig, Preset};
pub(crate) use recipes::Run;
pub(crate) use shapes::{cause, check_layer};

use crate::files::{check_distinct, check_writable, write_atomically};
use crate::output;
use crate::usage::UsageError;
use anyhow::{Context, Result};
use checkpoints::Resumed;
use config::Config;
use corpus::Corpus;
use progress::Progress;
use result::{RunResult, summaries};
use std::path::Path;
use world::World;

/// Runs the command.
///
/// # Errors
/// Bad arguments, unreadable data and result files that cannot be written, all before training; a failing rank; byte
/// counts that are not what the plans say; a loss that is not finite.
pub(crate) fn main(args: &Args) -> Result<()> {
    if args.list {
        return output::print(&crate::recipes::table()?);
    }
    let world = World::find(args.timeout)?;
    world.end(train(args, &world))
}

fn train(args: &Args, world: &World) -> Result<()> {
    let config = Config::new(args, world.started())?;
    #[cfg(not(feature = "cuda"))]
    if let crate::device::Device::Cuda(_) = config.device {
        return crate::device::without_cuda();
    }
    check_distinct(
        args.data.as_deref().map(|path| ("--data", path)),
        args.outputs()
            .chain(args.save.as_deref().map(|path| ("--save", path))),
    )?;
    let saved = args.save.as_deref().map(|path| ("--save", path));
    for (option, path) in args.outputs().chain(saved) {
        if let Some(data) = args.data.as_deref().filter(|data| lies_below(path, data)) {
            let (path, data) = (path.display(), data.display());
            return Err(UsageError::new(format!(
                "{option} {path} lies in --data {data}, so that what is written would become a part of the text; name another folder"
            ))
            .into());
        }
    }
    let corpus = Corpus::load(args.data.as_deref(), config.model.seq)?;
    for (option, path) in args.outputs().filter(|_| world.reports()) {
        check_writable(option, path)?;
    }
    config.checkpoints.check(&config)?;
    if world.reports() {
        config.checkpoints.check_writable(&config)?;
    }
    for config in config.each_seed() {
        for run in &config.runs {
            let found = Resumed::find(&config, run, &corpus)?;
            if found.is_none() && args.resume.is_some() && world.reports() {
                let (name, seed) = (&run.name, config.seed);
                output::note(&format!(
                    "{name} seed {seed}: no checkpoint to go on behind; it begins anew"
                ));
            }
        }
    }
    world.agree(&config, &corpus)?;
    let total = config.seeds * config.runs.len();
    let mut runs = Vec::new();
    let trained = train_all(&config, &corpus, world, &mut runs);
    let finished = runs.len();
    // What is finished is worth having, whatever happened to the rest.
    let reported = if runs.is_empty() || !world.reports() {
        Ok(())
    } else {
        report(args, &config, &runs)
    };
    trained.with_context(|| format!("{finished} of {total} runs finished"))?;
    reported?;
    runs.iter().try_for_each(RunResult::check_wire)?;
    runs.iter().try_for_each(RunResult::check_finite)
}

/// Whether `path`, which need not be there, lies in the folder `folder`.
fn lies_below(path: &Path, folder: &Path) -> bool {
    let Ok(folder) = folder.canonicalize() else {
        return false;
    };
    let there = path.ancestors().find_map(|above| {
        let above = if above.as_os_str().is_empty() {
            Path::new(".")
        } else {
            above
        };
        above.canonicalize().ok()
    });
    folder.is_dir() && there.is_some_and(|there| there.starts_with(&folder))
}

fn train_all(
    config: &Config,
    corpus: &Corpus,
    world: &World,
    runs: &mut Vec<RunResult>,
) -> Result<()> {
    let label = |name: &str, seed: u64| match config.seeds {
        1 => name.to_owned(),
        _ => format!("{name} seed {seed}"),
    };
    let labels = config
        .runs
        .iter()
        .map(|run| label(&run.name, config.last_seed()));
    let width = labels.map(|text| text.chars().count()).max().unwrap_or(0);
    for config in config.each_seed() {
        for run in &config.runs {
            let label = format!("{:width$}", label(&run.name, config.seed));
            // Only rank 0 reports.
            let progress = world.reports().then(|| Progress::new(&label, config.steps));
            let place = (world, progress.as_ref());
            runs.push(run::run(run, &config, corpus, place)?);
            if let Some(progress) = progress {
                progress.finish();
            }
        }
    }
    Ok(())
}

/// The table, and the files asked for. A file that cannot be written does not keep the other from being written.
fn report(args: &Args, config: &Config, runs: &[RunResult]) -> Result<()> {
    let summaries = summaries(runs);
    let printed = output::print(&table::render(config, &summaries));
    let json = args.json.as_ref().map_or(Ok(()), |path| {
        write_atomically(path, &json::render(config, runs)?)
    });
    let page = args.report.as_ref().map_or(Ok(()), |path| {
        write_atomically(path, &report::render(config, &summaries)?)
    });
    printed.and(json).and(page)
}

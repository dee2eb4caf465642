//! `lowp train`: trains the baseline and the chosen recipes by [`lowp_train::Training`], then prints how they compare.

mod args;
mod checks;
mod config;
mod config_file;
mod data;
mod dependent;
mod folder;
#[cfg(feature = "cuda")]
mod gpu;
mod json;
mod layers;
mod optimizer;
mod options;
mod outputs;
mod planned;
mod progress;
mod recipes;
mod report;
mod run;
mod sizes;
mod source;
mod table;
mod world;

pub(crate) use args::{Args, DEFAULT_BATCH, DEFAULT_RECIPE};
pub(crate) use checks::{check_ranges, check_tokens, sequences_at_once};
pub(crate) use config::reshard;
pub(crate) use config_file::expand;
pub(crate) use sizes::{Preset, SizeArgs};

use crate::device::Device;
use crate::files::{check_writable, write_atomically};
use crate::output;
use crate::usage::UsageError;
use anyhow::{Context, Result, anyhow};
use config::Setup;
use lowp_train::result::RunResult;
use lowp_train::summary::summaries;
use lowp_train::{TrainError, Training};
use options::failed;
use progress::Progress;
use source::Batches;
use std::fs::File;
use std::sync::Arc;
use world::World;

/// See data/README.md for source and licence.
static BUNDLED: &[u8] = include_bytes!("../../data/moby-dick.txt");

pub(crate) fn main(args: &Args) -> Result<()> {
    let world = World::find(args.timeout)?;
    #[cfg(unix)]
    if args.save.is_some() && world.reports() {
        crate::signals::listen()?;
    }
    world.end(train(args, &world))
}

fn train(args: &Args, world: &World) -> Result<()> {
    let (setup, text, page_locked) = world.all_ok(check(args, world))?;
    world.agree(args, &setup, &*text)?;
    if let Some(note) = page_locked.filter(|_| world.reports()) {
        output::note(&note);
    }
    // Held until the last run ends: another command does not log there meanwhile.
    let _locks = world.all_ok(match world.reports() {
        true => take_folders(args, &setup, &*text),
        false => Ok(Vec::new()),
    })?;
    let total = setup.config.seeds * setup.runs.len();
    let mut results = Vec::new();
    let trained = train_all(args, &setup, &*text, world, &mut results);
    let finished = results.len();
    // What is finished is worth having, whatever happened to the rest.
    let reported = if results.is_empty() || !world.reports() {
        Ok(())
    } else {
        report(args, &setup, &results, &*text)
    };
    // Where some are, the arguments can work.
    let trained = trained.map_err(|error| match finished {
        0 => error,
        _ => anyhow!("{error:#}"),
    });
    trained.with_context(|| format!("{finished} of {total} runs finished"))?;
    reported?;
    let sound = results.iter().try_for_each(RunResult::check_wire);
    let sound = sound.and_then(|()| results.iter().try_for_each(RunResult::check_finite));
    let sound = sound.and_then(|()| results.iter().try_for_each(RunResult::check_trained));
    sound.map_err(failed)
}

/// What is asked for, what it is trained on, and what to know of page-locked memory: all that can be found to be wrong before the work begins.
fn check(args: &Args, world: &World) -> Result<(Setup, Arc<Batches>, Option<String>)> {
    let setup = Setup::new(args, world.launch())?;
    if let Device::Cuda(_) = setup.device {
        #[cfg(feature = "cuda")]
        gpu::check(&setup)?;
        #[cfg(not(feature = "cuda"))]
        return crate::device::without_cuda();
    }
    let here = world.numbers_here(setup.config.mesh.world());
    let page_locked = planned::page_locked(args, &setup, here)?;
    outputs::check_distinct_from_inputs(args)?;
    outputs::check_run_folders(args, &setup)?;
    let text = source::open(args, &setup, BUNDLED)?;
    if world.reports() {
        for (option, path) in args.outputs() {
            check_writable(option, path)?;
        }
        check_resume(args, &setup)?;
    }
    for (run, config) in setup.each() {
        let training = Training {
            checkpoints: setup.checkpoints.clone(),
            ..Training::new(run, &config, &*text)
        };
        if !world.reports() {
            training.check_config().map_err(failed)?;
            continue;
        }
        let found = training.check();
        // Checkpoints that another run is saving are no earlier ones.
        let writable = setup.checkpoints.check_writable(run, config.seed);
        writable.map_err(failed)?;
        let found = found.map_err(failed)?;
        if let Some(folder) = &args.log_dir {
            training.check_log(folder, found).map_err(of_log)?;
        }
        if found.is_none() && args.resume.is_some() {
            let (name, seed) = (&run.name, config.seed);
            output::note(&format!(
                "{name} seed {seed}: no checkpoint to resume from; the run starts at step 0"
            ));
        }
    }
    Ok((setup, text, page_locked))
}

/// Locks the folders of logs, and copies what exports carry along to those of checkpoints.
fn take_folders(args: &Args, setup: &Setup, text: &Batches) -> Result<Vec<Option<File>>> {
    let mut locks = Vec::new();
    for (run, config) in setup.each() {
        if let Some(folder) = &args.log_dir {
            let training = Training::new(run, &config, text);
            locks.push(training.lock_log(folder).map_err(of_log)?);
        }
        let run = setup.checkpoints.folder_of(run, config.seed);
        if let Some((folder, run)) = setup.folder.as_ref().zip(run) {
            folder.carry(&run)?;
        }
    }
    Ok(locks)
}

/// The error of a folder of logs.
fn of_log(error: TrainError) -> anyhow::Error {
    failed(error).context("--log-dir")
}

/// Checks that `--resume` has something for the runs: checkpoints of some of them, or one checkpoint for one run.
fn check_resume(args: &Args, setup: &Setup) -> Result<(), UsageError> {
    let Some(folder) = &args.resume else {
        return Ok(());
    };
    if args.resumes_latest() {
        return match args.save {
            Some(_) => Ok(()),
            None => Err(UsageError::new(
                "--resume latest resumes from the folder of --save; give --save DIR, or --resume ./latest for a folder of this name",
            )),
        };
    }
    let (name, runs) = (folder.display(), setup.runs.len() * setup.config.seeds);
    if setup.checkpoints.resumes_one_run() {
        return match runs {
            1 => Ok(()),
            _ => Err(UsageError::new(format!(
                "--resume {name} is the checkpoint of one run, but {runs} would resume from it, including the baseline if it is trained; \
                 give one --recipe and one seed with --no-baseline"
            ))),
        };
    }
    let seeds = setup.config.seed..=setup.config.last_seed();
    Ok(setup.checkpoints.check_source(&setup.runs, seeds)?)
}

fn train_all(
    args: &Args,
    setup: &Setup,
    text: &Batches,
    world: &World,
    results: &mut Vec<RunResult>,
) -> Result<()> {
    let label = |name: &str, seed: u64| match setup.config.seeds {
        1 => name.to_owned(),
        _ => format!("{name} seed {seed}"),
    };
    let labels = setup
        .runs
        .iter()
        .map(|run| label(&run.name, setup.config.last_seed()));
    let width = labels.map(|text| text.chars().count()).max().unwrap_or(0);
    // A run without a log is worth having, too.
    let mut unlogged = None;
    for (run, config) in setup.each() {
        let label = format!("{:width$}", label(&run.name, config.seed));
        // Only rank 0 reports.
        let progress = world.reports().then(|| Progress::new(&label, config.steps));
        let shown = progress.as_ref();
        let (result, closed) = run::run(run, &config, args, setup, text, world, shown)?;
        results.push(result);
        unlogged = unlogged.or(closed);
        if let Some(progress) = progress {
            progress.finish();
        }
    }
    unlogged.map_or(Ok(()), |error| Err(failed(error)))
}

/// The table, and the files asked for. A file that cannot be written does not keep the other
/// from being written.
fn report(args: &Args, setup: &Setup, runs: &[RunResult], text: &Batches) -> Result<()> {
    let (summaries, unit) = (summaries(runs), text.unit());
    let printed = output::print(&table::render(setup, &summaries));
    let json = args.json.as_ref().map_or(Ok(()), |path| {
        write_atomically(path, &json::render(args, setup, runs, text)?)
    });
    let page = args.report.as_ref().map_or(Ok(()), |path| {
        write_atomically(path, &report::render(setup, &summaries, unit)?)
    });
    printed.and(json).and(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundled_text_is_clean_and_long_enough() {
        assert!(BUNDLED.len() > 1_000_000);
        assert!(
            BUNDLED
                .iter()
                .all(|&b| b == b'\n' || (32..127).contains(&b))
        );
    }
}

//! A run: one recipe on all ranks, which are threads or processes ([`Training::rank`]).

use super::args::Args;
use super::config::Setup;
use super::options::{failed, named};
use super::progress::Progress;
use super::source::Batches;
use super::world::World;
use crate::columns::Columns;
use crate::device::Device;
use crate::output;
use anyhow::{Context, Result};
use lowp_candle::transformer::Transformer;
use lowp_comm::{Communicator, HostComm, LocalComm, run_comms};
use lowp_fsdp::FirstValues;
use lowp_kernels::{Backend, Cpu};
use lowp_train::network::{Profile, ProfileEntry};
use lowp_train::result::{Evaluation, RunResult};
use lowp_train::training::{Event, threads_per_rank};
use lowp_train::{Config, HubValues, Pretrained, Run, RunLog, TrainError, Training};
use lowp_transformer::GptConfig;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Trains one recipe on all ranks. Beside its result is what closed its log.
pub(crate) fn run(
    run: &Run,
    config: &Config<GptConfig>,
    args: &Args,
    setup: &Setup,
    text: &Batches,
    world: &World,
    progress: Option<&Progress>,
) -> Result<(RunResult, Option<TrainError>)> {
    let ranks = config.mesh.world();
    let log = Mutex::new(None);
    let run_only = Training {
        checkpoints: setup.checkpoints.clone(),
        ..Training::new(run, config, text)
    };
    let watch = |event: Event<'_>| {
        if let Some(progress) = progress {
            match (&args.log_dir, event) {
                (Some(folder), Event::Begun(resumed)) => {
                    let opened = run_only.log(folder, resumed);
                    *locked(&log) = Some(opened.inspect_err(|error| output::note(&error.chain())));
                }
                _ => logged(event, &log),
            }
            follow(event, args, run, progress);
        }
    };
    let folder = setup.folder.as_deref();
    let hub = folder.and_then(|folder| folder.hub.as_ref());
    let values = hub.map(lowp_file::Values::new).transpose()?.map(HubValues);
    let first = values
        .as_ref()
        .map(|values| values as &(dyn FirstValues + Sync));
    let training = Training {
        pretrained: Pretrained {
            values: first,
            config: folder.map(|folder| &folder.json),
        },
        checkpoints: setup.checkpoints.clone(),
        audit: !args.no_audit,
        threads: threads_per_rank(world.ranks_here(ranks)),
        peak_flops: args.peak_tflops.map(|peak| peak * 1e12),
        codes_every: args.log_codes,
        watch: &watch,
        ..Training::new(run, config, text)
    };
    let on_cpu = |cpu: &Cpu, comm: Arc<dyn Communicator<Cpu>>| {
        training.rank(cpu, comm, |sharded, place| {
            let (model, recompute) = (config.model, config.recompute);
            let transformer = Transformer::new(model, sharded, place.threads, recompute)?;
            Ok(transformer.with_z_loss(config.z_loss))
        })
    };
    #[cfg(feature = "cuda")]
    let on_gpu = |cuda: &lowp_kernels::Cuda, comm: super::gpu::Comm| {
        let name = cuda.name().unwrap_or_default();
        let training = Training {
            peak_flops: training.peak_flops.or(lowp_train::peak::known(&name)),
            checkpoints: training.checkpoints.clone(),
            ..training
        };
        training.rank(cuda, comm, |sharded, place| {
            Ok(super::gpu::network(cuda, sharded, args, config, place)?)
        })
    };
    let trained = match (setup.device, world.rank()?) {
        (Device::Cpu, Some((control, _))) if ranks > 1 => {
            let comm = HostComm::new(control, &Cpu);
            let trained = on_cpu(&Cpu, comm.into()).map_err(failed);
            trained.with_context(|| run.name.clone())
        }
        // A single rank holds the same, whoever started it.
        (Device::Cpu, _) => {
            let backends = vec![Cpu; ranks];
            let comms = LocalComm::world_on(&backends, world.limit);
            let comms = comms.into_iter().map(Into::into).collect();
            threads(&backends, comms, run, on_cpu)
        }
        #[cfg(feature = "cuda")]
        (Device::Cuda(first), Some((control, local))) => {
            let (cuda, comm) = super::gpu::process(control, first, local, world.limit)?;
            let trained = on_gpu(&cuda, comm).map_err(failed);
            trained.with_context(|| run.name.clone())
        }
        #[cfg(feature = "cuda")]
        (Device::Cuda(first), None) => {
            let (devices, comms) = super::gpu::world(first, ranks, world.limit)?;
            threads(&devices, comms, run, on_gpu)
        }
        #[cfg(not(feature = "cuda"))]
        (Device::Cuda(_), _) => crate::device::without_cuda(),
    };
    let result = trained?;
    let closed = locked(&log).take().and_then(Result::err);
    Ok((result, closed))
}

/// The open log, or the error that closed it.
type Log = Option<Result<RunLog, TrainError>>;

/// A thread that panicked left it as it was.
fn locked(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds an event to the log.
fn logged(event: Event<'_>, log: &Mutex<Log>) {
    let mut log = locked(log);
    let Some(Ok(files)) = &mut *log else {
        return;
    };
    let written = match event {
        Event::Step { metrics, .. } => files.step(metrics),
        Event::Evaluation(evaluation) => files.evaluation(evaluation),
        Event::Saved(step) => files.saved(step),
        Event::Codes { step, layers } => files.codes(step, layers),
        _ => Ok(()),
    };
    if let Err(error) = written {
        // Training continues; the command fails when all runs are done.
        output::note(&error.to_string());
        *log = Some(Err(error));
    }
}

/// Threads of this process are the ranks.
fn threads<B: Backend>(
    backends: &[B],
    comms: Vec<Arc<dyn Communicator<B>>>,
    run: &Run,
    rank: impl Fn(&B, Arc<dyn Communicator<B>>) -> Result<RunResult, TrainError> + Sync,
) -> Result<RunResult> {
    let ranks = backends.len();
    let trained = run_comms(comms, |number, comm| rank(&backends[number], comm));
    let mut results = trained.map_err(|e| {
        let place = format!("{}, rank {} of {ranks}", run.name, e.rank);
        failed(e.cause).context(place)
    })?;
    results.pop().context("a world of no ranks")
}

/// Prints what becomes of a run.
fn follow(event: Event<'_>, args: &Args, run: &Run, progress: &Progress) {
    match event {
        Event::Step {
            metrics,
            tokens_per_second,
            flops_per_second,
        } => progress.step(
            metrics.step,
            metrics.loss,
            tokens_per_second,
            flops_per_second,
        ),
        // The loss after the last step is in the table.
        Event::Evaluation(Evaluation { step, loss }) if args.eval_every.is_some() => {
            progress.evaluation(step, loss);
        }
        Event::Profile(profile) if args.profile => {
            // Where it cannot be written, the table at the end cannot either, and says so.
            let _ = output::print(&table(profile));
        }
        event => {
            if let Some(note) = event.note() {
                output::note(&format!("{}: {}", run.name, named(&note)));
            }
        }
    }
}

/// What the GPU spent the last step on.
fn table(profile: &Profile) -> String {
    let all: f64 = profile.spent.iter().map(|spent| spent.milliseconds).sum();
    let mut table = Columns::new(&["work", "times", "ms", "%"], &[0]);
    for ProfileEntry {
        what,
        count,
        milliseconds,
    } in &profile.spent
    {
        let share = 100.0 * milliseconds / all;
        table.row([
            what.clone(),
            count.to_string(),
            format!("{milliseconds:.3}"),
            format!("{share:.1}"),
        ]);
    }
    let [none, all] = [String::new(), format!("{all:.3}")];
    table.row(["all".to_owned(), none.clone(), all, none]);
    table.render()
}

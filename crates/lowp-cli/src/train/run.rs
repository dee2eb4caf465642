//! A run: one recipe, trained on all ranks, which are threads or processes.

use super::config::Config;
use super::corpus::Corpus;
use super::network::{Candle, Network};
use super::progress::Progress;
use super::rank::{Outcome, Part, Rank};
use super::recipes::Run;
use super::result::RunResult;
use super::world::World;
use crate::device::Device;
use anyhow::{Context, Result, anyhow, bail};
use lowp_comm::{Communicator, HostComm, LocalComm, run_comms};
use lowp_kernels::{Backend, Cpu};
use std::sync::Arc;
use std::thread;

/// Trains one recipe on all ranks.
///
/// # Errors
/// What the first failing rank reports.
pub(crate) fn run(
    run: &Run,
    config: &Config,
    corpus: &Corpus,
    (world, progress): (&World, Option<&Progress>),
) -> Result<RunResult> {
    let ranks = config.mesh.world();
    let work = Work {
        run,
        config,
        corpus,
        progress,
        threads: threads_per_rank(world.ranks_here(ranks)),
    };
    let outcomes = match (config.device, world.rank()?) {
        (Device::Cpu, Some((control, _))) => work.process::<_, Candle>(&Cpu, {
            let comm: Arc<dyn Communicator<Cpu>> = HostComm::new(control, &Cpu).into();
            comm
        })?,
        (Device::Cpu, None) => {
            let backends = vec![Cpu; ranks];
            let comms = LocalComm::world_on(&backends, world.limit);
            work.threads::<_, Candle>(&backends, comms.into_iter().map(Into::into).collect())?
        }
        #[cfg(feature = "cuda")]
        (Device::Cuda(first), Some((control, local))) => {
            let (cuda, comm) = super::gpu::process(control, (first, local), world.limit)?;
            work.process::<_, super::gpu::Gpu>(&cuda, comm)?
        }
        #[cfg(feature = "cuda")]
        (Device::Cuda(first), None) => {
            let (devices, comms) = super::gpu::world(first, ranks, world.limit)?;
            work.threads::<_, super::gpu::Gpu>(&devices, comms)?
        }
        #[cfg(not(feature = "cuda"))]
        (Device::Cuda(_), _) => crate::device::without_cuda()?,
    };
    let first = outcomes.first().context("a world of no ranks")?;
    // Every replica sends and stores the same.
    let replicas = config.mesh.replicate as u64;
    let total = |part: usize, f: fn(&Part) -> u64| {
        let of = |outcome: &Outcome| f(&outcome.parts[part]);
        outcomes.iter().map(of).sum::<u64>() / replicas
    };
    let mut wire = Vec::new();
    for (number, part) in first.parts.iter().enumerate() {
        let (sent, steps) = (total(number, |part| part.sent), part.steps as u64);
        if steps > 0 && !sent.is_multiple_of(steps) {
            bail!(
                "{}: {sent} bytes in {steps} steps: the steps sent unequal amounts",
                run.name
            );
        }
        let formula = total(number, |part| part.sent_per_step);
        wire.push([sent.checked_div(steps).unwrap_or(formula), formula]);
    }
    // The steps of the tail stand beside those before it, unless there are no others.
    let of = |tail: bool| {
        first
            .parts
            .iter()
            .position(|part| part.tail == tail && part.steps > 0)
    };
    let main = of(false).or(of(true)).unwrap_or(0);
    let tail = of(true).filter(|tail| *tail != main);
    let peak = (0..wire.len()).map(|part| total(part, |part| part.peak));
    let steps: usize = first.parts.iter().map(|part| part.steps).sum();
    let tokens = (steps * config.batch * config.model.seq) as f64;
    let linears = config.model.linears();
    let per_step = |seconds: f64| seconds / steps.max(1) as f64;
    let per_second = |amount: f64| {
        if steps > 0 {
            amount / first.seconds
        } else {
            0.0
        }
    };
    Ok(RunResult {
        recipe: run.name.clone(),
        seed: config.seed,
        ranks,
        steps: first.train_loss.len(),
        resumed_at: first.resumed_at,
        train_loss: first.train_loss.clone(),
        val_loss: first.val_loss,
        wire_bytes_per_step: wire[main][0],
        wire_bytes_formula: wire[main][1],
        wire_bytes_tail: tail.map(|tail| wire[tail]),
        resident_weight_bytes: total(main, |part| part.resident),
        master_weight_bytes: total(main, |part| part.masters),
        peak_weight_bytes: peak.max().unwrap_or(0),
        parameters: linears.iter().map(|l| l.rows * l.cols).sum(),
        model_parameters: config.model.parameters(),
        skipped_steps: first.skipped,
        seconds_per_step: per_step(first.seconds),
        tokens_per_second: per_second(tokens),
        flops_per_second: per_second(tokens * config.model.flops_per_token()),
        parameter_bytes_per_rank: outcomes.iter().map(|o| o.memory).max().unwrap_or(0),
        device_bytes_per_rank: outcomes.iter().filter_map(|o| o.device).reduce(|a, b| {
            let [counted, measured] = [0, 1].map(|at| a[at].max(b[at]));
            [counted, measured]
        }),
        gather_seconds_exposed: first.waited.unwrap_or(per_step(first.gathering)),
        gather_seconds: first.gathered.map(|[all, _]| all),
        gather_seconds_hidden: match first.waited {
            Some(_) => first.gathered.map(|[_, hidden]| hidden),
            None => Some(0.0),
        },
    })
}

/// What every rank does.
struct Work<'a> {
    run: &'a Run,
    config: &'a Config,
    corpus: &'a Corpus,
    progress: Option<&'a Progress>,
    threads: usize,
}

impl Work<'_> {
    /// One rank of it.
    fn rank<B: Backend, N: Network<B>>(
        &self,
        backend: &B,
        rank: usize,
        comm: Arc<dyn Communicator<B>>,
    ) -> Result<Outcome> {
        let rank = Rank {
            backend,
            rank,
            config: self.config,
            corpus: self.corpus,
            progress: self.progress.filter(|_| rank == 0),
            threads: self.threads,
        };
        rank.train::<N>(self.run, comm)
    }

    /// This process is a rank; what all did.
    fn process<B: Backend, N: Network<B>>(
        &self,
        backend: &B,
        comm: Arc<dyn Communicator<B>>,
    ) -> Result<Vec<Outcome>> {
        let own = self.rank::<B, N>(backend, comm.rank(), Arc::clone(&comm));
        Outcome::of_all(&own.with_context(|| self.run.name.clone())?, comm.control())
    }

    /// Threads of this process are the ranks.
    fn threads<B: Backend, N: Network<B>>(
        &self,
        backends: &[B],
        comms: Vec<Arc<dyn Communicator<B>>>,
    ) -> Result<Vec<Outcome>> {
        let ranks = backends.len();
        run_comms(comms, |rank, comm| {
            self.rank::<B, N>(&backends[rank], rank, comm)
        })
        .map_err(|e| {
            let place = format!("{}, rank {} of {ranks}", self.run.name, e.rank);
            anyhow!("{:#}", e.cause).context(place)
        })
    }
}

/// Threads that the products of one rank may use, so that all ranks together use the machine once.
fn threads_per_rank(ranks: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    (cores / ranks).max(1)
}

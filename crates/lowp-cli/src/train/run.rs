//! The training loop of one recipe: ranks as threads or processes, each with its share of every batch.

use super::config::Config;
use super::corpus::{Corpus, share};
use super::model::Gpt;
use super::progress::Progress;
use super::recipes::Run;
use super::result::RunResult;
use super::variant::Variant;
use super::world::World;
use anyhow::{Context, Result, anyhow, bail};
use lowp_candle::{LinearSpec, ModelOptions, ShardedModel, WeightBytes};
use lowp_kernels::Cpu;
use lowp_optim::StepOptions;
use lowp_shard::{Communicator, Control, GradBucketOptions, MeshComm, run_ranks};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

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
    let threads = threads_per_rank(world.ranks_here(ranks));
    let train = |rank, comm| {
        Rank {
            rank,
            config,
            corpus,
            progress: progress.filter(|_| rank == 0),
            threads,
        }
        .train(run.recipe, comm)
    };
    let outcomes = match world.rank()? {
        Some((rank, comm)) => {
            let own = train(rank, Arc::clone(&comm)).with_context(|| run.name.clone())?;
            Outcome::of_all(&own, comm.control())?
        }
        None => run_ranks(&Cpu, ranks, world.limit, train).map_err(|e| {
            anyhow!("{:#}", e.cause).context(format!("{}, rank {} of {ranks}", run.name, e.rank))
        })?,
    };
    let linears = config.model.linears();
    let tokens = (config.steps * config.batch * config.model.seq) as f64;
    let first = outcomes.first().context("a world of no ranks")?;
    // Every replica sends and stores the same.
    let replicas = config.mesh.replicate as u64;
    let total = |part: usize, f: fn(&Bytes) -> u64| {
        let of = |outcome: &Outcome| f(&outcome.bytes[part].1);
        outcomes.iter().map(of).sum::<u64>() / replicas
    };
    let mut wire = Vec::new();
    for (part, (steps, _)) in first.bytes.iter().enumerate() {
        let (sent, steps) = (total(part, |bytes| bytes.sent), *steps as u64);
        if steps > 0 && !sent.is_multiple_of(steps) {
            bail!(
                "{}: {sent} bytes in {steps} steps: the steps sent unequal amounts",
                run.name
            );
        }
        let formula = total(part, |bytes| bytes.sent_per_step);
        wire.push([sent.checked_div(steps).unwrap_or(formula), formula]);
    }
    // A tail that is all of the run has the bytes of the run.
    let main = usize::from(config.tail_steps == config.steps);
    let peak = (0..wire.len()).map(|part| total(part, |bytes| bytes.peak));
    let peak = peak.max().unwrap_or(0);
    Ok(RunResult {
        recipe: run.name.clone(),
        seed: config.seed,
        ranks,
        steps: config.steps,
        train_loss: first.train_loss.clone(),
        val_loss: first.val_loss,
        wire_bytes_per_step: wire[main][0],
        wire_bytes_formula: wire[main][1],
        wire_bytes_tail: (wire.len() > 1).then(|| wire[1]),
        resident_weight_bytes: total(main, |bytes| bytes.resident),
        master_weight_bytes: total(main, |bytes| bytes.masters),
        peak_weight_bytes: peak,
        parameters: linears.iter().map(|l| l.rows * l.cols).sum(),
        model_parameters: config.model.parameters(),
        skipped_steps: first.skipped,
        seconds_per_step: first.seconds / config.steps as f64,
        tokens_per_second: tokens / first.seconds,
        flops_per_second: tokens * config.model.flops_per_token() / first.seconds,
        parameter_bytes_per_rank: outcomes.iter().map(|o| o.memory).max().unwrap_or(0),
        gather_seconds_exposed: first.gathering / config.steps as f64,
        gather_seconds_hidden: 0.0,
    })
}

/// Threads that the products of one rank may use, so that all ranks together use the machine once.
fn threads_per_rank(ranks: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    (cores / ranks).max(1)
}

/// What training left on one rank.
#[derive(Serialize, Deserialize)]
struct Outcome {
    train_loss: Vec<f32>,
    val_loss: f64,
    /// Of this rank's weights, after the steps of the recipe and after those of the tail: the number of steps, and the bytes.
    bytes: Vec<(usize, Bytes)>,
    skipped: u64,
    seconds: f64,
    /// Seconds in which it waited for gathered weights.
    gathering: f64,
    /// Bytes of parameters that it held.
    memory: u64,
}

/// [`WeightBytes`], as it travels.
#[derive(Serialize, Deserialize)]
struct Bytes {
    sent: u64,
    sent_per_step: u64,
    resident: u64,
    masters: u64,
    peak: u64,
}

impl From<WeightBytes> for Bytes {
    fn from(bytes: WeightBytes) -> Self {
        let WeightBytes {
            sent,
            sent_per_step,
            resident,
            masters,
            peak,
        } = bytes;
        Self {
            sent,
            sent_per_step,
            resident,
            masters,
            peak,
        }
    }
}

impl Outcome {
    /// Those of all ranks, of which this one has its own.
    fn of_all(own: &Self, control: &dyn Control) -> Result<Vec<Self>> {
        let all = control.exchange("what training left", postcard::to_stdvec(own)?)?;
        all.iter()
            .map(|bytes| Ok(postcard::from_bytes(bytes)?))
            .collect()
    }
}

/// Bytes of small gradients that travel together: on a CPU nothing overlaps, so memory counts.
pub(crate) const GRAD_BUCKET: usize = 1 << 16;

struct Rank<'a> {
    rank: usize,
    config: &'a Config,
    corpus: &'a Corpus,
    progress: Option<&'a Progress>,
    /// Threads that its products may use.
    threads: usize,
}

impl Rank<'_> {
    fn train(&self, recipe: Variant, comm: Arc<dyn Communicator<Cpu>>) -> Result<Outcome> {
        let config = self.config;
        let (ranks, threads) = (config.mesh.world(), self.threads);
        let mesh = MeshComm::new(config.mesh, comm.clone())?;
        let options = ModelOptions {
            sharding: config.sharding,
            reshard_after_forward: config.reshard_after_forward,
            grads: GradBucketOptions {
                wire: config.grad_wire,
                bytes: GRAD_BUCKET,
                ..GradBucketOptions::default()
            },
            seed: config.seed,
            group: config.group,
            threads,
        };
        let (linears, vars) = (config.model.linears(), config.model.vars());
        let backend = Cpu;
        let of = |linear: &LinearSpec| match config.kept_in_bf16.contains(&linear.name) {
            true => recipe.in_bf16(),
            false => recipe.of_block(linear.block, config.model.layers),
        };
        let mut sharded = ShardedModel::new(&backend, &mesh, of, &linears, &vars, options)?;
        let over = |sharded: &ShardedModel<Cpu, Variant>| {
            let (layers, vars) = (sharded.layers(), sharded.vars().to_vec());
            Gpt::new(config.model, layers, vars, (threads, config.recompute))
        };
        let mut model = over(&sharded)?;
        let (mut gathering, mut memory) = (Duration::ZERO, 0);
        let main_steps = config.steps - config.tail_steps;
        let mut bytes = Vec::new();
        let mine = share(config.batch, ranks, self.rank);
        let first_token = |sequences: &Range<usize>| (sequences.start * config.model.seq) as u64;
        let tokens = config.batch * config.model.seq;
        let mut train_loss = Vec::with_capacity(config.steps);
        let start = Instant::now();
        for step in 0..config.steps {
            if config.tail_steps > 0 && step == main_steps {
                bytes.push((main_steps, sharded.weight_bytes(config.passes())?.into()));
                gathering += sharded.gathering()?;
                memory = sharded.parameter_bytes()?;
                // The layers hold weights.
                drop(model);
                let tail = |linear: &LinearSpec| of(linear).with_bf16_forward();
                sharded = sharded.in_recipes(tail, &linears, &vars)?;
                model = over(&sharded)?;
            }
            let mut loss = 0.0;
            for micro in 0..config.accumulate {
                let part = share(mine.len(), config.accumulate, micro);
                let part = mine.start + part.start..mine.start + part.end;
                sharded.begin(step as u64, first_token(&part), true)?;
                let batch = self.corpus.train(config.seed, step, part);
                let own = model.loss(&batch, tokens)?;
                sharded.add_gradients(&own.backward()?)?;
                loss += f64::from(own.value()?);
            }
            let options = StepOptions {
                lr_factor: config.schedule.factor(step as u64 + 1),
                max_norm: Some(config.clip),
                ..StepOptions::default()
            };
            sharded.finish_step(&options)?;
            let loss = sum(&*comm, loss)?;
            // Recorded with the precision it was computed in.
            train_loss.push(loss as f32);
            if let Some(progress) = self.progress {
                let rate = ((step + 1) * tokens) as f64 / start.elapsed().as_secs_f64();
                progress.step(step, loss, rate, config.model.flops_per_token());
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        let last = config.steps - bytes.first().map_or(0, |(steps, _)| *steps);
        bytes.push((last, sharded.weight_bytes(config.passes())?.into()));
        gathering += sharded.gathering()?;
        memory = memory.max(sharded.parameter_bytes()?);
        if let Some((layer, phase, divergence)) = sharded.audit()?.first() {
            let (name, phase) = (&linears[*layer].name, phase.name());
            bail!(
                "{name}, as {phase} gathers it: {divergence}; this is a defect in lowp: please report it"
            );
        }
        sharded.begin(config.steps as u64, first_token(&mine), false)?;
        let val_loss = self.validate(&model, &*comm)?;
        sharded.release()?;
        Ok(Outcome {
            train_loss,
            val_loss,
            bytes,
            skipped: sharded.optimizer().counts()?.skipped,
            seconds,
            gathering: gathering.as_secs_f64(),
            memory,
        })
    }

    fn validate(&self, model: &Gpt, comm: &dyn Communicator<Cpu>) -> Result<f64> {
        let config = self.config;
        let mine = share(config.batch, config.mesh.world(), self.rank);
        let tokens = config.batch * config.model.seq;
        let total = config.eval_batches * config.batch;
        let mut loss_sum = 0.0;
        for index in 0..config.eval_batches {
            let first = index * config.batch;
            let range = first + mine.start..first + mine.end;
            let loss = model.loss(&self.corpus.validation(total, range), tokens)?;
            loss_sum += f64::from(loss.value()?);
        }
        Ok(sum(comm, loss_sum)? / config.eval_batches as f64)
    }
}

/// Sum of one number over the ranks, the same on each.
fn sum(comm: &dyn Communicator<Cpu>, value: f64) -> Result<f64> {
    let mut values = [value];
    comm.control().sum(&mut values)?;
    Ok(values[0])
}

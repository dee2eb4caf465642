//! The training loop of one recipe: ranks as threads, each with its share of every batch.

use super::config::Config;
use super::corpus::{Corpus, share};
use super::engine::{Accounting, Engine};
use super::progress::Progress;
use super::result::RunResult;
use anyhow::{Context, Result, anyhow};
use lowp_candle::Gpt;
use std::thread;
use std::time::Instant;

/// Trains `recipe` with the engines that `connect` makes, one per rank, in that rank's thread.
///
/// # Errors
/// What the first failing rank reports.
pub(crate) fn run<E: Engine>(
    recipe: &str,
    config: &Config,
    corpus: &Corpus,
    connect: Vec<impl FnOnce() -> Result<E> + Send>,
    progress: &Progress,
) -> Result<RunResult> {
    let ranks = config.mesh.ranks();
    let mut outcomes = thread::scope(|scope| {
        let mut handles = Vec::new();
        for (rank, connect) in connect.into_iter().enumerate() {
            let progress = (rank == 0).then_some(progress);
            let body = move || {
                Rank {
                    rank,
                    config,
                    corpus,
                    progress,
                }
                .train(connect()?)
            };
            handles.push(scope.spawn(body));
        }
        let join = |(rank, handle): (usize, thread::ScopedJoinHandle<'_, Result<Outcome>>)| {
            let outcome = handle.join().unwrap_or_else(|_| Err(anyhow!("panicked")));
            outcome.with_context(|| format!("{recipe}, rank {rank} of {ranks}"))
        };
        // Join every thread before looking at errors: one that panicked must not be left for the scope to find.
        let joined: Vec<_> = handles.into_iter().enumerate().map(join).collect();
        joined.into_iter().collect::<Result<Vec<_>>>()
    })?;
    let outcome = outcomes.swap_remove(0);
    let linears = config.model.linears();
    Ok(RunResult {
        recipe: recipe.to_owned(),
        ranks,
        steps: config.steps,
        train_loss: outcome.train_loss,
        val_loss: outcome.val_loss,
        wire_bytes_per_step: outcome.bytes.wire_bytes_per_step,
        wire_bytes_formula: outcome.bytes.wire_bytes_formula,
        resident_weight_bytes: outcome.bytes.resident_weight_bytes,
        parameters: config.model.parameters(),
        weight_parameters: linears.iter().map(|l| l.rows * l.cols).sum(),
        seconds_per_step: outcome.seconds / config.steps as f64,
    })
}

/// Threads that the products of one rank may use, so that all ranks together use the machine once.
pub(crate) fn threads_per_rank(ranks: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    (cores / ranks).max(1)
}

struct Outcome {
    train_loss: Vec<f32>,
    val_loss: f64,
    bytes: Accounting,
    seconds: f64,
}

struct Rank<'a> {
    rank: usize,
    config: &'a Config,
    corpus: &'a Corpus,
    /// Only rank 0 reports.
    progress: Option<&'a Progress>,
}

impl Rank<'_> {
    fn train(&self, mut engine: impl Engine) -> Result<Outcome> {
        let config = self.config;
        let ranks = config.mesh.ranks();
        let threads = threads_per_rank(ranks);
        let model = Gpt::new(config.model, engine.linears()?, config.seed, threads)?;
        let mine = share(config.batch, ranks, self.rank);
        let tokens = config.batch * config.model.seq;
        let mut train_loss = Vec::with_capacity(config.steps);
        let start = Instant::now();
        for step in 0..config.steps {
            let batch = self.corpus.train(config.seed, step, mine.clone());
            let loss = model.loss(&batch, tokens)?;
            let gradients = loss.backward()?;
            engine.finish_step(step, model.vars(), &gradients)?;
            let loss = engine.sum(f64::from(loss.to_scalar::<f32>()?))?;
            #[allow(clippy::cast_possible_truncation)]
            // recorded with the precision it was computed in
            train_loss.push(loss as f32);
            if let Some(progress) = self.progress {
                let rate = ((step + 1) * tokens) as f64 / start.elapsed().as_secs_f64();
                progress.step(step, loss, rate);
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        let bytes = engine.accounting()?;
        Ok(Outcome {
            train_loss,
            val_loss: self.validate(&model, &mut engine)?,
            bytes,
            seconds,
        })
    }

    fn validate(&self, model: &Gpt, engine: &mut impl Engine) -> Result<f64> {
        let config = self.config;
        let mine = share(config.batch, config.mesh.ranks(), self.rank);
        let tokens = config.batch * config.model.seq;
        let total = config.eval_batches * config.batch;
        let mut sum = 0.0;
        for index in 0..config.eval_batches {
            let first = index * config.batch;
            let range = first + mine.start..first + mine.end;
            let loss = model.loss(&self.corpus.validation(total, range), tokens)?;
            sum += f64::from(loss.to_scalar::<f32>()?);
        }
        Ok(engine.sum(sum)? / config.eval_batches as f64)
    }
}

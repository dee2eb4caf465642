//! [`Outcome`]: what training left on one rank; those of all ranks are a [`RunResult`].

use std::time::Duration;

use lowp_comm::Control;
use lowp_format::spelling::Variant;
use lowp_fsdp::{Passes, ShardedModel};
use lowp_kernels::Backend;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::TrainError;
use crate::network::{DeviceMemory, Model, Network};
use crate::result::{Evaluation, RunResult};
use crate::run::Run;

/// What training left on one rank.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Of all steps, also those before a checkpoint.
    pub(crate) train_loss: Vec<f32>,
    pub(crate) val_loss: f64,
    pub(crate) evaluations: Vec<Evaluation>,
    /// The step that the run resumed after.
    pub(crate) resumed_at: u64,
    /// The steps of the recipe, and those of the tail.
    pub(crate) parts: Vec<Part>,
    pub(crate) skipped: u64,
    pub(crate) seconds: f64,
    /// Seconds in which it waited for data.
    pub(crate) data: f64,
    /// Seconds in which it waited for gathered weights.
    pub(crate) gathering: f64,
    /// Those of the last step, as a device measured them.
    pub(crate) waited: Option<f64>,
    /// Seconds of gathers in the last step from begin to end, and those of them in which it computed, as a device measured them.
    pub(crate) gathered: Option<[f64; 2]>,
    /// Bytes of parameters that the rank held.
    pub(crate) memory: u64,
    /// The most bytes that it held on a device, as counted and as measured.
    pub(crate) device: Option<[u64; 2]>,
    /// Bytes of masters and states in page-locked memory of the host.
    pub(crate) page_locked: Option<u64>,
    pub(crate) ways: String,
}

/// Steps in one recipe, and the bytes of this rank's weights after them.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Part {
    pub(crate) tail: bool,
    pub(crate) steps: usize,
    pub(crate) sent: u64,
    pub(crate) sent_per_step: u64,
    pub(crate) resident: u64,
    pub(crate) masters: u64,
    pub(crate) peak: u64,
}

/// The model in the recipe of its steps, and the network over it.
pub(crate) struct Trained<B: Backend, N> {
    pub(crate) sharded: ShardedModel<B, Variant>,
    pub(crate) network: N,
    pub(crate) tail: bool,
    /// Steps since the model was made.
    pub(crate) steps: usize,
    /// Traffic and waits of evaluations since then, subtracted from those of steps.
    pub(crate) evaluated: Evaluated,
}

/// Gathers of weights: bytes that a rank sent, and how long it waited.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Evaluated {
    pub(crate) sent: u64,
    pub(crate) gathering: Duration,
}

impl Evaluated {
    /// The gathers of `sharded` so far.
    pub(crate) fn until<B: Backend>(
        sharded: &ShardedModel<B, Variant>,
        passes: Passes,
    ) -> Result<Self, TrainError> {
        Ok(Self {
            sent: sharded.weight_bytes(passes)?.sent,
            gathering: sharded.gathering()?,
        })
    }
}

impl Outcome {
    /// Of a rank that resumes after step `resumed_at`.
    pub(crate) fn new(resumed_at: usize) -> Self {
        Self {
            train_loss: Vec::new(),
            val_loss: f64::NAN,
            evaluations: Vec::new(),
            resumed_at: resumed_at as u64,
            parts: Vec::new(),
            skipped: 0,
            seconds: 0.0,
            data: 0.0,
            gathering: 0.0,
            waited: None,
            gathered: None,
            memory: 0,
            device: None,
            page_locked: None,
            ways: String::new(),
        }
    }

    /// Adds what `trained` did.
    pub(crate) fn add<B: Backend, N: Network<B>, M>(
        &mut self,
        trained: &Trained<B, N>,
        backend: &B,
        config: &Config<M>,
    ) -> Result<(), TrainError> {
        let Trained {
            sharded,
            network,
            tail,
            steps,
            evaluated,
        } = trained;
        let bytes = sharded.weight_bytes(config.passes())?;
        self.parts.push(Part {
            tail: *tail,
            steps: *steps,
            sent: bytes.sent - evaluated.sent,
            sent_per_step: bytes.sent_per_step,
            resident: bytes.resident,
            masters: bytes.masters,
            peak: bytes.peak,
        });
        self.gathering += (sharded.gathering()? - evaluated.gathering).as_secs_f64();
        let parameters = sharded.parameter_bytes()?;
        self.memory = self.memory.max(parameters);
        if let Some(DeviceMemory { network, peak }) = network.memory(backend)? {
            let counted = self.device.map_or(0, |[counted, _]| counted);
            let host = sharded.host_bytes();
            let all = parameters - host + sharded.var_gather_bytes()? + network;
            self.device = Some([counted.max(all), peak]);
            self.page_locked = (host > 0).then_some(host);
        }
        Ok(())
    }

    /// The result of this rank and all others. Collective.
    pub(crate) fn result<M: Model>(
        &self,
        run: &Run,
        config: &Config<M>,
        tokens: usize,
        control: &dyn Control,
    ) -> Result<RunResult, TrainError> {
        let all = control.all_gather("what training left", postcard::to_stdvec(self)?)?;
        let all = all.iter().map(|bytes| Ok(postcard::from_bytes(bytes)?));
        let all = all.collect::<Result<Vec<Self>, TrainError>>()?;
        result(&all, run, config, tokens)
    }
}

/// The result of a run that left `outcomes` on its ranks.
fn result<M: Model>(
    outcomes: &[Outcome],
    run: &Run,
    config: &Config<M>,
    sequence: usize,
) -> Result<RunResult, TrainError> {
    let first = &outcomes[0];
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
            let recipe = run.name.clone();
            return Err(TrainError::UnequalSteps {
                recipe,
                sent,
                steps,
            });
        }
        let formula = total(number, |part| part.sent_per_step);
        wire.push([sent.checked_div(steps).unwrap_or(formula), formula]);
    }
    // The steps of the tail are reported apart from those before it, unless there are no others.
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
    let tokens = (steps * config.batch * sequence) as f64;
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
        ranks: outcomes.len(),
        steps: first.train_loss.len(),
        resumed_at: first.resumed_at,
        train_loss: first.train_loss.clone(),
        val_loss: first.val_loss,
        evaluations: first.evaluations.clone(),
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
        data_seconds_per_step: per_step(first.data),
        tokens_per_second: per_second(tokens),
        flops_per_second: per_second(tokens * config.model.flops_per_token()),
        parameter_bytes_per_rank: outcomes.iter().map(|o| o.memory).max().unwrap_or(0),
        device_bytes_per_rank: outcomes.iter().filter_map(|o| o.device).reduce(|a, b| {
            let [counted, measured] = [0, 1].map(|at| a[at].max(b[at]));
            [counted, measured]
        }),
        page_locked_bytes_per_rank: outcomes.iter().filter_map(|o| o.page_locked).max(),
        ways: Some(first.ways.clone()).filter(|ways| !ways.is_empty()),
        gather_seconds_exposed: first.waited.unwrap_or(per_step(first.gathering)),
        gather_seconds: first.gathered.map(|[all, _]| all),
        gather_seconds_hidden: match first.waited {
            Some(_) => first.gathered.map(|[_, hidden]| hidden),
            None => Some(0.0),
        },
    })
}

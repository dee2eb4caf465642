//! Steps that are read when the next one is on its way tell and record what those do that are read at once, in the same order.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use lowp_comm::{Communicator, LocalComm};
use lowp_format::Phase;
use lowp_fsdp::{LinearSpec, ModelError, VarPlace};
use lowp_kernels::Cpu;
use lowp_shard::Init;
use lowp_train::network::{NetworkResult, Sharded};
use lowp_train::result::RunResult;
use lowp_train::training::Event;
use lowp_train::{Config, Model, Network, Run, Sampler, TrainError, Training};

const STEPS: usize = 14;
/// A step whose gradients are not finite.
const SKIPPED: usize = 6;

#[derive(Clone, serde::Serialize)]
struct OneLayer {
    rows: usize,
}

impl Model for OneLayer {
    fn linears(&self) -> Vec<LinearSpec> {
        vec![LinearSpec::new("layer", self.rows, 32, Init::Normal(0.1))]
    }
}

/// What happened, in order.
type Events = Arc<Mutex<Vec<String>>>;

/// Pulls its weights towards the batch. Its loss is taken at the end of a step, as that of a device.
struct Pulled<const LATE: bool> {
    loss: f64,
    step: usize,
    /// The step that fails.
    fails: Option<usize>,
    events: Events,
}

impl<const LATE: bool> Pulled<LATE> {
    fn gradient(&mut self, model: &Sharded<Cpu>, batch: &[f32]) -> Result<Vec<f32>, ModelError> {
        let weight = model.weight(0).expect("a layer");
        let values = weight.with_values(Phase::Forward, |w| Ok::<_, ModelError>(w.to_vec()))?;
        let pulls = values.iter().zip(batch).map(|(w, x)| w - x);
        let pulls: Vec<f32> = pulls.collect();
        self.loss += pulls.iter().map(|pull| f64::from(pull * pull)).sum::<f64>();
        Ok(pulls)
    }
}

impl<const LATE: bool> Network<Cpu> for Pulled<LATE> {
    type Batch = Vec<f32>;

    const VARS: VarPlace = if LATE {
        VarPlace::Backend
    } else {
        VarPlace::Host
    };

    fn train(&mut self, model: &mut Sharded<Cpu>, x: &Vec<f32>, _: usize) -> NetworkResult<f64> {
        self.step += 1;
        self.events
            .lock()
            .expect("no panic")
            .push(format!("began {}", self.step));
        if self.fails == Some(self.step) {
            return Err("planted".into());
        }
        let mut gradient = self.gradient(model, x)?;
        if self.step == SKIPPED {
            gradient[0] = f32::NAN;
        }
        model.weight(0).expect("a layer").add_gradient(&gradient)?;
        model.finish_micro_batch()?;
        Ok(0.0)
    }

    fn evaluate(&mut self, model: &mut Sharded<Cpu>, x: &Vec<f32>, _: usize) -> NetworkResult<f64> {
        self.gradient(model, x)?;
        Ok(0.0)
    }

    fn take_loss(&mut self) -> NetworkResult<f64> {
        Ok(std::mem::take(&mut self.loss))
    }
}

/// What a run tells, and what comes of it; if `fails`, the batch of that step cannot be trained on.
fn try_run<const LATE: bool>(fails: Option<usize>) -> (Vec<String>, Result<RunResult, TrainError>) {
    let (run, mut config) = (
        Run::parse("mxfp8").expect("a recipe"),
        Config::new(OneLayer { rows: 32 }),
    );
    (config.steps, config.warmup, config.batch, config.eval_every) = (STEPS, 2, 1, Some(5));
    let batches = Sampler::new("waves", |seed, step, batch: Range<usize>| {
        let at = |i: usize| ((seed as usize % 7 + step + batch.start + i) as f32).sin();
        (0..32 * 32).map(at).collect::<Vec<f32>>()
    });
    let events = Events::default();
    let note = |line: String| events.lock().expect("no panic").push(line);
    let watch = |event: Event<'_>| match event {
        Event::Step { metrics: m, .. } => note(format!(
            "step {} loss {} norm {} skipped {}",
            m.step, m.loss, m.grad_norm, m.skipped
        )),
        Event::Evaluation(found) => note(format!("evaluation {} {}", found.step, found.loss)),
        _ => {}
    };
    let mut training = Training::new(&run, &config, &batches);
    training.watch = &watch;
    let comm: Arc<dyn Communicator<Cpu>> = LocalComm::solo(&Cpu).into();
    let network = |_: &mut Sharded<Cpu>, _| {
        Ok(Pulled::<LATE> {
            loss: 0.0,
            step: 0,
            fails,
            events: Arc::clone(&events),
        })
    };
    let result = training.rank(&Cpu, comm, network);
    let events = std::mem::take(&mut *events.lock().expect("no panic"));
    (events, result)
}

/// What a run tells, and the losses that it records.
fn run<const LATE: bool>() -> (Vec<String>, Vec<f32>) {
    let (events, result) = try_run::<LATE>(None);
    let result = result.expect("a run");
    assert_eq!(result.skipped_steps, 1);
    (events, result.train_loss)
}

/// Where a step cannot start, the step before it is still reported, and the error is that of the step that failed.
#[test]
fn the_step_before_a_failure_is_reported() {
    for (late, (events, result)) in [
        (false, try_run::<false>(Some(9))),
        (true, try_run::<true>(Some(9))),
    ] {
        let error = result.expect_err("step 9 fails").to_string();
        assert!(error.contains("planted"), "late {late}: {error}");
        let last = events.iter().rev().find(|line| !line.starts_with("began"));
        let last = last.expect("a line");
        assert!(last.starts_with("step 8 "), "late {late}: {events:?}");
    }
}

#[test]
fn late_steps_tell_what_others_tell() {
    let (at_once, losses) = run::<false>();
    let (late, late_losses) = run::<true>();
    assert_eq!(losses, late_losses);
    assert_eq!(losses.len(), STEPS);
    let tells = |all: &[String]| -> Vec<String> {
        let tells = all.iter().filter(|line| !line.starts_with("began"));
        tells.cloned().collect()
    };
    assert_eq!(tells(&late), tells(&at_once));
    let skipped = format!("step {SKIPPED} ");
    let is_skipped = |line: &&String| line.starts_with(&skipped) && line.ends_with("skipped true");
    assert_eq!(late.iter().filter(is_skipped).count(), 1);
    let place = |all: &[String], what: &str| {
        let found = all.iter().position(|line| line.starts_with(what));
        found.unwrap_or_else(|| panic!("{what}: {all:?}"))
    };
    // The next step is on its way, but where an evaluation or the end follows.
    for (step, next) in [(2, 3), (7, 8), (12, 13)] {
        let (read, next) = (format!("step {step} "), format!("began {next}"));
        assert!(place(&late, &read) > place(&late, &next), "{late:?}");
        assert!(
            place(&at_once, &read) < place(&at_once, &next),
            "{at_once:?}"
        );
    }
    assert!(place(&late, "step 5 ") < place(&late, "evaluation 5 "));
    assert!(place(&late, "evaluation 5 ") < place(&late, "began 6"));
}

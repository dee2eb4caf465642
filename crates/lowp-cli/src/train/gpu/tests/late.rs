//! Steps that are read when the next one was given, on one GPU and on two: losses are those of steps that are read at once, and a run whose next
//! step cannot be given ends with the reason on all ranks.

use super::{Asked, BUNDLED, SMALL, asked, gpu};
use lowp_comm::Mesh;
use lowp_kernels::Cuda;
use lowp_nccl::{NcclComm, NcclOptions};
use lowp_train::result::RunResult;
use lowp_train::training::Event;
use lowp_train::{Batch, Data, Text, TrainError, Training};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

const STEPS: usize = 8;

/// The text, whose batches cannot be read from a step on, by ranks whose sequences begin at one of these.
struct Planted {
    text: Text,
    fails: Option<(usize, usize)>,
}

impl Data for Planted {
    type Batch = Batch;

    fn train(&self, seed: u64, step: usize, range: Range<usize>) -> Result<Batch, TrainError> {
        match self.fails {
            Some((from, first)) if step >= from && range.start >= first => {
                Err(TrainError::Network("planted".into()))
            }
            _ => self.text.train(seed, step, range),
        }
    }

    fn validation(&self, total: usize, range: Range<usize>) -> Result<Batch, TrainError> {
        self.text.validation(total, range)
    }

    fn tokens(&self) -> usize {
        self.text.tokens()
    }

    fn digest(&self) -> String {
        self.text.digest()
    }
}

/// The steps that a run tells of, and what comes of it by rank.
pub(super) type Ended = (Vec<usize>, Vec<Result<RunResult, TrainError>>);

/// Trains on `devices`, reading each step at once or late.
pub(super) fn train(
    devices: &[Cuda],
    asked: &Asked,
    fails: Option<(usize, usize)>,
    at_once: bool,
) -> Ended {
    let mut config = asked.setup.config.clone();
    config.mesh = Mesh::sharded(devices.len());
    (config.steps, config.warmup) = (STEPS, 2);
    let text = Text::new(BUNDLED.to_vec(), config.model.seq).expect("the text");
    let data = Planted { text, fails };
    let seen = Mutex::new(Vec::new());
    let watch = |event: Event<'_>| {
        if let Event::Step { metrics, .. } = event {
            seen.lock().expect("no panic").push(metrics.step);
        }
    };
    let mut training = Training::new(&asked.setup.runs[0], &config, &data);
    training.watch = &watch;
    // Codes are counted of steps that were read.
    training.codes_every = at_once.then_some(1);
    let options = NcclOptions {
        limit: Duration::from_secs(60),
        ..NcclOptions::default()
    };
    let comms = NcclComm::world_on(devices, options).expect("a world");
    let ended = thread::scope(|scope| {
        let rank = |(cuda, comm): (&Cuda, NcclComm)| {
            let (cuda, training, config) = (cuda.clone(), &training, &config);
            scope.spawn(move || {
                training.rank(&cuda, Arc::new(comm), |sharded, place| {
                    let network = super::super::network(&cuda, sharded, &asked.args, config, place);
                    Ok(network?)
                })
            })
        };
        let ranks: Vec<_> = devices.iter().zip(comms).map(rank).collect();
        let ranks = ranks.into_iter();
        ranks.map(|rank| rank.join().expect("no panic")).collect()
    });
    (seen.into_inner().expect("no panic"), ended)
}

/// One GPU, and two where they are there.
pub(super) fn worlds() -> Vec<Vec<Cuda>> {
    let Some(first) = gpu() else {
        return Vec::new();
    };
    match Cuda::new(1) {
        Ok(second) => vec![vec![first.clone()], vec![first, second]],
        Err(_) => vec![vec![first]],
    }
}

#[test]
fn late_losses_are_those_of_steps_that_are_read_at_once() {
    let asked = asked(&format!("{SMALL} --recipe mxfp8 --device cuda"));
    for devices in worlds() {
        let losses = |at_once| {
            let (seen, ended) = train(&devices, &asked, None, at_once);
            assert_eq!(seen, (1..=STEPS).collect::<Vec<_>>());
            let losses = ended.into_iter().map(|run| run.expect("a run").train_loss);
            losses.collect::<Vec<_>>()
        };
        assert_eq!(losses(false), losses(true), "{} ranks", devices.len());
    }
}

#[test]
fn the_reason_why_a_step_cannot_be_given_is_that_of_all_ranks() {
    let asked = asked(&format!("{SMALL} --recipe mxfp8 --device cuda"));
    let half = asked.setup.config.batch / 2;
    for devices in worlds() {
        let first = if devices.len() == 1 { 0 } else { half };
        for at_once in [false, true] {
            // Steps in which ranks compare on the host what they did, and others.
            for step in [1, 5] {
                let (seen, ended) = train(&devices, &asked, Some((step, first)), at_once);
                for error in ended {
                    let error = error.expect_err("a batch cannot be read").to_string();
                    assert!(error.contains("planted"), "step {step}, {seen:?}: {error}");
                }
                let known: Vec<usize> = (1..=step).collect();
                // Rank 0 of two may hear of the failure before it has read the step before.
                assert!(known.starts_with(&seen), "{seen:?}");
                assert!(devices.len() > 1 || seen == known, "{seen:?}");
            }
        }
    }
}

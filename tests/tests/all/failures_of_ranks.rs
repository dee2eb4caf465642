//! Ranks that fail or do different things in the optimizer: an error on every rank that names the
//! cause, at once, never a wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lowp_comm::{Communicator, LocalComm, run_ranks};
use lowp_format::{AnyRecipe, Shape};
use lowp_kernels::Cpu;
use lowp_optim::{Group, OptimError, StepOptions, StepReport};
use lowp_tests::model::{Case, Rank};
use lowp_tests::world::TIMEOUT;

const SHAPE: Shape = Shape::new(32, 32);
/// Far below the time limit of a wait: nobody ran into one.
const AT_ONCE: Duration = Duration::from_secs(40);

fn assert_says(error: &impl ToString, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "'{word}' is missing in: {text}");
    }
}

/// Runs a model on `world` ranks, `f` after it is built; returns every rank's error, in rank order.
fn errors(
    world: usize,
    model: impl Fn(usize) -> (Vec<Case>, Vec<Group>) + Sync,
    f: impl Fn(usize, &mut Rank) -> Result<(), OptimError> + Sync,
) -> Vec<String> {
    let started = Instant::now();
    let run = run_ranks(&Cpu, world, TIMEOUT, |number, comm| {
        let (cases, groups) = model(number);
        let mut rank = Rank::new(&cases, &groups, &comm, &comm)?;
        f(number, &mut rank)
    });
    let failed = run.expect_err("a mistake");
    assert!(started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
    let mut errors = vec![(failed.rank, failed.cause.to_string())];
    for (rank, result) in failed.others {
        errors.push((rank, result.expect_err("every rank fails").to_string()));
    }
    errors.sort();
    assert_eq!(errors.len(), world);
    errors.into_iter().map(|(_, error)| error).collect()
}

fn every_recipe() -> Vec<Case> {
    let case = |recipe| Case::new(recipe, SHAPE, vec![1.0; SHAPE.elements()]);
    AnyRecipe::all().into_iter().map(case).collect()
}

fn same(_: usize) -> (Vec<Case>, Vec<Group>) {
    (every_recipe(), vec![Group::default()])
}

fn ones(rank: &Rank) -> Vec<Vec<f32>> {
    vec![vec![1.0; SHAPE.elements()]; rank.ids.len()]
}

#[test]
fn a_missing_gradient_on_one_rank_is_an_error_on_all() {
    let found = errors(3, same, |number, rank| {
        rank.step(&ones(rank), &StepOptions::default())?;
        rank.set_grads(&ones(rank)[usize::from(number == 1)..])?;
        rank.finish(&StepOptions::default()).map(drop)
    });
    let all = AnyRecipe::all().len();
    for error in found {
        let last = format!("'param {}' has no gradient", all - 1);
        assert_says(&error, &[&last, &format!("1 of {all}")]);
    }
}

/// `run_ranks` wakes the others when a rank returns an error; a trainer that keeps its communicator
/// and goes on relies on the optimizer for that.
#[test]
fn a_rank_that_keeps_its_communicator_wakes_the_others() {
    let world = LocalComm::world(&Cpu, 3, TIMEOUT).into_iter();
    let world: Vec<Arc<dyn Communicator<Cpu>>> = world.map(|comm| Arc::new(comm) as _).collect();
    let step = |number: usize, comm: &Arc<dyn Communicator<Cpu>>| {
        let mut rank = Rank::new(&every_recipe(), &[Group::default()], comm, comm)?;
        rank.set_grads(&ones(&rank)[usize::from(number == 1)..])?;
        rank.finish(&StepOptions::default())
    };
    let started = Instant::now();
    let results: Vec<Result<StepReport, OptimError>> = std::thread::scope(|scope| {
        let ranks = world.iter().enumerate();
        let threads: Vec<_> = ranks
            .map(|(number, comm)| scope.spawn(move || step(number, comm)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|r| r.expect("no panic")).collect()
    });
    assert!(started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
    for result in results {
        assert_says(&result.expect_err("no gradient"), &["has no gradient"]);
    }
}

#[test]
fn a_rank_with_other_options_stops_all() {
    let good = StepOptions::default();
    for (other, word) in [
        (
            StepOptions {
                lr_factor: 0.5,
                ..good
            },
            "lr_factor",
        ),
        (
            StepOptions {
                grad_scale: 2.0,
                ..good
            },
            "grad_scale",
        ),
        (
            StepOptions {
                max_norm: Some(1.0),
                ..good
            },
            "max_norm",
        ),
    ] {
        let found = errors(3, same, |number, rank| {
            let options = if number == 2 { other } else { good };
            rank.step(&ones(rank), &options).map(drop)
        });
        for error in found {
            assert_says(&error, &["disagree", word]);
        }
    }
    // Rejected by the one rank that has it.
    let bad = StepOptions {
        max_norm: Some(-1.0),
        ..good
    };
    let found = errors(2, same, |number, rank| {
        let options = if number == 1 { bad } else { good };
        rank.step(&ones(rank), &options).map(drop)
    });
    found
        .iter()
        .for_each(|e| assert_says(e, &["max_norm is -1"]));
}

#[test]
fn ranks_with_other_parameters_stop_before_the_first_cast() {
    let cases = every_recipe();
    let group = Group::default();
    let reversed: Vec<Case> = cases.iter().rev().cloned().collect();
    let wider = Case {
        shape: Shape::new(32, 64),
        values: vec![1.0; 2048],
        ..cases[0].clone()
    };
    let wider: Vec<Case> = [wider].into_iter().chain(cases[1..].to_vec()).collect();
    let faster = Group { lr: 1.0, ..group };
    let parameters = "disagree on the parameters of the optimizer";
    for (other, group, says) in [
        (reversed, group, parameters),
        (cases[1..].to_vec(), group, parameters),
        (wider, group, parameters),
        (cases.clone(), faster, "disagree on the hyperparameters"),
    ] {
        let model = |number| match number {
            1 => (other.clone(), vec![group]),
            _ => (cases.clone(), vec![Group::default()]),
        };
        for error in errors(3, model, |_, _| Ok(())) {
            assert_says(&error, &[says, "ranks [1]"]);
        }
    }
}

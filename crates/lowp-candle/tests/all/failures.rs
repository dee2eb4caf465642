//! A rank that fails between two collectives of a model wakes the others, which keep their
//! communicators: an error with the cause on every rank, at once.

use std::backtrace::Backtrace;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Error, Tensor, Var};
use lowp_candle::{CandleError, CandleVars, WeightSource};
use lowp_comm::{Communicator, LocalComm, Mesh, MeshComm};
use lowp_format::{AnyRecipe, Phase, RecipeOptions, ReshardAfterForward};
use lowp_fsdp::{
    LinearSpec, ModelError, ModelOptions, ShardedModel, Sharding, VarPlace, VarSpec, VarUse,
};
use lowp_kernels::Cpu;
use lowp_optim::Group;
use lowp_shard::{GradBucketOptions, Init};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Far below the time limit of a wait: nobody ran into one.
const AT_ONCE: Duration = Duration::from_secs(40);

fn model(comm: &Arc<dyn Communicator<Cpu>>) -> Result<ShardedModel<Cpu, AnyRecipe>, ModelError> {
    let mesh = MeshComm::new(Mesh::sharded(comm.world_size()), comm.clone())?;
    let vars = [VarSpec {
        name: "gamma".to_owned(),
        shape: vec![8],
        init: Init::Constant(1.0),
        decay: false,
        used: VarUse::Throughout,
    }];
    let options = ModelOptions {
        sharding: Sharding::Fsdp,
        reshard_after_forward: ReshardAfterForward::Yes,
        grads: GradBucketOptions::default(),
        seed: 1,
        group: Group::default(),
        vars: VarPlace::Host,
        ..ModelOptions::default()
    };
    let recipe = AnyRecipe::from_name("fp32", &RecipeOptions::default())?;
    let linears = [LinearSpec {
        name: "a".to_owned(),
        block: 0,
        rows: 32,
        cols: 32,
        init: Init::Normal(0.1),
        amax_group: None,
    }];
    ShardedModel::new(&Cpu, &mesh, |_| recipe, &linears, &vars, options)
}

#[test]
fn a_variable_without_a_gradient_is_an_error_on_every_rank() {
    let world = LocalComm::world(&Cpu, 3, TIMEOUT).into_iter();
    let world: Vec<Arc<dyn Communicator<Cpu>>> = world.map(|comm| Arc::new(comm) as _).collect();
    let rank = |rank: usize, comm: &Arc<dyn Communicator<Cpu>>| -> Result<(), CandleError> {
        let mut model = model(comm)?;
        let vars = CandleVars::new(&mut model)?;
        let other = Var::zeros(8, DType::F32, &Device::Cpu)?;
        let var: &Tensor = if rank == 1 { &other } else { &vars.vars()[0] };
        let store = var.sum_all()?.backward()?;
        vars.add_gradients(&mut model, &store)
    };
    let started = Instant::now();
    let results: Vec<Result<(), CandleError>> = std::thread::scope(|scope| {
        let ranks = world.iter().enumerate();
        let threads: Vec<_> = ranks
            .map(|(number, comm)| scope.spawn(move || rank(number, comm)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|r| r.expect("no panic")).collect()
    });
    assert!(started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
    for result in results {
        let text = result.expect_err("every rank fails").to_string();
        assert!(text.contains("'gamma' has no gradient"), "{text}");
    }
}

/// candle puts a backtrace into its errors where `RUST_BACKTRACE` is set: a matter of the rank that failed.
#[test]
fn a_backtrace_of_candle_stays_on_its_rank() {
    let world = LocalComm::world(&Cpu, 2, TIMEOUT).into_iter();
    let world: Vec<Arc<dyn Communicator<Cpu>>> = world.map(|comm| Arc::new(comm) as _).collect();
    let rank = |rank: usize, comm: &Arc<dyn Communicator<Cpu>>| -> Result<(), CandleError> {
        let model = model(comm)?;
        let weight = model.weight(0).expect("a layer");
        if rank == 1 {
            let failed = || Error::WithBacktrace {
                inner: Box::new(Error::Msg("it failed in a layer".to_owned())),
                backtrace: Box::new(Backtrace::force_capture()),
            };
            weight.with_weight(Phase::Forward, &mut |_| Err(failed()))?;
        }
        weight.with_weight(Phase::Forward, &mut |_| Ok(()))?;
        Ok(comm.control().barrier()?)
    };
    let errors: Vec<String> = std::thread::scope(|scope| {
        let ranks = world.iter().enumerate();
        let threads: Vec<_> = ranks
            .map(|(number, comm)| scope.spawn(move || rank(number, comm)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        let errors = joined.map(|r| r.expect("no panic").expect_err("every rank fails"));
        errors.map(|error| error.to_string()).collect()
    });
    assert_eq!(
        errors[0],
        "rank 1 failed: it failed in a layer (every rank stopped; fix the cause on rank 1)"
    );
    assert!(errors[1].lines().count() > 1, "{}", errors[1]);
}

//! A model over a backend that fails at any call: an error with the cause on every rank, at once,
//! and nothing is left that a later pass would take for current.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use lowp_candle::{CandleError, CandleVars, WeightSource, layers};
use lowp_comm::{LocalComm, Mesh, MeshComm};
use lowp_format::{AnyRecipe, Phase, RecipeOptions};
use lowp_fsdp::{
    LinearSpec, ModelOptions, ShardedModel, ShardedWeight, Sharding, VarPlace, VarSpec, VarUse,
};
use lowp_kernels::Backend;
use lowp_optim::{Group, StepOptions};
use lowp_shard::{GradBucketOptions, Init};
use lowp_tests::queued::{Comm, Queued, at_every_call};

const DIM: usize = 32;
/// Scales of blocks, of tensors, and of the past.
const RECIPES: [&str; 3] = ["mxfp8", "nvfp4-2d", "fp8-delayed"];

/// A model that candle runs.
struct Model {
    sharded: ShardedModel<Queued, AnyRecipe>,
    vars: CandleVars,
}

fn model(name: &str, backend: &Queued, comm: &Comm) -> Result<Model, CandleError> {
    let mesh = MeshComm::new(Mesh::sharded(comm.world_size()), comm.clone())?;
    let recipe = AnyRecipe::from_name(name, &RecipeOptions::default())?;
    let linears = [LinearSpec {
        name: "layer".to_owned(),
        block: 0,
        rows: DIM,
        cols: DIM,
        init: Init::Normal(0.1),
        amax_group: None,
    }];
    let vars = [VarSpec {
        name: "gain".to_owned(),
        shape: vec![DIM],
        init: Init::Constant(1.0),
        decay: false,
        used: VarUse::Throughout,
    }];
    let options = ModelOptions {
        sharding: Sharding::Fsdp,
        reshard_after_forward: true.into(),
        grads: GradBucketOptions::default(),
        seed: 1,
        group: Group::default(),
        vars: VarPlace::Host,
        ..ModelOptions::default()
    };
    let mut sharded = ShardedModel::new(backend, &mesh, |_| recipe, &linears, &vars, options)?;
    let vars = CandleVars::new(&mut sharded)?;
    Ok(Model { sharded, vars })
}

fn solo(name: &str) -> (Queued, Model) {
    let backend = Queued::default();
    let comm: Comm = Arc::new(LocalComm::solo(&backend));
    let model = model(name, &backend, &comm).expect("a model");
    (backend, model)
}

fn forward(model: &Model, value: f32) -> Result<Tensor, CandleError> {
    let x = Tensor::full(value, (DIM, DIM), &Device::Cpu)?;
    Ok(layers(&model.sharded, 1)[0].forward(&x)?)
}

/// One micro-batch that is discarded, then a step.
fn train(Model { sharded, vars }: &mut Model) -> Result<(), CandleError> {
    for kept in [false, true] {
        sharded.begin(0, 0, true)?;
        let x = Var::ones((DIM, DIM), DType::F32, &Device::Cpu)?;
        let y = layers(sharded, 1)[0].forward(&x)?;
        let y = y.broadcast_mul(&vars.vars()[0])?;
        let store = y.sum_all()?.backward()?;
        if kept {
            vars.add_gradients(sharded, &store)?;
        } else {
            sharded.discard_gradients()?;
        }
    }
    let step = StepOptions::default();
    vars.finish_step(sharded, &step).map(drop)
}

#[test]
fn a_new_model_fails_on_every_rank() {
    for name in RECIPES {
        let calls = at_every_call(
            |backend, _| Ok(backend.clone()),
            |backend, comm| -> Result<(), CandleError> {
                model(name, backend, comm)?;
                // A rank whose part was done hears of it in the next collective call.
                Ok(comm.control().barrier()?)
            },
        );
        assert!(calls >= 20, "{name}: {calls} calls");
    }
}

#[test]
fn a_training_step_fails_on_every_rank() {
    for name in RECIPES {
        let build = |backend: &Queued, comm: &Comm| model(name, backend, comm);
        let calls = at_every_call(build, |model, _| train(model));
        assert!(calls >= 30, "{name}: {calls} calls");
    }
}

#[test]
fn an_audit_fails_on_every_rank() {
    for name in RECIPES {
        let build = |backend: &Queued, comm: &Comm| model(name, backend, comm);
        let calls = at_every_call(build, |model, _| {
            assert_eq!(model.sharded.audit()?, []);
            Ok(())
        });
        assert!(calls >= 10, "{name}: {calls} calls");
    }
}

/// What a failed call gathered is not taken for ready by the next one, which other ranks gather.
#[test]
fn a_call_that_failed_holds_no_weight() {
    type Weight = ShardedWeight<Queued, AnyRecipe>;
    let fetch = |weight: &Weight, phase| weight.with_weight(phase, &mut |_| Ok(()));
    let compare = |weight: &Weight, backend: &Queued| -> Result<(), CandleError> {
        let master = backend.upload(&[0.0; DIM * DIM])?;
        Ok(weight.audit(&master, None).map(drop)?)
    };
    for phase in Phase::ALL {
        for audited in [false, true] {
            let mut failed = 0;
            for call in 1.. {
                let (backend, model) = solo("mxfp8");
                let weight = model.sharded.weight(0).expect("a layer");
                backend.fail_at(call);
                let result = if audited {
                    compare(weight, &backend)
                } else {
                    fetch(weight, phase).map_err(CandleError::from)
                };
                if result.is_ok() {
                    break;
                }
                failed += 1;
                let before = weight.account().expect("an account").gathers;
                fetch(weight, phase).expect("a weight");
                let after = weight.account().expect("an account").gathers;
                assert_eq!(after, before + 1, "{phase:?}, call {call}");
            }
            assert!(failed >= 4, "{failed} calls");
        }
    }
}

/// The amax of a cast that failed counts in no later one.
#[test]
fn a_cast_that_failed_leaves_no_amax() {
    for name in ["nvfp4-2d", "fp8-current"] {
        let (_, clean) = solo(name);
        let expected = forward(&clean, 0.3).and_then(|y| Ok(y.flatten_all()?.to_vec1::<f32>()?));
        let expected = expected.expect("values");
        let mut failed = 0;
        for call in 1.. {
            let (backend, model) = solo(name);
            backend.fail_at(call);
            if forward(&model, 3000.0).is_ok() {
                break;
            }
            failed += 1;
            let found = forward(&model, 0.3).and_then(|y| Ok(y.flatten_all()?.to_vec1::<f32>()?));
            assert_eq!(found.expect("values"), expected, "{name}, call {call}");
        }
        assert!(failed >= 8, "{name}: {failed} calls");
    }
}

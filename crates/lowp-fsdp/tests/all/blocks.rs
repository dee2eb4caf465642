//! Weights of a block are gathered together: once in a phase, with the bytes and the memory of the plan, and as a full cast has them.

use std::sync::Arc;
use std::time::Duration;

use lowp_comm::{Communicator, Mesh, MeshComm, run_ranks};
use lowp_format::{AnyRecipe, Phase, Recipe, ReshardAfterForward};
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_fsdp::{
    LinearSpec, ModelError, ModelOptions, Passes, ShardedModel, VarPlace, VarSpec, VarUse,
    WeightBytes,
};
use lowp_kernels::Cpu;
use lowp_optim::StepOptions;
use lowp_shard::{GradBucketOptions, Init};

const BLOCKS: usize = 3;
const STEPS: u64 = 2;
/// The number of the head among the variables.
const HEAD: usize = 4;

/// Blocks of three shapes, and a last one that has another.
fn linears() -> Vec<LinearSpec> {
    let of_block = |block| {
        let shapes: &[_] = match block {
            2 => &[(256, 64), (64, 128)],
            _ => &[(128, 64), (256, 64), (128, 64)],
        };
        let linear = move |(at, &(rows, cols)): (usize, &(usize, usize))| LinearSpec {
            block,
            ..LinearSpec::new(format!("{block}.{at}"), rows, cols, Init::Normal(0.1))
        };
        shapes.iter().enumerate().map(linear)
    };
    (0..BLOCKS).flat_map(of_block).collect()
}

fn vars() -> Vec<VarSpec> {
    let var = |name: &str, shape: &[usize], used| VarSpec {
        name: name.to_owned(),
        shape: shape.to_vec(),
        init: Init::Normal(1.0),
        decay: false,
        used,
    };
    // Two tables of one shape, one of which is used twice, and one of another.
    vec![
        var("embedding", &[97, 64], VarUse::First),
        var("first", &[64], VarUse::Throughout),
        var("tied", &[97, 64], VarUse::FirstAndLast),
        var("last", &[128], VarUse::Throughout),
        var("head", &[50, 128], VarUse::Last),
    ]
}

/// Reads the variables of `model` that are used `at` one of these.
fn read_vars(model: &Model, at: &[VarUse]) -> Result<(), ModelError> {
    for (index, spec) in vars().iter().enumerate() {
        let Some(var) = model
            .transient_var(index)
            .filter(|_| at.contains(&spec.used))
        else {
            continue;
        };
        let len = var.full_shape().elements();
        var.with_gathered(Phase::Forward, |tensor, _| {
            let found = tensor.buffers().iter().map(|buffer| buffer.storage.len());
            assert_eq!(found.collect::<Vec<_>>(), [4 * len]);
            Ok::<_, ModelError>(())
        })?;
    }
    Ok(())
}

type Model = ShardedModel<Cpu, AnyRecipe>;

/// What a rank found.
struct Found {
    bytes: WeightBytes,
    /// Of weights.
    gathers: u64,
    of_vars: u64,
    parameters: u64,
    /// Of transient variables.
    sent: u64,
}

/// Trains for some steps.
fn train(
    recipe: AnyRecipe,
    comm: Arc<dyn Communicator<Cpu>>,
    reshard: ReshardAfterForward,
) -> Result<Found, ModelError> {
    let mesh = MeshComm::new(Mesh::sharded(comm.world_size()), comm)?;
    let options = ModelOptions {
        reshard_after_forward: reshard,
        grads: GradBucketOptions {
            bytes: VarPlace::Host.grad_bucket(),
            ..GradBucketOptions::default()
        },
        ..ModelOptions::default()
    };
    let (linears, vars) = (linears(), vars());
    let mut model = ShardedModel::new(&Cpu, &mesh, |_| recipe, &linears, &vars, options)?;
    let weights: Vec<_> = model.weights().cloned().collect();
    for step in 0..STEPS {
        model.begin(step, 0, true)?;
        read_vars(&model, &[VarUse::First, VarUse::FirstAndLast])?;
        for weight in &weights {
            weight.with_values(Phase::Forward, |_| Ok::<_, ModelError>(()))?;
        }
        read_vars(&model, &[VarUse::Last, VarUse::FirstAndLast])?;
        if let Some(head) = model.transient_var(HEAD) {
            head.add_gradient(&vec![0.01; head.full_shape().elements()])?;
        }
        for weight in weights.iter().rev() {
            let len = weight.full_shape().elements();
            weight.with_values(Phase::Backward, |_| Ok::<_, ModelError>(()))?;
            weight.add_gradient(&vec![0.01; len])?;
        }
        for (index, var) in vars.iter().enumerate() {
            let gradient = vec![0.01; var.shape.iter().product()];
            match model.transient_var(index) {
                Some(_) if var.used == VarUse::Last => {}
                Some(var) => var.add_gradient(&gradient)?,
                None => model.add_var_gradient(index, &gradient)?,
            }
        }
        model.finish_micro_batch()?;
        assert!(model.finish_step(&StepOptions::default())?.applied);
    }
    model.read_vars(|index, values| {
        assert!([1, 3].contains(&index), "variable {index}");
        assert_eq!(values.len(), vars[index].shape[0]);
        Ok::<_, ModelError>(())
    })?;
    let mut gathers = 0;
    for weight in &weights {
        gathers += weight.account()?.gathers;
    }
    let bytes = model.weight_bytes(Passes::default())?;
    let (of_vars, parameters) = (model.var_gather_bytes()?, model.parameter_bytes()?);
    let mut sent = 0;
    for index in 0..vars.len() {
        if let Some(var) = model.transient_var(index) {
            let account = var.account()?;
            let uses = match vars[index].used {
                VarUse::FirstAndLast => 2,
                _ => 1,
            };
            assert_eq!(account.gathers, STEPS * uses);
            sent += account.counted_sent_bytes;
        }
    }
    assert_eq!(model.audit()?, [], "{}", recipe.name());
    Ok(Found {
        bytes,
        gathers,
        of_vars,
        parameters,
        sent,
    })
}

#[test]
fn blocks_are_gathered_as_planned() {
    let policies = [
        (1, ReshardAfterForward::Yes),
        (2, ReshardAfterForward::Yes),
        (3, ReshardAfterForward::Yes),
        (2, ReshardAfterForward::No),
        (4, ReshardAfterForward::Group(2)),
    ];
    for recipe in AnyRecipe::all() {
        for (world, reshard) in policies {
            let what = format!("{}, {world} ranks, reshard {reshard}", recipe.name());
            let timeout = Duration::from_secs(60);
            let ranks = run_ranks(&Cpu, world, timeout, |_, comm| train(recipe, comm, reshard));
            let ranks = ranks.unwrap_or_else(|error| panic!("{what}: {error}"));
            let shapes = ModelShapes::of_specs(&linears(), &vars()).expect("shapes");
            let config = CostConfig {
                mesh: Mesh::sharded(world),
                reshard,
                ..CostConfig::default()
            };
            let recipes = vec![recipe; shapes.layers.len()];
            let costs = Costs::new(&shapes, &recipes, recipe.name(), &config, None).expect("costs");
            let phases = match reshard {
                ReshardAfterForward::No => 1,
                _ => 2,
            };
            let mut sent = 0;
            for Found { bytes, gathers, .. } in &ranks {
                assert_eq!(*gathers, STEPS * phases * BLOCKS as u64, "{what}");
                assert_eq!(bytes.sent, STEPS * bytes.sent_per_step, "{what}");
                sent += u128::from(bytes.sent_per_step);
            }
            assert_eq!(sent, costs.step.wire_bytes(), "{what}");
            let memory = &costs.memory;
            let Found { bytes, of_vars, .. } = &ranks[memory.rank];
            let planned = memory.weights + memory.masters + memory.gathered + memory.parts;
            let planned = planned + memory.decoded + memory.buckets;
            assert_eq!(u128::from(bytes.peak), planned, "{what}");
            assert_eq!(u128::from(*of_vars), costs.var_gather_bytes, "{what}");
            let parameters = ranks[memory.rank].parameters;
            assert_eq!(u128::from(parameters), memory.total, "{what}");
            // One of each shape is there at once, and the vectors.
            let tables = 4 * (97 * 64 + 50 * 128);
            assert_eq!(memory.variables, tables + 4 * (64 + 128), "{what}");
            let sent: u64 = ranks.iter().map(|found| found.sent).sum();
            let mut operations = costs.step.operations.iter();
            let planned = operations.find(|operation| operation.key == "transient_variables");
            let planned = planned.map_or(0, |operation| operation.sent);
            assert_eq!(u128::from(sent), u128::from(STEPS) * planned, "{what}");
            assert_eq!(planned, (3 * 97 * 64 + 50 * 128) * 4, "{what}");
        }
    }
}

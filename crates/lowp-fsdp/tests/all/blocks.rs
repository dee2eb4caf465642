//! Weights of a block are gathered together: once in a phase, with the bytes and the memory of the plan, and as a full cast has them.

use std::sync::Arc;
use std::time::Duration;

use lowp_comm::{Communicator, Mesh, MeshComm, run_ranks};
use lowp_format::{AnyRecipe, Phase, Recipe, ReshardAfterForward};
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_fsdp::{
    LinearSpec, ModelError, ModelOptions, Passes, ShardedModel, VarPlace, VarSpec, WeightBytes,
};
use lowp_kernels::Cpu;
use lowp_optim::StepOptions;
use lowp_shard::{GradBucketOptions, Init};

const BLOCKS: usize = 3;
const STEPS: u64 = 2;

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
    let var = |name: &str, len| VarSpec {
        name: name.to_owned(),
        shape: vec![len],
        init: Init::Constant(1.0),
        decay: false,
    };
    vec![var("first", 64), var("last", 128)]
}

/// What a rank sent, and in how many gathers of weights.
fn train(
    recipe: AnyRecipe,
    comm: Arc<dyn Communicator<Cpu>>,
    reshard: ReshardAfterForward,
) -> Result<(WeightBytes, u64, u64), ModelError> {
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
        for weight in &weights {
            weight.with_values(Phase::Forward, |_| Ok::<_, ModelError>(()))?;
        }
        for weight in weights.iter().rev() {
            let len = weight.full_shape().elements();
            weight.with_values(Phase::Backward, |_| Ok::<_, ModelError>(()))?;
            weight.add_gradient(&vec![0.01; len])?;
        }
        for (index, var) in vars.iter().enumerate() {
            model.add_var_gradient(index, &vec![0.01; var.shape[0]])?;
        }
        model.finish_micro_batch()?;
        assert!(model.finish_step(&StepOptions::default())?.applied);
    }
    model.read_vars(|_, _| Ok::<_, ModelError>(()))?;
    let mut gathers = 0;
    for weight in &weights {
        gathers += weight.account()?.gathers;
    }
    let bytes = model.weight_bytes(Passes::default())?;
    let of_vars = model.var_gather_bytes();
    assert_eq!(model.audit()?, [], "{}", recipe.name());
    Ok((bytes, gathers, of_vars))
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
            for (bytes, gathers, _) in &ranks {
                assert_eq!(*gathers, STEPS * phases * BLOCKS as u64, "{what}");
                assert_eq!(bytes.sent, STEPS * bytes.sent_per_step, "{what}");
                sent += u128::from(bytes.sent_per_step);
            }
            assert_eq!(sent, costs.step.wire_bytes(), "{what}");
            let memory = &costs.memory;
            let (bytes, _, of_vars) = &ranks[memory.rank];
            let planned = memory.weights + memory.masters + memory.gathered + memory.parts;
            let planned = planned + memory.decoded + memory.buckets;
            assert_eq!(u128::from(bytes.peak), planned, "{what}");
            assert_eq!(u128::from(*of_vars), costs.var_gather_bytes, "{what}");
        }
    }
}

//! What holds weights: the bytes that a model reports are those of an account made from its gather
//! plans, they grow with the largest layers and not with their number, and no step adds to them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Tensor, Var};
use lowp_candle::{CandleError, CandleVars, Linear, layers};
use lowp_comm::{Communicator, Mesh, MeshComm, run_ranks};
use lowp_format::{
    AnyRecipe, BlockCuts, GatherPlan, PhasePlans, Recipe, RecipeOptions, Shape, block_cuts,
};
use lowp_fsdp::{
    LinearSpec, ModelOptions, Passes, ShardedModel, Sharding, VarPlace, VarSpec, VarUse,
    WeightBytes,
};
use lowp_kernels::Cpu;
use lowp_optim::{Group, StepOptions};
use lowp_shard::{Exchange, GradBucketOptions, Init, pool_buffers};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Width of the model.
const DIM: usize = 64;
/// Tokens of each rank.
const TOKENS: usize = 32;

/// The layers of `blocks` blocks, in four shapes that follow each other.
fn linears(blocks: usize) -> Vec<LinearSpec> {
    let kinds = [
        (3 * DIM, DIM),
        (DIM, 3 * DIM),
        (4 * DIM, DIM),
        (DIM, 4 * DIM),
    ];
    let of_block = |block: usize| {
        kinds.map(|(rows, cols)| LinearSpec {
            name: format!("block{block}.{rows}x{cols}"),
            block,
            rows,
            cols,
            init: Init::Normal(0.05),
            amax_group: None,
        })
    };
    (0..blocks).flat_map(of_block).collect()
}

/// A parameter that stays in f32: it scales the features of the last layer.
fn vars() -> Vec<VarSpec> {
    vec![VarSpec {
        name: "scale".to_owned(),
        shape: vec![DIM],
        init: Init::Constant(1.0),
        decay: false,
        used: VarUse::Throughout,
    }]
}

/// Sum of the outputs of one layer after the other.
fn loss(layers: &[Box<dyn Linear>], scale: &Tensor, x: &Tensor) -> candle_core::Result<Tensor> {
    let mut x = x.clone();
    for layer in layers {
        x = layer.forward(&x)?;
    }
    x.broadcast_mul(scale)?.sum_all()
}

/// Trains `steps` steps and returns the bytes of each rank after each step.
fn bytes(
    recipe: AnyRecipe,
    blocks: usize,
    world: usize,
    reshard: bool,
    steps: u64,
) -> Vec<Vec<WeightBytes>> {
    run_ranks(&Cpu, world, TIMEOUT, |rank, comm| {
        let comm: Arc<dyn Communicator<Cpu>> = comm;
        let mesh = MeshComm::new(Mesh::sharded(world), comm)?;
        let options = ModelOptions {
            sharding: Sharding::Fsdp,
            reshard_after_forward: reshard.into(),
            grads: GradBucketOptions {
                // Every gradient by itself.
                bytes: 0,
                ..GradBucketOptions::default()
            },
            seed: 7,
            group: Group::default(),
            vars: VarPlace::Host,
            ..ModelOptions::default()
        };
        let (linears, vars) = (linears(blocks), vars());
        let of = |_: &LinearSpec| recipe;
        let mut model = ShardedModel::new(&Cpu, &mesh, of, &linears, &vars, options)?;
        let vars = CandleVars::new(&mut model)?;
        let layers = layers(&model, 1);
        let scale = vars.vars()[0].clone();
        let x = Init::Normal(1.0).rows(1, rank as u64, 0..TOKENS, DIM);
        // A variable: only what depends on one has a backward pass.
        let x = Var::from_vec(x, (TOKENS, DIM), &Device::Cpu)?;
        let mut after = Vec::new();
        for step in 0..steps {
            model.begin(step, (rank * TOKENS) as u64, true)?;
            let gradients = loss(&layers, &scale, &x)?.backward()?;
            vars.add_gradients(&mut model, &gradients)?;
            vars.finish_step(&mut model, &StepOptions::default())?;
            after.push(model.weight_bytes(Passes::default())?);
        }
        Ok::<_, CandleError>(after)
    })
    .unwrap_or_else(|e| panic!("{}: {e}", recipe.name()))
}

/// Bytes of the buffers that a block of weights, cut like this, is gathered in, and of the messages that arrive there.
fn gathered(recipe: AnyRecipe, weights: &[BlockCuts], world: usize, reshard: bool) -> [usize; 2] {
    let plans = |of: &BlockCuts| {
        let plans = PhasePlans::with_plans(world, reshard, |fetch, need, held| {
            GatherPlan::with_tiles(&recipe, &of.tiles, &of.cuts, fetch, need, held)
        });
        plans.expect("plans")
    };
    let plans: Vec<PhasePlans> = weights.iter().map(plans).collect();
    let forward: Vec<_> = plans.iter().map(|plans| &plans.forward).collect();
    let backward: Vec<_> = plans.iter().map(|plans| &plans.backward).collect();
    let phases = [&forward, &backward].map(|plans| Exchange::new(plans, world));
    let buffers = |weight: usize| {
        let steps = phases.iter().flat_map(|phase| &phase.steps[weight]);
        pool_buffers(steps).into_iter()
    };
    let buffers = (0..weights.len()).flat_map(buffers);
    let messages = phases.iter().map(Exchange::message_bytes).max();
    [
        buffers.map(|buffer| buffer.bytes).sum(),
        messages.unwrap_or(0),
    ]
}

/// The account of one rank's transient memory.
fn transient(recipe: AnyRecipe, blocks: usize, world: usize, reshard: bool) -> usize {
    let linears = linears(blocks);
    let shapes = linears.iter().map(|l| Shape::new(l.rows, l.cols));
    // Blocks use one set of buffers one after the other, or each keeps its own until backward.
    let sets = if reshard { 1 } else { blocks };
    let of_block = shapes.clone().take(linears.len() / blocks);
    let of_block: Vec<_> = of_block.map(|shape| (recipe, shape)).collect();
    let cuts = block_cuts(&of_block, world, 1).expect("cuts");
    let [of_block, messages] = gathered(recipe, &cuts, world, reshard);
    let lengths: BTreeSet<usize> = shapes.map(Shape::elements).collect();
    let decoded: usize = lengths.iter().sum();
    let host = lengths.last().copied().unwrap_or(0);
    sets * of_block + messages + 4 * (decoded + host) + gradients(blocks, world)
}

/// Memory for full gradients: one of each length, or two where sums need not be waited for.
fn gradients(blocks: usize, world: usize) -> usize {
    let layers = linears(blocks).into_iter().map(|l| l.rows * l.cols);
    let vars = vars().into_iter().map(|v| v.shape.iter().product());
    let lens: Vec<usize> = layers.chain(vars).collect();
    let distinct: BTreeSet<usize> = lens.iter().copied().collect();
    let at_once = if world == 1 { 2 } else { 1 };
    let of = |len: &usize| 4 * len * at_once.min(lens.iter().filter(|l| *l == len).count());
    distinct.iter().map(of).sum()
}

#[test]
fn the_report_is_the_account() {
    for recipe in AnyRecipe::all() {
        for (world, reshard) in [(1, true), (2, true), (3, true), (2, false)] {
            let ranks = bytes(recipe, 2, world, reshard, 3);
            let what = format!("{}, {world} ranks, reshard {reshard}", recipe.name());
            let weights: usize = linears(2).iter().map(|l| l.rows * l.cols).sum();
            let mut masters = 0;
            for after in &ranks {
                let last = after.last().expect("a step");
                let transient = transient(recipe, 2, world, reshard) as u64;
                assert_eq!(
                    last.peak,
                    last.resident + last.masters + transient,
                    "{what}"
                );
                // What grows after the first step grows forever.
                assert!(after.iter().all(|bytes| bytes.peak == last.peak), "{what}");
                masters += last.masters;
            }
            assert_eq!(masters, 4 * weights as u64, "{what}");
        }
    }
}

#[test]
fn transient_memory_does_not_grow_with_depth() {
    let recipe = AnyRecipe::from_name("mxfp8", &RecipeOptions::default()).expect("a recipe");
    let [shallow, deep] = [1, 5].map(|blocks| {
        let bytes = bytes(recipe, blocks, 2, true, 1)[0][0];
        bytes.peak - bytes.resident - bytes.masters
    });
    assert_eq!(shallow, deep);
}

//! What a rank of a run holds on a GPU, by the accounting of `lowp plan`.

use super::args::Args;
use super::config::{Setup, sequences_at_once};
use crate::device::Device;
use lowp_fsdp::VarPlace;
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_train::Model;
use lowp_transformer::{CudnnPasses, HOPPER, MicroBatch, ModelMemory};

/// Bytes of the rank that holds most in the run named `name`; none on a CPU.
pub(crate) fn bytes(args: &Args, setup: &Setup, name: &str) -> Option<u64> {
    if setup.device == Device::Cpu {
        return None;
    }
    let (costs, network) = costs(args, setup, name, HOPPER)?;
    u64::try_from(costs.on_device() + u128::from(network.total())).ok()
}

/// What its parameters cost, and what the network holds beside them on GPUs of this compute capability.
pub(super) fn costs(
    args: &Args,
    setup: &Setup,
    name: &str,
    capability: (i32, i32),
) -> Option<(Costs, ModelMemory)> {
    let config = &setup.config;
    let run = setup.runs.iter().find(|run| run.name == name)?;
    let linears = config.linears();
    let shapes = ModelShapes::of_specs(&linears, &config.model.vars()).ok()?;
    let blocks = config.model.layers;
    let recipe = |linear| config.recipe_of(run, linear, (blocks, false));
    let recipes: Vec<_> = linears.iter().map(recipe).collect();
    let cost = CostConfig {
        mesh: config.mesh,
        sharding: config.sharding,
        reshard: config.reshard_after_forward.among(config.mesh.shard).ok()?,
        grad_wire: config.grad_wire,
        rule: config.optimizer.rule(),
        state: setup.optimizer_state(run),
        accumulate: config.accumulate,
        reduce_every_micro_batch: config.reduce_every_micro_batch,
        recompute: config.recompute,
        vars: VarPlace::Backend,
        prefetch: !args.sharded.no_prefetch,
        ..CostConfig::default()
    };
    let batch = MicroBatch {
        sequences: sequences_at_once(config.batch, config.mesh.world(), config.accumulate).ok()?,
        first_token: 0,
        cudnn: match has_cudnn() {
            true => args.sharded.cudnn(),
            false => CudnnPasses::None,
        },
        agree_amaxes: args.agree_amaxes,
        prefetch: cost.prefetch,
        recompute: config.recompute,
        documents: args.mask_documents,
    };
    let costs = Costs::new(&shapes, &recipes, name, &cost, None).ok()?;
    let network = ModelMemory::new(&config.model.sizes(), &recipes, &batch, capability).ok()?;
    Some((costs, network))
}

#[cfg(feature = "cuda")]
fn has_cudnn() -> bool {
    lowp_transformer::has_cudnn()
}

/// A program without the CUDA backend has no device to ask.
#[cfg(not(feature = "cuda"))]
fn has_cudnn() -> bool {
    true
}

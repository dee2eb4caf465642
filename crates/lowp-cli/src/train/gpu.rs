//! The GPUs of `lowp train`: what they take, their ranks, and the network on one.

use super::args::Args;
use super::checks::sequences_at_once;
use super::config::Setup;
use crate::gpus;
use crate::output;
use crate::usage::UsageError;
use anyhow::Result;
use lowp_comm::{Communicator, Control};
use lowp_format::spelling::Variant;
use lowp_fsdp::ShardedModel;
use lowp_gemm::table;
use lowp_kernels::Cuda;
use lowp_nccl::{NcclComm, NcclOptions};
use lowp_train::Config;
use lowp_train::network::RankPlace;
use lowp_transformer::{CudnnPasses, GptConfig, MicroBatch, Transformer, TransformerError};
use std::sync::{Arc, Once};
use std::time::Duration;

pub(super) type Comm = Arc<dyn Communicator<Cuda>>;

/// The network on the GPU of a rank.
pub(super) fn network(
    cuda: &Cuda,
    sharded: &mut ShardedModel<Cuda, Variant>,
    args: &Args,
    config: &Config<GptConfig>,
    RankPlace { rank, .. }: RankPlace,
) -> Result<Transformer<Variant>, TransformerError> {
    let sequences = config.batch / config.mesh.world() / config.accumulate;
    let part = MicroBatch {
        sequences,
        first_token: (rank * sequences * config.model.seq) as u64,
        cudnn: args.sharded.cudnn(),
        agree_amaxes: args.agree_amaxes,
        prefetch: !args.sharded.no_prefetch,
        recompute: config.recompute,
        documents: args.mask_documents,
    };
    let transformer = Transformer::new(cuda, sharded, &config.model.sizes(), part)?;
    let transformer = transformer
        .with_z_loss(config.z_loss)
        .with_micro_batches(config.accumulate);
    let (passes, why) = transformer.attention();
    if let (Some(why), true, 0) = (why, passes != args.sharded.cudnn(), rank) {
        static ONCE: Once = Once::new();
        let what = match passes {
            CudnnPasses::Forward => "the backward pass of attention",
            _ => "attention",
        };
        ONCE.call_once(|| output::note(&format!("{what} runs as plain products: {why}")));
    }
    Ok(transformer)
}

/// Checks what a GPU takes of a configuration.
pub(super) fn check(setup: &Setup) -> Result<(), UsageError> {
    let config = &setup.config;
    let sequences = sequences_at_once(config.batch, config.mesh.world(), config.accumulate)?;
    let tokens = sequences * config.model.seq;
    if !tokens.is_multiple_of(128) {
        return Err(UsageError::new(format!(
            "a micro-batch has {tokens} tokens per GPU, but needs a multiple of 128; change --batch or --seq"
        )));
    }
    let tails = &[false, true][..1 + usize::from(config.tail_steps > 0)];
    for run in &setup.runs {
        for linear in config.linears() {
            for &tail in tails {
                let recipe = config.recipe_of(run, &linear, config.model.layers, tail);
                table::check(&recipe).map_err(|why| {
                    UsageError::new(format!("{}, {}: {why}", run.name, linear.name))
                })?;
            }
        }
    }
    config.model.sizes().check().map_err(UsageError::new)
}

/// The GPU and the communicator of a rank that is a process.
pub(super) fn process(
    control: Arc<dyn Control>,
    first: usize,
    local: usize,
    limit: Duration,
) -> Result<(Cuda, Comm)> {
    let cuda = crate::device::open(first + local)?;
    let options = NcclOptions {
        limit,
        ..NcclOptions::default()
    };
    let comm = NcclComm::new(control, &cuda, options)?;
    Ok((cuda, Arc::new(comm)))
}

/// The GPUs and communicators of ranks that are threads.
pub(super) fn world(first: usize, ranks: usize, limit: Duration) -> Result<(Vec<Cuda>, Vec<Comm>)> {
    let devices = gpus::open("--world-size", first, ranks)?;
    let options = NcclOptions {
        limit,
        ..NcclOptions::default()
    };
    let comms = NcclComm::world_on(&devices, options)?;
    let comms = comms.into_iter().map(Comm::from).collect();
    Ok((devices, comms))
}

#[cfg(test)]
mod tests;

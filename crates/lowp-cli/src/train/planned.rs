//! What a rank of a run holds on a GPU and in page-locked memory of the host, by the accounting of `lowp plan`.

use super::args::Args;
use super::config::{Setup, sequences_at_once};
use crate::device::Device;
use crate::usage::UsageError;
use lowp_candle::transformer::machine;
use lowp_fsdp::VarPlace;
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_train::Model;
use lowp_transformer::{CudnnPasses, HOPPER, MicroBatch, ModelMemory};
use std::fmt;

/// Bytes of a GPU of the rank that holds most in the run named `name`; none on a CPU.
pub(crate) fn bytes(args: &Args, setup: &Setup, name: &str) -> Option<u64> {
    if setup.device == Device::Cpu {
        return None;
    }
    let (costs, network) = costs(args, setup, name, HOPPER)?;
    u64::try_from(costs.on_device() + u128::from(network.total())).ok()
}

/// What to know of the page-locked memory that `here` ranks on this host have before they begin; nothing where there is none.
///
/// # Errors
/// The host has less.
pub(super) fn page_locked(
    args: &Args,
    setup: &Setup,
    here: usize,
) -> Result<Option<String>, UsageError> {
    if !setup.config.offload_optimizer {
        return Ok(None);
    }
    let runs = setup.runs.iter().filter_map(|run| {
        let (costs, network) = costs(args, setup, &run.name, HOPPER)?;
        let on_device = costs.on_device() + u128::from(network.total());
        Some((costs.offloaded.bytes_per_rank, on_device))
    });
    let Some((rank, on_device)) = runs.max() else {
        return Ok(None);
    };
    let locked = PageLocked {
        rank,
        here: here as u128,
        saves: args.save.is_some(),
    };
    locked.check(machine())?;
    Ok(Some(format!(
        "{locked}; {on_device} bytes are planned on the GPU of each rank"
    )))
}

/// Page-locked memory of ranks on one host.
#[derive(Clone, Copy, Debug)]
struct PageLocked {
    /// Bytes of the masters and states of each.
    rank: u128,
    here: u128,
    /// Whether there are checkpoints: as many bytes are copied for one while the next steps run.
    saves: bool,
}

impl PageLocked {
    /// Rejects what a host of `machine` bytes cannot hold.
    fn check(self, machine: Option<u128>) -> Result<(), UsageError> {
        let needed = self.rank * self.here * if self.saves { 2 } else { 1 };
        match machine {
            Some(machine) if needed > machine => {
                let saving = match self.saves {
                    true => ", and checkpoints take as much again (--save)",
                    false => "",
                };
                Err(UsageError::new(format!(
                    "--offload-optimizer: {self}{saving}, but this host has {machine}; choose fewer bits with --optimizer-state, or spread the model over more hosts"
                )))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for PageLocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, here, .. } = self;
        write!(
            f,
            "masters and states take {rank} bytes of page-locked memory per rank, {} on this host",
            rank * here
        )
    }
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
        offload: config.offload_optimizer,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_room_for_all_of_its_ranks_and_their_checkpoints() {
        let of = |here, saves| PageLocked {
            rank: 10,
            here,
            saves,
        };
        for (locked, needed) in [(of(1, false), 10), (of(4, false), 40), (of(4, true), 80)] {
            assert!(locked.check(None).is_ok() && locked.check(Some(needed)).is_ok());
            let error = locked.check(Some(needed - 1)).expect_err("too little");
            let error = error.to_string();
            let host = format!(
                "10 bytes of page-locked memory per rank, {} on",
                10 * locked.here
            );
            assert!(error.contains(&host), "{error}");
            assert_eq!(error.contains("--save"), locked.saves, "{error}");
            assert!(
                error.contains(&format!("this host has {}", needed - 1)),
                "{error}"
            );
        }
    }
}

//! What a rank of a run holds on a GPU and in page-locked memory of the host, by the accounting of `lowp plan`.

use super::args::Args;
use super::checks::sequences_at_once;
use super::config::Setup;
use crate::device::Device;
use crate::usage::UsageError;
use lowp_comm::MAX_PEER_GPUS;
use lowp_fsdp::VarPlace;
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_train::{Model, machine};
use lowp_transformer::{CudnnPasses, HOPPER, MicroBatch, ModelMemory};
use std::fmt;
use std::ops::Range;

/// Bytes of a GPU of the rank that holds most in the run named `name`; none on a CPU.
pub(crate) fn bytes(args: &Args, setup: &Setup, name: &str) -> Option<u64> {
    if setup.device == Device::Cpu {
        return None;
    }
    let (costs, network) = costs(args, setup, name, HOPPER)?;
    u64::try_from(costs.on_device() + u128::from(network.total())).ok()
}

/// What to know of the page-locked memory of the ranks `here`, those of this host, before they begin; nothing where there is none.
///
/// # Errors
/// The host has less.
pub(super) fn page_locked(
    args: &Args,
    setup: &Setup,
    here: Range<usize>,
) -> Result<Option<String>, UsageError> {
    if !setup.config.offload_optimizer {
        return Ok(None);
    }
    let runs = setup.runs.iter();
    let runs = runs.filter_map(|run| costs(args, setup, &run.name, HOPPER));
    let (mut locked, mut on_device) = (PageLocked::default(), 0);
    for (costs, network) in runs {
        let host = &costs.offloaded;
        locked = locked.max(PageLocked {
            rank: host.bytes_per_rank,
            here: host.of_ranks(here.clone()),
            saved: match args.save {
                Some(_) => host.saved_by(here.clone()),
                None => 0,
            },
        });
        on_device = on_device.max(costs.on_device() + u128::from(network.total()));
    }
    locked.check(machine::lockable())?;
    Ok(Some(format!(
        "{locked}; at most {on_device} bytes are planned on a GPU"
    )))
}

/// Page-locked memory of the ranks of one host.
#[derive(Clone, Copy, Debug, Default)]
struct PageLocked {
    /// Bytes of the masters and states of one rank, and of all.
    rank: u128,
    here: u128,
    /// Bytes of copies of them for checkpoints.
    saved: u128,
}

impl PageLocked {
    /// The most of each.
    fn max(self, other: Self) -> Self {
        Self {
            rank: self.rank.max(other.rank),
            here: self.here.max(other.here),
            saved: self.saved.max(other.saved),
        }
    }

    /// Rejects what a host that can lock `most` bytes cannot hold.
    fn check(self, most: Option<u128>) -> Result<(), UsageError> {
        let Some(most) = most.filter(|most| self.here + self.saved > *most) else {
            return Ok(());
        };
        Err(UsageError::new(format!(
            "--offload-optimizer: {self}, but at most {most} can be locked now; choose fewer bits with --optimizer-state, free memory, or spread the model over more hosts"
        )))
    }
}

impl fmt::Display for PageLocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, here, saved } = self;
        write!(
            f,
            "masters and states take {rank} bytes of page-locked memory per rank, {here} on this host"
        )?;
        match saved {
            0 => Ok(()),
            saved => write!(f, ", and checkpoints {saved} more (--save)"),
        }
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
    let shapes = ModelShapes::of_specs(&config.linears(), &config.model.vars()).ok()?;
    let recipes = setup.recipes(run);
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
        peer_reads: !setup.is_launched && config.mesh.shard <= MAX_PEER_GPUS,
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
    fn a_host_has_room_for_its_ranks_and_their_checkpoints() {
        for saved in [0, 20] {
            let locked = PageLocked {
                rank: 10,
                here: 40,
                saved,
            };
            assert!(locked.check(None).is_ok() && locked.check(Some(40 + saved)).is_ok());
            let error = locked.check(Some(39 + saved)).expect_err("too little");
            let error = error.to_string();
            let host = "10 bytes of page-locked memory per rank, 40 on this host";
            assert!(error.contains(host), "{error}");
            assert_eq!(error.contains("20 more (--save)"), saved > 0, "{error}");
            let most = format!("at most {} can be locked", 39 + saved);
            assert!(error.contains(&most), "{error}");
        }
    }
}

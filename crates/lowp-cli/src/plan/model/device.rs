//! What `--device cuda` adds: what the layers of a network hold on a GPU, if `lowp train` runs it there.

use super::layers::Model;
use crate::plan::Args;
use crate::train::{self, DEFAULT_BATCH};
use crate::usage::UsageError;
use lowp_format::spelling::Variant;
use lowp_fsdp::VarPlace;
use lowp_fsdp::cost::CostConfig;
use lowp_train::MAX_BATCH;
use lowp_transformer::{HOPPER, MicroBatch, ModelMemory};

/// The micro-batch of a GPU; none on the CPU.
pub(super) fn batch(
    args: &Args,
    setup: &CostConfig,
    model: &Model,
) -> Result<Option<MicroBatch>, UsageError> {
    if setup.vars == VarPlace::Host {
        let own = [
            ("--batch", args.batch.is_some()),
            ("--mask-documents", args.mask_documents),
        ];
        let mut of_gpus = own.into_iter().chain(args.sharded.of_gpus());
        return match of_gpus.find(|(_, given)| *given) {
            Some((option, _)) => Err(UsageError::new(format!(
                "{option} only applies to GPUs: add --device cuda, or leave it out"
            ))),
            None => Ok(None),
        };
    }
    let batch = args.batch.unwrap_or(DEFAULT_BATCH);
    train::check_ranges(&[("--batch", batch, MAX_BATCH)])?;
    if let Some(sizes) = &model.sizes {
        let parts = setup.mesh.world().saturating_mul(setup.accumulate);
        train::check_tokens(batch, parts, sizes.seq)?;
    }
    let sequences = train::sequences_at_once(batch, setup.mesh.world(), setup.accumulate)?;
    Ok(Some(MicroBatch {
        sequences,
        first_token: 0,
        cudnn: args.sharded.cudnn(),
        agree_amaxes: false,
        prefetch: setup.prefetch,
        recompute: setup.recompute,
        documents: args.mask_documents,
    }))
}

/// What the layers of `model`, in these recipes, hold beside their parameters; none where `lowp train` runs no such network on GPUs.
pub(super) fn network(
    model: &Model,
    variants: &[Variant],
    batch: Option<&MicroBatch>,
) -> Result<Option<ModelMemory>, UsageError> {
    let (Some(sizes), Some(batch)) = (&model.sizes, batch) else {
        return Ok(None);
    };
    let memory = ModelMemory::new(sizes, variants, batch, HOPPER);
    memory.map(Some).map_err(UsageError::new)
}

/// What a plan for GPUs takes for granted.
pub(super) fn note(model: &Model) -> String {
    match &model.unplanned {
        Some(why) => format!("activations are left out, as `lowp train` does not run this network on GPUs: {why}"),
        None => "products and attention are those of Hopper (sm_90): other GPUs multiply other codes, and decode other operands".to_owned(),
    }
}

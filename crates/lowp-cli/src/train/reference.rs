//! What the same weights would cost in bf16, by the same plans.

use super::config::Setup;
use lowp_format::{AnyRecipe, Code};
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};
use lowp_train::Model;

/// Bytes of all linear weights of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    pub(crate) resident: u64,
    pub(crate) wire_per_step: u64,
}

/// The bytes in bf16, or nothing if there is no such recipe.
pub(crate) fn bf16(setup: &Setup) -> Option<Reference> {
    let config = &setup.config;
    let recipe = AnyRecipe::plain(Code::Bf16)?;
    let linears = config.model.linears();
    let shapes = ModelShapes::of_specs(&linears, &[]).ok()?;
    let cost = CostConfig {
        mesh: config.mesh,
        sharding: config.sharding,
        reshard: config.reshard_after_forward,
        accumulate: config.accumulate,
        recompute: config.recompute,
        ..CostConfig::default()
    };
    let recipes = vec![recipe; linears.len()];
    let costs = Costs::new(&shapes, &recipes, "bf16", &cost, None).ok()?;
    Some(Reference {
        resident: u64::try_from(costs.resident).ok()?,
        wire_per_step: u64::try_from(costs.step.wire_bytes()).ok()?,
    })
}

//! What the same weights would cost in bf16, by the same plans.

use super::config::Config;
use lowp_format::{AnyRecipe, Code, FormatError, Phase, PhasePlans, Recipe, RowCuts, Shape, Usage};
use lowp_fsdp::Sharding;

/// Bytes of all linear weights of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    pub(crate) resident: u64,
    pub(crate) wire_per_step: u64,
}

/// The bytes in bf16, or nothing if there is no such recipe.
pub(crate) fn bf16(config: &Config) -> Option<Reference> {
    let recipe = AnyRecipe::plain(Code::Bf16)?;
    let mut reference = Reference {
        resident: 0,
        wire_per_step: 0,
    };
    for linear in config.model.linears() {
        let shape = Shape::new(linear.rows, linear.cols);
        let [resident, wire] = bytes(&recipe, shape, config).ok()?;
        reference.resident += resident as u64;
        reference.wire_per_step += wire as u64;
    }
    Some(reference)
}

/// Stored bytes and bytes per step of one weight.
fn bytes(recipe: &impl Recipe, shape: Shape, config: &Config) -> Result<[usize; 2], FormatError> {
    let quantum = recipe.row_quantum(Usage::BOTH);
    let cuts = RowCuts::new(shape.rows, config.mesh.shard, quantum)?;
    let plans = PhasePlans::new(recipe, shape, &cuts, config.reshard_after_forward)?;
    let stored = recipe.stored(Usage::BOTH);
    let stored: usize = stored.iter().map(|spec| spec.bytes(shape)).sum();
    Ok(match config.sharding {
        Sharding::Fsdp => {
            let again = match config.recompute && !config.keeps_weights() {
                true => plans.phase(Phase::Forward).wire_bytes(),
                false => 0,
            };
            [stored, config.accumulate * (plans.wire_bytes() + again)]
        }
        // Every rank has the weight, which is gathered once per step.
        Sharding::Zero1 => [stored * config.mesh.shard, stored],
    })
}

//! The plan of one weight: its buffers, and what the ranks exchange of it.

use super::args::Weight;
use super::json;
use crate::train::check_ranges;
use crate::usage::UsageError;
use anyhow::Result;
use lowp_format::{
    AnyRecipe, Code, FormatError, GatherPlan, Phase, PhasePlans, Recipe, ReshardAfterForward,
    RowCuts, Shape, Usage, buffers_table, gather_table, ranks_table,
};
use lowp_fsdp::cost::MAX_RANKS;

/// Most elements of a weight, so that no sum of bytes overflows.
const MAX_ELEMENTS: usize = 1 << 48;

/// The plan of one weight in `recipe` as text.
pub(super) fn plan(recipe: &impl Recipe, weight: Weight<'_>, in_json: bool) -> Result<String> {
    let Weight {
        shape,
        world,
        usage,
        ..
    } = weight;
    check(weight)?;
    let reshard = weight.reshard.unwrap_or_default();
    let plans = gathers(recipe, shape, world, usage, reshard).map_err(UsageError::from)?;
    if in_json {
        return json::render(recipe, weight, &plans);
    }
    let labelled: Vec<_> = plans
        .iter()
        .map(|(phase, plan)| (phase.name(), plan))
        .collect();
    let buffers = buffers_table(recipe, shape, usage).map_err(UsageError::from)?;
    // The table knows the recipe by its name, without the modifiers.
    let buffers = buffers.strip_prefix(recipe.name()).unwrap_or(&buffers);
    let mut text = format!("{}{buffers}\n{}\n", weight.recipe, gather_table(&labelled));
    text += &ranks_table(recipe, usage, &labelled);
    if let Some(bf16) = AnyRecipe::plain(Code::Bf16) {
        let stored = bf16.stored(usage);
        let stored: usize = stored.iter().map(|spec| spec.bytes(shape)).sum();
        let plans = gathers(&bf16, shape, world, usage, reshard).map_err(UsageError::from)?;
        let wire: usize = plans.iter().map(|(_, plan)| plan.wire_bytes()).sum();
        text += &format!("\nin bf16: {stored} bytes stored, {wire} on the wire\n");
    }
    Ok(text)
}

/// What the recipe cannot judge.
fn check(weight: Weight<'_>) -> Result<(), UsageError> {
    let Weight {
        shape,
        world,
        usage,
        reshard,
        ..
    } = weight;
    if shape.elements() == 0 {
        return Err(UsageError::new(format!(
            "--shape {shape} has no elements; rows and columns must be at least 1"
        )));
    }
    if shape.elements() > MAX_ELEMENTS {
        return Err(UsageError::new(format!(
            "--shape {shape} has more than {MAX_ELEMENTS} elements"
        )));
    }
    check_ranges(&[("--world-size", world, MAX_RANKS)])?;
    if usage != Usage::BOTH && reshard.is_some() {
        return Err(UsageError::new(format!(
            "--reshard-after-forward needs --usage both: with {usage} there is only one gather"
        )));
    }
    Ok(())
}

/// The gathers that `usage` takes in one step, in order.
fn gathers(
    recipe: &impl Recipe,
    full: Shape,
    world: usize,
    usage: Usage,
    reshard: ReshardAfterForward,
) -> Result<Vec<(Phase, GatherPlan)>, FormatError> {
    if usage == Usage::BOTH {
        let cuts = RowCuts::new(full.rows, world, recipe.row_quantum(usage))?;
        let plans = PhasePlans::new(recipe, full, &cuts, reshard)?;
        let of_phase = |phase| (phase, plans.phase(phase).clone());
        return Ok(Phase::ALL.map(of_phase).to_vec());
    }
    let needed = Phase::ALL
        .into_iter()
        .filter(|phase| usage.contains(phase.usage()));
    needed
        .map(|phase| Ok((phase, GatherPlan::new(recipe, full, world, usage)?)))
        .collect()
}

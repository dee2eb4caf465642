//! What a weight stores and sends, as `lowp plan` says it.

use lowp_format::{
    GatherPlan, Phase, PhasePlans, Recipe as _, RowCuts, Shape, Usage, buffers_table, gather_table,
    ranks_table,
};
use lowp_shard::{GatherHooks, ShardSpec};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::Error;
use crate::recipe::Recipe;

/// The plan of a weight of `rows` x `cols` over `world` ranks: tables in `text`, bytes in the other entries. `sent` is what all ranks together put
/// on the wire in a step; `fsdp2` has, for each phase, the bytes that every rank sends where FSDP2 cuts the rows. With `recompute` backward repeats the
/// forward, and gathers what both need; a weight that stays gathered after forward is not gathered again.
#[pyfunction]
#[pyo3(signature = (recipe, rows, cols, world, reshard_after_forward = true, recompute = false))]
pub(crate) fn plan<'py>(
    py: Python<'py>,
    recipe: &Recipe,
    rows: usize,
    cols: usize,
    world: usize,
    reshard_after_forward: bool,
    recompute: bool,
) -> Result<Bound<'py, PyDict>, Error> {
    let (recipe, shape) = (recipe.recipe, Shape::new(rows, cols));
    shape.check()?;
    let cuts = RowCuts::new(rows, world, recipe.row_quantum(Usage::BOTH))?;
    let mut plans = PhasePlans::new(&recipe, shape, &cuts, reshard_after_forward)?;
    if recompute && reshard_after_forward {
        plans.backward =
            GatherPlan::with_cuts(&recipe, shape, &cuts, Usage::BOTH, Usage::BOTH, &[])?;
    }
    let labelled = Phase::ALL.map(|phase| (phase.name(), plans.phase(phase)));
    let mut text = buffers_table(&recipe, shape, Usage::BOTH)?;
    text += &format!("\n{}\n", gather_table(&labelled));
    text += &ranks_table(&recipe, Usage::BOTH, &labelled);
    let stored: usize = recipe
        .stored(Usage::BOTH)
        .iter()
        .map(|s| s.bytes(shape))
        .sum();
    let dict = PyDict::new(py);
    dict.set_item("text", text)?;
    dict.set_item("stored", stored)?;
    dict.set_item("sent", plans.wire_bytes())?;
    let spec = ShardSpec::chunked(&recipe, shape, world, 0, Usage::BOTH);
    let fsdp2 = spec.and_then(|spec| match reshard_after_forward {
        true => {
            let [forward, backward] = GatherHooks::phases(recipe, &spec)?;
            let both = recompute.then(|| GatherHooks::kept(recipe, &spec));
            Ok(vec![forward, both.unwrap_or(Ok(backward))?])
        }
        false => Ok(vec![GatherHooks::kept(recipe, &spec)?]),
    });
    match fsdp2 {
        Ok(hooks) => {
            let sent = |hooks: &GatherHooks| hooks.inputs().iter().map(|i| i.padded).sum();
            let sent: Vec<usize> = hooks.iter().map(sent).collect();
            dict.set_item("fsdp2", sent)?;
        }
        Err(why) => dict.set_item("fsdp2", why.to_string())?,
    }
    Ok(dict)
}

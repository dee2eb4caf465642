//! What a weight stores and sends, as `lowp plan` says it.

use lowp_format::{
    Phase, PhasePlans, Recipe as _, RowCuts, Shape, Usage, buffers_table, gather_table, ranks_table,
};
use lowp_shard::{GatherHooks, ShardSpec};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::Error;
use crate::recipe::Recipe;

/// The plan of a weight of `rows` x `cols` over `world` ranks: tables in `text`, bytes in the other entries. `sent` is what all ranks together put
/// on the wire in a step; `fsdp2` has, for each phase, the bytes that every rank sends where FSDP2 cuts the rows.
#[pyfunction]
#[pyo3(signature = (recipe, rows, cols, world, reshard_after_forward = true))]
pub(crate) fn plan<'py>(
    py: Python<'py>,
    recipe: &Recipe,
    rows: usize,
    cols: usize,
    world: usize,
    reshard_after_forward: bool,
) -> Result<Bound<'py, PyDict>, Error> {
    let (recipe, shape) = (recipe.recipe, Shape::new(rows, cols));
    shape.check()?;
    let cuts = RowCuts::new(rows, world, recipe.row_quantum(Usage::BOTH))?;
    let plans = PhasePlans::new(&recipe, shape, &cuts, reshard_after_forward)?;
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
        true => Ok(GatherHooks::phases(recipe, &spec)?.to_vec()),
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

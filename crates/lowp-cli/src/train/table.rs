//! The table at the end of `lowp train`.

use super::config::Setup;
use crate::columns::Columns;
use crate::device::Device;
use lowp_format::{AnyRecipe, Code, has_tensor_scale};
use lowp_train::summary::Summary;
use lowp_train::{Model, Run};

/// One line per recipe and what the numbers mean.
pub(crate) fn render(setup: &Setup, summaries: &[Summary<'_>]) -> String {
    let mut table = Columns::new(&header(setup), &[0]);
    for summary in summaries {
        table.row(cells(setup, summary));
    }
    table.render() + &notes(setup, summaries)
}

/// The names of the columns.
pub(crate) fn header(setup: &Setup) -> Vec<&'static str> {
    let mut header = vec!["recipe", "val loss", "gap %"];
    header.extend((setup.config.seeds > 1).then_some("range"));
    header.extend(["resident", "peak", "wire/step", "formula"]);
    header.extend(["ms/step", "gather ms", "tokens/s", "GFLOP/s", "MB/rank"]);
    header
}

/// The columns of one recipe.
pub(crate) fn cells(setup: &Setup, summary: &Summary<'_>) -> Vec<String> {
    let run = summary.first;
    let dash = || "-".to_owned();
    let mut cells = vec![
        run.recipe.clone(),
        format!("{:.4}", summary.mean(|run| run.val_loss)),
        summary.gap().map_or_else(dash, percent),
    ];
    if setup.config.seeds > 1 {
        let range = summary.gap_range();
        cells.push(range.map_or_else(dash, |[low, high]| {
            format!("{} to {}", percent(low), percent(high))
        }));
    }
    let bytes = [
        run.resident_weight_bytes,
        run.peak_weight_bytes,
        run.wire_bytes_per_step,
        run.wire_bytes_formula,
    ];
    cells.extend(bytes.map(|bytes| format!("{:.3}", run.per_weight(bytes))));
    cells.extend([
        format!("{:.1}", summary.mean(|run| run.seconds_per_step) * 1e3),
        format!(
            "{:.1}",
            summary.mean(|run| run.gather_seconds_exposed) * 1e3
        ),
        format!("{:.0}", summary.mean(|run| run.tokens_per_second)),
        format!("{:.1}", summary.mean(|run| run.flops_per_second) / 1e9),
        format!("{:.1}", run.parameter_bytes_per_rank as f64 / 1e6),
    ]);
    cells
}

/// Bytes of all linear weights of one replica that would be resident and on the wire in bf16.
pub(crate) fn in_bf16(setup: &Setup) -> Option<[u64; 2]> {
    let costs = setup.config.costs_in(AnyRecipe::plain(Code::Bf16)?).ok()?;
    let [resident, sent] = [costs.resident, costs.step.wire_bytes()].map(u64::try_from);
    Some([resident.ok()?, sent.ok()?])
}

/// A gap with its sign and two decimals; what rounds to zero has none.
fn percent(gap: f64) -> String {
    match format!("{gap:+.2}").as_str() {
        "-0.00" => "+0.00".to_owned(),
        text => text.to_owned(),
    }
}

/// What the columns are about.
fn notes(setup: &Setup, summaries: &[Summary<'_>]) -> String {
    let Some(run) = summaries.first().map(|summary| summary.first) else {
        return String::new();
    };
    let config = &setup.config;
    let mut notes = Vec::new();
    if let Device::Cuda(_) = setup.device {
        let text = "on GPUs, f32 and bf16 operands are multiplied in bf16, also for the baseline";
        notes.push(text.to_owned());
    }
    let mut gap = match summaries.iter().any(|summary| !summary.gaps.is_empty()) {
        true => format!("gap: validation loss above {} of the same seed", run.recipe),
        false => "gap: no other run to compare with".to_owned(),
    };
    if config.seeds > 1 {
        let (first, last) = (config.seed, config.last_seed());
        gap += &format!("; means over seeds {first} to {last}");
        let seeds = summaries.iter().map(|s| s.runs.len()).min().unwrap_or(1);
        if seeds < config.seeds {
            gap += &format!(", of which {seeds} finished with every recipe");
        }
    }
    notes.push(gap);
    let ranks = match (config.mesh.replicate, config.mesh.shard) {
        (1, 1) => "on the one rank".to_owned(),
        (1, shards) => format!("all {shards} ranks together"),
        (replicas, 1) => format!("on each of {replicas} replicas"),
        (replicas, shards) => format!("the {shards} ranks of each of {replicas} replicas together"),
    };
    notes.push(format!(
        "resident, peak, wire, formula: bytes per weight of the linear layers ({} of {} parameters), {ranks}",
        run.parameters, run.model_parameters
    ));
    // A baseline has masters in f32; those of other runs are in the dtype that was asked for.
    let last = summaries.last().map_or(run, |summary| summary.first);
    notes.push(format!(
        "peak: the most memory for weights at one time: resident, {:.3} of masters, and the memory to gather, decode and reduce in
gather: time per step that rank 0 waits for weights; MB/rank: peak memory for weights, masters, moments and gradients of one rank",
        last.per_weight(last.master_weight_bytes)
    ));
    let has_tail = |summary: &Summary<'_>| summary.first.wire_bytes_tail.is_some();
    if summaries.iter().any(has_tail) {
        notes.push(format!(
            "the last {} of {} steps ran forward in bf16; resident, wire and formula describe the earlier steps",
            config.tail_steps, config.steps
        ));
    }
    if !config.kept_in_bf16.is_empty() {
        let (kept, all) = (config.kept_in_bf16.len(), config.model.linears().len());
        notes.push(format!("{kept} of {all} linear layers stayed in bf16"));
    }
    let has_amax = |run: &Run| has_tensor_scale(&run.recipe);
    if !config.amax_groups.is_empty() && setup.runs.iter().any(has_amax) {
        let (groups, layers) = (config.amax_groups.len(), config.amax_groups.concat().len());
        notes.push(format!(
            "{layers} linear layers have one amax in each of {groups} groups"
        ));
    }
    let bf16 = in_bf16(setup).map(|bytes| {
        let [resident, wire] = bytes.map(|bytes| run.per_weight(bytes));
        format!("bf16 would take {resident:.3} resident and {wire:.3} on the wire; ")
    });
    notes.push(format!(
        "{}gradients are sent in {}",
        bf16.unwrap_or_default(),
        config.grad_wire.name()
    ));
    let runs = summaries.iter().flat_map(|summary| &summary.runs);
    for run in runs.filter(|run| run.skipped_steps > 0) {
        notes.push(format!(
            "{} seed {}: {} of {} steps skipped, their gradients were not finite",
            run.recipe, run.seed, run.skipped_steps, run.steps
        ));
    }
    notes.join("\n") + "\n"
}

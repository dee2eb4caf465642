//! The table at the end of `lowp train`.

use super::config::Config;
use super::reference;
use super::result::{Summary, percent};
use crate::columns::Columns;
use std::fmt::Write;

/// One line per recipe and what the numbers mean.
pub(crate) fn render(config: &Config, summaries: &[Summary<'_>]) -> String {
    let several = config.seeds > 1;
    let mut header = vec!["recipe", "val loss", "gap %"];
    header.extend(several.then_some("range"));
    header.extend(["resident", "peak", "wire/step", "formula", "ms/step"]);
    let mut table = Columns::new(&header, &[0]);
    for summary in summaries {
        let run = summary.first;
        let range = || {
            summary.gap_range().map_or_else(
                || "-".to_owned(),
                |[low, high]| format!("{} to {}", percent(low), percent(high)),
            )
        };
        let mut cells = vec![
            run.recipe.clone(),
            format!("{:.4}", summary.mean(|run| run.val_loss)),
            summary.gap().map_or_else(|| "-".to_owned(), percent),
        ];
        cells.extend(several.then(range));
        cells.extend([
            format!("{:.3}", run.per_weight(run.resident_weight_bytes)),
            format!("{:.3}", run.per_weight(run.peak_weight_bytes)),
            format!("{:.3}", run.per_weight(run.wire_bytes_per_step)),
            format!("{:.3}", run.per_weight(run.wire_bytes_formula)),
            format!("{:.1}", summary.mean(|run| run.seconds_per_step) * 1e3),
        ]);
        table.row(cells);
    }
    table.render() + &notes(config, summaries)
}

/// What the columns are about.
fn notes(config: &Config, summaries: &[Summary<'_>]) -> String {
    let mut notes = String::new();
    let out = &mut notes;
    let Some(run) = summaries.first().map(|summary| summary.first) else {
        return notes;
    };
    let _ = write!(
        out,
        "gap: validation loss above {} of the same seed",
        run.recipe
    );
    let seeds = summaries.iter().map(|s| s.runs.len()).min().unwrap_or(1);
    if config.seeds > 1 {
        let _ = write!(
            out,
            "; means over seeds {} to {}",
            config.seed,
            config.last_seed()
        );
        if seeds < config.seeds {
            let _ = write!(out, ", of which {seeds} finished with every recipe");
        }
    }
    let ranks = match (config.mesh.replicate, config.mesh.shard) {
        (1, 1) => "on the one rank".to_owned(),
        (1, shards) => format!("all {shards} ranks together"),
        (replicas, 1) => format!("on each of {replicas} replicas"),
        (replicas, shards) => format!("the {shards} ranks of each of {replicas} replicas together"),
    };
    let _ = writeln!(
        out,
        "\nresident, peak, wire, formula: bytes per weight of the linear layers ({} of {} parameters), {ranks}",
        run.parameters, run.model_parameters
    );
    let _ = writeln!(
        out,
        "peak: the most that held weights at once: resident, {:.3} of f32 masters, and memory to gather, decode and reduce in",
        run.per_weight(run.master_weight_bytes)
    );
    if let Some(bf16) = reference::bf16(config) {
        let [resident, wire] = [bf16.resident, bf16.wire_per_step].map(|b| run.per_weight(b));
        let _ = write!(
            out,
            "bf16 would take {resident:.3} resident and {wire:.3} on the wire; "
        );
    }
    let _ = writeln!(out, "gradients travel in {}", config.grad_wire_name());
    for run in summaries.iter().flat_map(|summary| &summary.runs) {
        if run.skipped_steps > 0 {
            let _ = writeln!(
                out,
                "{} seed {}: {} of {} steps skipped, their gradients were not finite",
                run.recipe, run.seed, run.skipped_steps, run.steps
            );
        }
    }
    notes
}

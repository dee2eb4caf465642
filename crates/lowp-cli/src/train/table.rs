//! The table at the end of `lowp train`.

use super::result::RunResult;

/// One line per run; the first run is the baseline that gaps refer to.
pub(crate) fn render(runs: &[RunResult]) -> String {
    let header = [
        "recipe",
        "val loss",
        "gap %",
        "resident B/weight",
        "wire B/weight/step",
        "formula",
        "ms/step",
    ];
    let mut rows = vec![header.map(str::to_owned)];
    for run in runs {
        rows.push([
            run.recipe.clone(),
            format!("{:.4}", run.val_loss),
            runs.first()
                .map_or_else(String::new, |base| format!("{:+.2}", run.gap_percent(base))),
            format!("{:.3}", run.per_weight(run.resident_weight_bytes)),
            format!("{:.3}", run.per_weight(run.wire_bytes_per_step)),
            format!("{:.3}", run.per_weight(run.wire_bytes_formula)),
            format!("{:.1}", run.seconds_per_step * 1e3),
        ]);
    }
    let width = |col: usize| {
        rows.iter()
            .map(|row| row[col].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut out = String::new();
    for row in &rows {
        let line: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(col, (cell, &w))| {
                if col == 0 {
                    format!("{cell:<w$}")
                } else {
                    format!("{cell:>w$}")
                }
            })
            .collect();
        out.push_str(line.join("  ").trim_end());
        out.push('\n');
    }
    if let Some(run) = runs.first() {
        out.push_str(&format!(
            "{} parameters, {} of them weights of linear layers; bytes are per such weight, all {} ranks together\n",
            run.model_parameters, run.parameters, run.ranks
        ));
    }
    out
}

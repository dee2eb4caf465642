//! The page of `--report`: one HTML file, everything inside it.

use super::config::Config;
use super::result::RunResult;
use super::svg::{bars, colour, escape, loss_curves};
use anyhow::Result;
use std::fmt::Write;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:800px;\
margin:2em auto;padding:0 1em}h1{font-size:1.5em}h2{font-size:1.1em;margin:1.8em 0 .4em}\
table{border-collapse:collapse;width:100%}td,th{padding:.25em .6em;text-align:right;border-bottom:1px solid #ddd}\
td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;\
fill:#444}.grid{stroke:#e4e4e4}.key{display:inline-block;width:.8em;height:.8em;margin-right:.4em}.note{color:#666}";

/// The whole page as text.
///
/// # Errors
/// If the configuration has no JSON form.
pub(crate) fn render(config: &Config, runs: &[RunResult]) -> Result<String> {
    let window = (config.steps / 50).max(1);
    let curves: Vec<_> = runs
        .iter()
        .map(|run| (run.recipe.as_str(), run.train_loss.as_slice()))
        .collect();
    let bytes = |of: fn(&RunResult) -> u64| -> Vec<(&str, f64)> {
        runs.iter()
            .map(|run| (run.recipe.as_str(), run.per_weight(of(run))))
            .collect()
    };
    let mut page = String::new();
    let out = &mut page;
    let _ = write!(
        out,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>lowp train</title>\
         <style>{STYLE}</style><h1>Training with low-precision sharded weights</h1>"
    );
    if let Some(run) = runs.first() {
        let _ = write!(
            out,
            "<p>{} parameters ({} in linear layers), {} ranks as {} x {} (replicate x shard), {} steps, seed {}.</p>",
            run.parameters,
            run.parameters,
            run.ranks,
            config.mesh.replicate,
            config.mesh.shard,
            run.steps,
            config.seed
        );
    }
    out.push_str(&table(runs));
    let _ = write!(
        out,
        "<h2>Training loss</h2><p class=\"note\">Nats per byte, mean of {window} steps.</p>{}",
        loss_curves(&curves, window)
    );
    let _ = write!(
        out,
        "<h2>Weights resident between steps</h2>\
         <p class=\"note\">Bytes per parameter of the linear layers, all ranks together.</p>{}",
        bars(
            "Resident weight bytes",
            &bytes(|run| run.resident_weight_bytes),
            "B"
        )
    );
    let _ = write!(
        out,
        "<h2>Weights on the wire per step</h2>\
         <p class=\"note\">Bytes per parameter of the linear layers, all ranks together.</p>{}",
        bars(
            "Wire bytes per step",
            &bytes(|run| run.wire_bytes_per_step),
            "B"
        )
    );
    let record = serde_json::to_string_pretty(&config.record())?;
    let _ = write!(
        out,
        "<h2>Configuration</h2><pre>{}</pre></html>",
        escape(&record)
    );
    out.push('\n');
    Ok(page)
}

fn table(runs: &[RunResult]) -> String {
    let mut out =
        "<table><tr><th>recipe<th>validation loss<th>gap<th>resident B/param<th>wire B/param\
                   <th>formula<th>ms/step</tr>"
            .to_owned();
    for (index, run) in runs.iter().enumerate() {
        let _ = write!(
            out,
            "<tr><td><span class=\"key\" style=\"background:{}\"></span>{}<td>{:.4}<td>{:+.2}%<td>{:.3}<td>{:.3}\
             <td>{:.3}<td>{:.1}</tr>",
            colour(index),
            escape(&run.recipe),
            run.val_loss,
            run.gap_percent(&runs[0]),
            run.per_weight(run.resident_weight_bytes),
            run.per_weight(run.wire_bytes_per_step),
            run.per_weight(run.wire_bytes_formula),
            run.seconds_per_step * 1e3
        );
    }
    out.push_str("</table>");
    out
}

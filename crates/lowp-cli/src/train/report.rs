//! The page of `--report`: one HTML file, everything inside it.

use super::config::Setup;
use super::table as columns;
use anyhow::Result;
use lowp_train::chart::{Series, bars, curves, escape, key, smooth};
use lowp_train::result::RunResult;
use lowp_train::summary::Summary;
use std::fmt::Write;

const STYLE: &str = include_str!("report.css");

/// The whole page as text. Losses are means over each `unit` of the data.
pub(crate) fn render(setup: &Setup, summaries: &[Summary<'_>], unit: &str) -> Result<String> {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>lowp train</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<h1>Training with low-precision sharded weights</h1>\n"
    );
    let out = &mut page;
    if let Some(run) = summaries.first().map(|summary| summary.first) {
        let seeds = match setup.config.seeds {
            1 => format!("seed {}", setup.config.seed),
            _ => format!(
                "means over seeds {} to {}",
                setup.config.seed,
                setup.config.last_seed()
            ),
        };
        let _ = writeln!(
            out,
            "<p>{} parameters, {} of them in linear layers; {} ranks as {} (replicate x shard); {} steps of {} \
             sequences of {} {unit}s; {seeds}.</p>",
            run.model_parameters,
            run.parameters,
            run.ranks,
            setup.config.mesh,
            run.steps,
            setup.config.batch,
            setup.config.model.seq
        );
    }
    out.push_str(&table(setup, summaries));
    loss(out, summaries, unit);
    bytes(out, setup, summaries);
    let record = serde_json::to_string_pretty(&setup.config)?;
    let _ = write!(
        out,
        "<h2>Configuration</h2>\n<pre>{}</pre>\n</body>\n</html>\n",
        escape(&record)
    );
    Ok(page)
}

/// One row per recipe.
fn table(setup: &Setup, summaries: &[Summary<'_>]) -> String {
    let mut out = "<div class=\"wide\"><table>\n<thead><tr>".to_owned();
    for cell in columns::header(setup) {
        let _ = write!(out, "<th>{cell}</th>");
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for (index, summary) in summaries.iter().enumerate() {
        let mut cells = columns::cells(setup, summary);
        cells[0] = format!("{}{}", key(index), escape(&cells[0]));
        out.push_str("<tr>");
        for cell in cells {
            let _ = write!(out, "<td>{cell}</td>");
        }
        out.push_str("</tr>\n");
    }
    out.push_str(
        "</tbody>\n</table></div>\n<p class=\"note\">Gap: validation loss above the baseline of the same seed. Resident, peak, \
         wire and formula: bytes per weight of the linear layers, all ranks of a replica together. Peak: the most that \
         held weights at once, with masters and the memory to gather, decode and reduce in. Wire and formula: as counted \
         and as the gather plans say. Gather: waiting for weights in a step of rank 0. MB/rank: the most of weights, masters, \
         moments and gradients on one rank.</p>\n",
    );
    out
}

/// One line or bar per recipe.
fn series<'a, T>(
    summaries: &'a [Summary<'_>],
    values: impl Fn(&Summary<'_>) -> T,
) -> Vec<Series<'a, T>> {
    let one = |(style, summary): (usize, &'a Summary<'_>)| Series {
        name: &summary.first.recipe,
        style,
        values: values(summary),
    };
    summaries.iter().enumerate().map(one).collect()
}

/// A part of the page: a title, a note, and what it shows.
fn section(out: &mut String, title: &str, note: &str, shown: &str) {
    let _ = writeln!(
        out,
        "<h2>{title}</h2>\n<p class=\"note\">{note}</p>\n{shown}"
    );
}

/// The loss curves, and how far each is above the baseline's.
fn loss(out: &mut String, summaries: &[Summary<'_>], unit: &str) {
    let steps = summaries.iter().map(|s| s.first.steps).max().unwrap_or(0);
    let legend = |from: usize| {
        let item = |(index, summary): (usize, &Summary<'_>)| {
            let name = escape(&summary.first.recipe);
            format!("<span>{}{name}</span>", key(index))
        };
        let items = summaries.iter().enumerate().skip(from).map(item);
        let items = items.collect::<Vec<_>>().join(" ");
        format!("<p class=\"legend\">{items}</p>")
    };
    let smoothed =
        |window: usize| series(summaries, |summary| smooth(&summary.train_loss(), window));
    let window = (steps / 50).max(1);
    let unit = format!("nats per {unit}");
    let chart = curves("Training loss over steps", &unit, &smoothed(window));
    let chart = format!("{chart}\n{}", legend(0));
    section(out, "Training loss", &means(window), &chart);
    let window = (steps / 20).max(1);
    let lines = smoothed(window);
    let Some((base, others)) = lines.split_first().filter(|(_, others)| !others.is_empty()) else {
        return;
    };
    let gap = |line: &Series<'_, Vec<f64>>| {
        let percent = |(&loss, &base): (&f64, &f64)| (loss / base - 1.0) * 100.0;
        line.values.iter().zip(&base.values).map(percent).collect()
    };
    let gaps: Vec<_> = others
        .iter()
        .map(|line| Series {
            name: line.name,
            style: line.style,
            values: gap(line),
        })
        .collect();
    let unit = format!("% above {}", base.name);
    let chart = curves("Gap of the training loss over steps", &unit, &gaps);
    let note = format!("Same seed and batches. {}", means(window));
    let chart = format!("{chart}\n{}", legend(1));
    section(out, "Gap of the training loss", &note, &chart);
}

fn means(window: usize) -> String {
    match window {
        1 => "Each step.".to_owned(),
        _ => format!("Each point is the mean of {window} steps."),
    }
}

/// The bars of bytes, marked with what bf16 would take.
fn bytes(out: &mut String, setup: &Setup, summaries: &[Summary<'_>]) {
    let bf16 = columns::in_bf16(setup);
    let bars_of = |title: &str, of: fn(&RunResult) -> u64, mark: Option<u64>| {
        let entries = series(summaries, |summary| {
            summary.first.per_weight(of(summary.first))
        });
        let first = summaries.first().map(|summary| summary.first);
        let mark = mark.zip(first);
        let mark = mark.map(|(bytes, run)| ("bf16", run.per_weight(bytes)));
        bars(title, &entries, mark)
    };
    let [resident, sent] = [0, 1].map(|which| bf16.map(|bytes| bytes[which]));
    section(
        out,
        "Weights resident between steps",
        "Bytes per weight of the linear layers.",
        &bars_of(
            "Resident bytes per weight",
            |run| run.resident_weight_bytes,
            resident,
        ),
    );
    section(
        out,
        "Weights on the wire per step",
        "Bytes per weight of the linear layers, gathered for forward and for backward.",
        &bars_of(
            "Bytes on the wire per weight and step",
            |run| run.wire_bytes_per_step,
            sent,
        ),
    );
}

//! The tables of a model's plan.

use super::made::Plan;
use crate::columns::Columns;
use crate::output::shown;
use lowp_comm::GradWire;
use lowp_fsdp::Sharding;
use lowp_fsdp::cost::{CollectiveCost, MovedBytes, OffloadCost, Spread};

/// The whole plan as text.
pub(super) fn render(plan: &Plan<'_>) -> String {
    let mut text = head(plan);
    text += &memory(plan);
    text += &spread(plan);
    text += &step(plan);
    for note in &plan.notes {
        text += &wrapped(&format!("Note: {note}."));
    }
    text
}

/// What the plan is of.
fn head(plan: &Plan<'_>) -> String {
    let Plan {
        recipe,
        model,
        setup,
        ..
    } = plan;
    let [linears, variables] = model.shapes.parameters();
    let mut options = vec![format!("{recipe}, {} (replicate x shard)", setup.mesh)];
    let sharding = setup.sharding.name();
    options.push(match setup.sharding {
        Sharding::Fsdp => format!("{sharding}, reshard after forward {}", setup.reshard),
        Sharding::Zero1 => sharding.to_owned(),
    });
    options.push(match setup.accumulate {
        1 => "1 micro-batch".to_owned(),
        n if setup.reduce_every_micro_batch => format!("{n} micro-batches, each reduced"),
        n => format!("{n} micro-batches"),
    });
    if setup.recompute {
        options.push("blocks recomputed".to_owned());
    }
    if setup.grad_wire == GradWire::Bf16 {
        options.push("gradients sent in bf16".to_owned());
    }
    if let Some(batch) = &plan.batch {
        options.push(format!("{} sequences at a time on a GPU", batch.sequences));
    }
    if !plan.kept_in_bf16.is_empty() {
        options.push(format!("{} layers in bf16", plan.kept_in_bf16.len()));
    }
    let nodes = match plan.nodes() {
        1 => "1 node".to_owned(),
        nodes => format!("{nodes} nodes of {} ranks", setup.per_node),
    };
    format!(
        "{}: {} parameters, {linears} of them in {} linear layers and {variables} in {} f32 variables\n{}\n{} ranks on {nodes}\n\n",
        shown(&model.name),
        linears + variables,
        model.shapes.layers.len(),
        model.shapes.vars.len(),
        options.join(", "),
        setup.mesh.world()
    )
}

fn memory(plan: &Plan<'_>) -> String {
    let (here, there) = (plan.rows(false), plan.rows(true));
    let title = format!("memory of rank {}", plan.costs.memory.rank);
    let mut table = Columns::new(&[&title, "bytes", "", "in bf16"], &[0]);
    for ((what, bytes), (_, bf16)) in here.into_iter().zip(there) {
        if bytes > 0 || bf16 > 0 {
            table.row([
                what.to_owned(),
                bytes.to_string(),
                scaled(bytes),
                scaled(bf16),
            ]);
        }
    }
    let left_out = plan.left_out().into_iter();
    let left_out = left_out.map(|(what, bytes)| match bytes {
        Some(bytes) => format!("{what} ({})", scaled(bytes)),
        None => what.to_owned(),
    });
    let left_out: Vec<String> = left_out.collect();
    format!(
        "{}{}{}{}\n",
        table.render(),
        offloaded(plan),
        wrapped(&format!(
            "Masters, states, codes and scales of a replica: {:.2} bytes per parameter of the linear layers.",
            plan.costs.state_per_parameter()
        )),
        wrapped(&format!(
            "No other rank holds more. Left out: {}.",
            left_out.join("; ")
        ))
    )
}

/// What masters and states on the host take there, and of the bus.
fn offloaded(plan: &Plan<'_>) -> String {
    let OffloadCost {
        bytes_per_rank,
        bytes_per_node,
        read_per_step,
        written_per_step,
        ..
    } = plan.costs.offloaded;
    match bytes_per_rank {
        0 => String::new(),
        _ => wrapped(&format!(
            "Masters and states are page-locked memory of the host: {} per rank, {} on a host of {} ranks. In a step each GPU reads at \
             least {} of them over PCIe and writes {}.",
            scaled(bytes_per_rank),
            scaled(bytes_per_node),
            plan.setup.per_node.min(plan.setup.mesh.world()),
            scaled(read_per_step),
            scaled(written_per_step)
        )),
    }
}

/// How evenly ranks have and send the linear layers.
fn spread(plan: &Plan<'_>) -> String {
    if plan.setup.mesh.shard == 1 {
        return String::new();
    }
    let spread = &plan.costs.spread;
    let mut table = Columns::new(
        &[
            "of linear layers, by rank",
            "min",
            "mean",
            "max",
            "max / mean",
        ],
        &[0],
    );
    let mut row = |what: &str, Spread { min, mean, max }: Spread, ratio: f64| {
        let ratio = format!("{ratio:.3}");
        table.row([
            what.to_owned(),
            scaled(min),
            scaled(mean),
            scaled(max),
            ratio,
        ]);
    };
    for (what, bytes) in spread.rows() {
        if bytes.max > 0 {
            row(what, bytes, bytes.ratio());
        }
    }
    for sent in &spread.sent {
        let what = format!("{}, of a block", sent.what);
        row(&what, sent.bytes, sent.bytes.ratio());
    }
    format!("{}\n", table.render())
}

fn step(plan: &Plan<'_>) -> String {
    let mut header = vec!["in one step", "code", "passes", "sent"];
    header.extend([
        "node / rank",
        "between / rank",
        "node / world",
        "between / world",
    ]);
    if plan.bandwidth.is_some() {
        header.push("ms");
    }
    let mut table = Columns::new(&header, &[0, 1]);
    let row = |what: &str, code: &str, passes: String, sent: u128, of: &dyn Fn() -> Vec<String>| {
        let mut cells = vec![what.to_owned(), code.to_owned(), passes, scaled(sent)];
        cells.extend(of());
        cells
    };
    let milliseconds = |seconds: Option<f64>| {
        let cell = seconds.map_or_else(|| "-".to_owned(), |s| format!("{:.3}", s * 1e3));
        plan.bandwidth.map(|_| cell)
    };
    let links = |moved: MovedBytes, seconds: Option<f64>| {
        let mut cells = vec![
            scaled(moved.rank.within_node),
            scaled(moved.rank.between_nodes),
            scaled(moved.world.within_node),
            scaled(moved.world.between_nodes),
        ];
        cells.extend(milliseconds(seconds));
        cells
    };
    for operation in &plan.costs.step.operations {
        let CollectiveCost {
            what,
            code,
            passes,
            sent,
            moved,
            seconds,
            ..
        } = operation;
        table.row(row(what, code, passes.to_string(), *sent, &|| {
            links(*moved, *seconds)
        }));
    }
    for (what, costs) in [
        ("total", &plan.costs),
        ("total, weights in bf16", &plan.bf16),
    ] {
        let step = &costs.step;
        let sent = step.operations.iter().map(|op| op.sent).sum();
        table.row(row(what, "", String::new(), sent, &|| {
            links(step.moved(), step.seconds())
        }));
    }
    format!("{}{}", table.render(), summary(plan))
}

/// What it comes to, in sentences.
fn summary(plan: &Plan<'_>) -> String {
    let (here, bf16) = (&plan.costs.step, &plan.bf16.step);
    let ratio = |bf16: u128, here: u128| match here {
        0 => "-".to_owned(),
        here => format!("{:.2}", bf16 as f64 / here as f64),
    };
    let mut text = format!(
        "Weights: {} bytes sent by a replica, in bf16 {} ({} times as many).\n",
        here.wire_bytes(),
        bf16.wire_bytes(),
        ratio(bf16.wire_bytes(), here.wire_bytes())
    );
    match (plan.bandwidth, here.seconds(), bf16.seconds()) {
        (Some(bandwidth), Some(seconds), Some(reference)) => {
            let between = bandwidth.between_nodes.as_ref();
            let between = between.map_or_else(String::new, |rate| {
                format!(", {} between nodes", rate.source())
            });
            text += &wrapped(&format!(
                "Gathers: {:.3} ms, in bf16 {:.3} ms, one layer after the other without overlap, at {} within a node{between}.",
                seconds * 1e3,
                reference * 1e3,
                bandwidth.within_node.source()
            ));
        }
        _ => {
            text += &wrapped(
                "The time of gathers: add --bandwidth with GB/s within a node and between nodes, or with the JSON of \
                 `lowp bench --device cuda --ranks N --json FILE`.",
            );
        }
    }
    text
}

/// Lines of at most 100 characters, where words allow it.
fn wrapped(text: &str) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for word in text.split(' ') {
        let len = word.chars().count();
        match column {
            0 => column = len,
            column_before if column_before + 1 + len > 100 => {
                out.push('\n');
                column = len;
            }
            _ => {
                out.push(' ');
                column += 1 + len;
            }
        }
        out += word;
    }
    out + "\n"
}

/// Bytes with a unit, in powers of 1000.
fn scaled(bytes: u128) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let (mut value, mut unit) = (bytes as f64 / 1e3, 0);
    while value >= 999.9995 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1e3, unit + 1);
    }
    format!("{value:.3} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::scaled;

    #[test]
    fn units_of_bytes() {
        for (bytes, expected) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.000 kB"),
            (999_999, "999.999 kB"),
            (999_999_999, "1.000 GB"),
            (1_234_567_890_123, "1.235 TB"),
            (1 << 70, "1180.592 EB"),
        ] {
            assert_eq!(scaled(bytes), expected);
        }
    }
}

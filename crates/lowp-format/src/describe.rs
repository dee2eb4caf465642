//! Readable tables of buffers, gathers and layouts, for `lowp plan`, reviews and error hunting.
//!
//! Everything is rendered from the same specs and plans that run; no recipe has text of its own.

use std::fmt::Write;
use std::ops::Range;

use crate::{
    Axis, BufferSpec, Form, FormatError, GatherPlan, GatherStep, Orientation, Origin, PieceLayout,
    Recipe, RowCuts, ScaleLayout, Shape, Table, Usage,
};

/// The buffers of a tensor of `shape` that serves `usage`, one line each: code, origin, physical
/// axes, entries and bytes of the Compact form, row quantum, and shape and bytes of the Padded and
/// bytes of the Swizzled form. A buffer whose other forms depend on the orientation that it is
/// used for has one line per orientation.
///
/// # Errors
/// A shape that the recipe cannot take.
pub fn buffers_table(
    recipe: &impl Recipe,
    shape: Shape,
    usage: Usage,
) -> Result<String, FormatError> {
    recipe.check(shape)?;
    let specs = recipe.buffers(usage);
    let header = [
        "buffer",
        "code",
        "origin",
        "axes",
        "entries",
        "bytes",
        "quantum",
        "used",
        "padded",
        "padded bytes",
        "swizzled bytes",
    ];
    let mut table = Table::new(header, &[0, 1, 2, 3, 7]);
    for spec in &specs {
        let compact = [
            spec.key.to_string(),
            spec.code.to_string(),
            origin(spec),
            spec.axes.map(axis).join("x"),
            sides(spec.entries(shape)),
            spec.bytes(shape).to_string(),
            spec.row_quantum().to_string(),
        ];
        for (i, forms) in other_forms(spec, shape, usage)?.into_iter().enumerate() {
            // The second orientation of a shared buffer repeats nothing.
            let left = compact
                .iter()
                .map(|cell| if i == 0 { cell.as_str() } else { "" });
            table.row(left.map(str::to_owned).chain(forms));
        }
    }
    let stored = recipe.stored(usage);
    Ok(format!(
        "{} {shape}, usage {usage}\n{table}total {}; ranks store {}\n",
        recipe.name(),
        bytes_of(&specs, shape),
        bytes_of(&stored, shape),
    ))
}

/// What each plan exchanges, one line per step: what is concatenated, derived or replicated, how
/// it travels, the bytes of a rank's piece, the bytes on the wire and whether the buffer stays.
/// Plans come with a label, such as the name of their phase.
pub fn gather_table(plans: &[(&str, &GatherPlan)]) -> String {
    let header = [
        "phase",
        "step",
        "buffer",
        "how",
        "rank bytes",
        "wire bytes",
        "kept",
    ];
    let mut table = Table::new(header, &[0, 1, 2, 3, 6]);
    let mut totals = String::new();
    let mut sum = 0;
    for (label, plan) in plans {
        for step in &plan.steps {
            let [kind, how, pieces, kept] = step_cells(step);
            let wire = step.wire_bytes().to_string();
            let key = step.spec().key.to_string();
            table.row([(*label).to_owned(), kind, key, how, pieces, wire, kept]);
        }
        let bytes = plan.wire_bytes();
        sum += bytes;
        let each = per_weight(bytes, plan.full);
        let _ = writeln!(
            totals,
            "{label}: {bytes} bytes on the wire, {each} per weight"
        );
    }
    let Some((_, first)) = plans.first() else {
        return totals;
    };
    let each = per_weight(sum, first.full);
    format!(
        "{} over {} ranks, rows {}\n{table}{totals}total: {sum} bytes on the wire, {each} per weight\n",
        first.full,
        first.cuts.world(),
        rows_of_ranks(&first.cuts),
    )
}

/// What each rank stores, and what it sends for each plan, one line per run of equal ranks. The
/// plans are labelled, begin from the same cuts, and together serve `usage`.
pub fn ranks_table(recipe: &impl Recipe, usage: Usage, plans: &[(&str, &GatherPlan)]) -> String {
    let Some((_, first)) = plans.first() else {
        return String::new();
    };
    let stored = recipe.stored(usage);
    let mut header = vec!["ranks".to_owned(), "rows".into(), "stores bytes".into()];
    header.extend(plans.iter().map(|(label, _)| format!("sends {label}")));
    let mut table = Table::new(header, &[]);
    let numbers = first.cuts.ranges().enumerate().map(|(rank, rows)| {
        let sends = plans.iter().map(|(_, plan)| sent(plan, rank));
        (rows.len(), sends.collect::<Vec<_>>())
    });
    for (ranks, (rows, sends)) in equal_runs(numbers) {
        let shard = first.full.with_rows(rows);
        let bytes: usize = stored.iter().map(|spec| spec.bytes(shard)).sum();
        let name = match ranks.len() {
            1 => format!("{}", ranks.start),
            _ => format!("{}-{}", ranks.start, ranks.end - 1),
        };
        let numbers = [rows, bytes].into_iter().chain(sends);
        table.row([name].into_iter().chain(numbers.map(|n| n.to_string())));
    }
    table.to_string()
}

/// Bytes that `rank` puts on the wire.
fn sent(plan: &GatherPlan, rank: usize) -> usize {
    let of_step = |step: &GatherStep| match step {
        GatherStep::Concat { pieces, .. } => pieces[rank],
        GatherStep::Derive { .. } | GatherStep::Replicated { .. } => 0,
    };
    plan.steps.iter().map(of_step).sum()
}

/// Runs of consecutive ranks with the same numbers.
fn equal_runs<T: PartialEq>(of_ranks: impl Iterator<Item = T>) -> Vec<(Range<usize>, T)> {
    let mut runs: Vec<(Range<usize>, T)> = Vec::new();
    for (rank, numbers) in of_ranks.enumerate() {
        match runs.last_mut() {
            Some((ranks, same)) if *same == numbers => ranks.end = rank + 1,
            _ => runs.push((rank..rank + 1, numbers)),
        }
    }
    runs
}

/// `80 + 56`, one number per rank; runs of equal ranks as `960 x 32` where there are many ranks.
fn rows_of_ranks(cuts: &RowCuts) -> String {
    const SPELLED: usize = 16;
    let text: Vec<String> = if cuts.world() <= SPELLED {
        cuts.ranges().map(|r| r.len().to_string()).collect()
    } else {
        let run = |(ranks, rows): (Range<usize>, usize)| match ranks.len() {
            1 => rows.to_string(),
            many => format!("{many} x {rows}"),
        };
        let rows = cuts.ranges().map(|r| r.len());
        equal_runs(rows).into_iter().map(run).collect()
    };
    text.join(" + ")
}

/// Which entry lies where: the buffer in memory order, 16 entries a line, each cell the entry's
/// `outer,inner` index, `.` for padding. Lines of nothing but padding are drawn once.
pub fn layout_map(layout: &ScaleLayout) -> String {
    const LINE: usize = 16;
    /// A swizzle tile is 512 entries; a gap after each keeps them apart.
    const TILE_LINES: usize = 32;
    let mut cells = vec![String::from("."); layout.bytes() * 8 / layout.code().bits()];
    for i in 0..layout.entries()[0] {
        for j in 0..layout.entries()[1] {
            cells[layout.offset(i, j)] = format!("{i},{j}");
        }
    }
    let width = cells.iter().map(String::len).max().unwrap_or(0);
    let mut map = format!(
        "{} entries, {} form, {} bytes\n",
        sides(layout.entries()),
        layout.form().name(),
        layout.bytes()
    );
    let mut padding = false;
    for (number, line) in cells.chunks(LINE).enumerate() {
        if layout.form() == Form::Swizzled && number % TILE_LINES == 0 {
            let _ = writeln!(map, "tile {}", number / TILE_LINES);
            padding = false;
        }
        let blank = line.iter().all(|cell| cell == ".");
        if !(blank && padding) {
            let groups: Vec<String> = line.chunks(4).map(|g| padded_cells(g, width)).collect();
            let text = if blank {
                "padding".to_owned()
            } else {
                groups.join(" | ")
            };
            let _ = writeln!(map, "{:>6}: {text}", number * LINE);
        }
        padding = blank;
    }
    map
}

fn padded_cells(cells: &[String], width: usize) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| format!("{cell:>width$}")).collect();
    cells.join(" ")
}

fn axis(axis: Axis) -> &'static str {
    match axis {
        Axis::Rows => "M",
        Axis::Cols => "K",
    }
}

fn sides([outer, inner]: [usize; 2]) -> String {
    format!("{outer}x{inner}")
}

fn origin(spec: &BufferSpec) -> String {
    match spec.origin {
        Origin::Quantized => "quantized".to_owned(),
        Origin::TransposeOf(key) => format!("from {key}"),
        Origin::Replicated => "replicated".to_owned(),
    }
}

/// The cells of Padded and Swizzled: one line per distinct outcome over the orientations served.
fn other_forms(
    spec: &BufferSpec,
    shape: Shape,
    usage: Usage,
) -> Result<Vec<[String; 4]>, FormatError> {
    let mut lines: Vec<(Usage, [String; 3])> = Vec::new();
    for orientation in (spec.key.usage & usage).orientations() {
        let cells = forms_for(spec, shape, orientation)?;
        match lines.iter_mut().find(|(_, known)| *known == cells) {
            Some((served, _)) => *served |= orientation.usage(),
            None => lines.push((orientation.usage(), cells)),
        }
    }
    let line = |(served, [padded, bytes, swizzled]): (Usage, [String; 3])| {
        [served.to_string(), padded, bytes, swizzled]
    };
    Ok(lines.into_iter().map(line).collect())
}

fn forms_for(
    spec: &BufferSpec,
    shape: Shape,
    orientation: Orientation,
) -> Result<[String; 3], FormatError> {
    let layout = |form| ScaleLayout::new(spec, shape, orientation, form);
    let padded = layout(Form::Padded)?;
    let swizzled = match layout(Form::Swizzled) {
        Ok(swizzled) => swizzled.bytes().to_string(),
        Err(FormatError::NoSuchForm { .. }) => "-".to_owned(),
        Err(error) => return Err(error),
    };
    Ok([sides(padded.padded()), padded.bytes().to_string(), swizzled])
}

/// Kind, layout, bytes per rank, kept.
fn step_cells(step: &GatherStep) -> [String; 4] {
    match step {
        GatherStep::Concat {
            layout,
            pieces,
            keep,
            ..
        } => {
            let how = match layout {
                PieceLayout::Rows => "in place",
                PieceLayout::Interleave => "interleave",
                PieceLayout::Transpose => "transpose",
                PieceLayout::TilesBelow | PieceLayout::TilesBeside => "tiles",
            };
            let kept = if *keep { "yes" } else { "no, a source" };
            [
                "gather".into(),
                how.into(),
                piece_sizes(pieces),
                kept.into(),
            ]
        }
        GatherStep::Derive { from, .. } => [
            "derive".into(),
            format!("from {from}"),
            "-".into(),
            "yes".into(),
        ],
        GatherStep::Replicated { .. } => {
            ["replicated".into(), "-".into(), "-".into(), "yes".into()]
        }
    }
}

/// Smallest and largest piece of the ranks that have one, and how many have none.
fn piece_sizes(pieces: &[usize]) -> String {
    let filled = || pieces.iter().copied().filter(|&bytes| bytes > 0);
    let empty = pieces.len() - filled().count();
    let mut text = match (filled().min(), filled().max()) {
        (Some(min), Some(max)) if min == max => format!("{min}"),
        (Some(min), Some(max)) => format!("{min} to {max}"),
        _ => "0".to_owned(),
    };
    if empty > 0 {
        let _ = write!(text, " ({empty} empty)");
    }
    text
}

fn bytes_of(specs: &[BufferSpec], shape: Shape) -> String {
    let bytes: usize = specs.iter().map(|spec| spec.bytes(shape)).sum();
    format!("{bytes} bytes, {} per weight", per_weight(bytes, shape))
}

fn per_weight(bytes: usize, shape: Shape) -> String {
    match shape.elements() {
        0 => "-".to_owned(),
        elements => format!("{:.4}", bytes as f64 / elements as f64),
    }
}

//! The tables of `lowp inspect`.

use crate::columns::Columns;
use crate::output::{message, shown};
use lowp_file::checkpoint;
use lowp_file::inspect::{OrientationReport, QuantizedReport, Report, TensorReport};

/// The tables of one model; `errors` says whether there is a reference to have errors against.
pub(super) fn render(report: &Report, errors: bool) -> String {
    let header = [
        "tensor",
        "recipe",
        "source",
        "shape",
        "usage",
        "scales",
        "bytes",
        "bits each",
    ];
    let mut table = Columns::new(&header, &[0, 1, 2, 3, 4, 5]);
    for tensor in &report.tensors {
        table.row(cells(tensor));
    }
    let quantized = || {
        let tensors = report.tensors.iter();
        tensors.filter_map(|tensor| Some((tensor, tensor.quantized.as_ref()?)))
    };
    let mut out = format!(
        "{}: {} tensors, {} quantized, {} bytes, {} bits per element\n\n{}",
        message(&report.path),
        report.tensors.len(),
        quantized().count(),
        report.bytes,
        bits(report.bits_per_element),
        table.render()
    );
    if quantized().next().is_some() {
        out.push('\n');
        out += &statistics(quantized(), errors).render();
    }
    out
}

fn cells(tensor: &TensorReport) -> [String; 8] {
    let quantized = tensor.quantized.as_ref();
    let of = |value: fn(&QuantizedReport) -> String| quantized.map_or_else(dash, value);
    let mut shape = shape_text(&tensor.shape);
    if let Some([start, end]) = tensor.rows {
        shape += &format!(" rows {start}..{end}");
    }
    [
        tensor.name.clone(),
        // With its element code, where that is a choice.
        of(|q| format!("{} {}", q.recipe, q.elements)),
        tensor.dtype.clone(),
        shape,
        of(|q| q.usage.clone()),
        of(|q| q.scales.clone()),
        tensor.bytes.to_string(),
        bits(tensor.bits_per_element),
    ]
}

fn statistics<'a>(
    tensors: impl Iterator<Item = (&'a TensorReport, &'a QuantizedReport)>,
    errors: bool,
) -> Columns {
    let mut header = vec![
        "tensor",
        "used",
        "scales",
        "min",
        "max",
        "zeros",
        "saturated",
    ];
    if errors {
        header.extend(["rel error", "max error", "non-finite"]);
    }
    let mut table = Columns::new(&header, &[0, 1]);
    let float = |value: Option<f32>| value.map_or_else(dash, |v| format!("{v:.4e}"));
    let count = |value: Option<usize>| value.map_or_else(dash, |v| v.to_string());
    for (tensor, quantized) in tensors {
        for OrientationReport {
            orientation,
            stats,
            distance,
        } in &quantized.orientations
        {
            let mut cells = vec![
                tensor.name.clone(),
                (*orientation).to_owned(),
                stats.scales.to_string(),
                float(stats.min),
                float(stats.max),
                count(stats.zeros),
                count(stats.saturated),
            ];
            if let Some(distance) = distance {
                cells.extend([
                    format!("{:.4e}", distance.relative),
                    format!("{:.4e}", distance.largest),
                    distance.non_finite.to_string(),
                ]);
            }
            table.row(cells);
        }
    }
    table
}

fn dash() -> String {
    "-".to_owned()
}

fn shape_text(shape: &[usize]) -> String {
    /// Where so many are there, the table needs no more.
    const AXES: usize = 16;
    let axes: Vec<String> = shape.iter().take(AXES).map(usize::to_string).collect();
    match shape.len() {
        0 => "scalar".to_owned(),
        count if count <= AXES => axes.join("x"),
        count => format!("{}x.. ({count} axes)", axes.join("x")),
    }
}

fn bits(bits_per_element: Option<f64>) -> String {
    bits_per_element.map_or_else(dash, |bits| format!("{bits:.3}"))
}

pub(super) fn render_checkpoint(report: &checkpoint::Report) -> String {
    let mut table = Columns::new(&["tensor", "dtype", "shape", "bytes", "pieces"], &[0, 1]);
    for tensor in &report.tensors {
        let [rows, cols] = tensor.shape;
        table.row([
            tensor.name.clone(),
            tensor.dtype.to_owned(),
            format!("{rows}x{cols}"),
            tensor.bytes.to_string(),
            tensor.pieces.to_string(),
        ]);
    }
    let recipe = report.recipe.as_str().unwrap_or("?");
    format!(
        "{}: step {} of {}, saved by {} ranks: {} bytes in {} tensors, all checksums match\n\n{}",
        shown(&report.path),
        report.step,
        shown(recipe),
        report.ranks,
        report.bytes,
        report.tensors.len(),
        table.render()
    )
}

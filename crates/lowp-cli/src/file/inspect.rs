//! `lowp inspect`: tables of what a file, a sharded model or a folder of rank files holds.

use super::dequantize::orientation;
use super::fields::holding;
use super::meta::{self, Quantized};
use super::model::{Model, Tensor as Source};
use super::ranks;
use super::refuse::refuse_file;
use super::stats::{Distance, Stats};
use super::unpack::unpack;
use crate::columns::Columns;
use crate::output::{dims, message, shown};
use anyhow::Result;
use lowp_format::{Orientation, Part, Recipe};
use lowp_kernels::Cpu;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Show the tensors of a model: recipes, bytes, scales, errors
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp inspect q.safetensors
  lowp inspect q.safetensors --reference model.safetensors
  lowp inspect ranks

Columns: `scales` is the number of scales, `min` and `max` are the stored values of block scales
(of the tensor's scale where there are none). `zeros` and `saturated` count elements that are 0,
and elements at the largest magnitude of their code. With --reference, `rel error` is the root
of the squared error over the squared reference, `max error` the largest absolute error.")]
pub(crate) struct Args {
    /// A .safetensors file, the .safetensors.index.json of a sharded model, or a folder of rank files
    input: PathBuf,

    /// The model before it was quantized: shows errors
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be read, or a reference that does not fit it.
pub(super) fn main(args: &Args) -> Result<()> {
    let files = if args.input.is_dir() {
        ranks::paths(&args.input)?
    } else {
        vec![args.input.clone()]
    };
    let reference = args
        .reference
        .as_ref()
        .map(|path| Model::open(path))
        .transpose()?;
    for (i, file) in files.iter().enumerate() {
        let text = describe(&Model::open(file)?, reference.as_ref())?;
        let gap = if i == 0 { "" } else { "\n" };
        crate::output::print(&format!("{gap}{text}"))?;
    }
    Ok(())
}

/// The tables of one model.
fn describe(model: &Model, reference: Option<&Model>) -> Result<String> {
    let tensors = meta::quantized(model)?;
    let fields: BTreeSet<String> = tensors
        .values()
        .flat_map(|tensor| tensor.fields.iter().map(|field| field.name(&tensor.name)))
        .collect();
    let mut rows: BTreeMap<&str, [String; 7]> = BTreeMap::new();
    let (mut bytes, mut elements) = (0, 0);
    for tensor in model
        .tensors()
        .filter(|tensor| !fields.contains(tensor.name))
    {
        let count: usize = tensor.shape.iter().product();
        (bytes, elements) = (bytes + tensor.len(), elements + count);
        let dash = || "-".to_owned();
        let (dtype, shape) = (tensor.dtype.to_string(), shape_text(tensor.shape));
        let cells = [
            dash(),
            dtype,
            shape,
            dash(),
            dash(),
            tensor.len().to_string(),
            per(tensor.len(), count),
        ];
        rows.insert(tensor.name, cells);
    }
    for tensor in tensors.values() {
        let size: usize = tensor.fields.iter().map(super::fields::Field::bytes).sum();
        let count = tensor.shape.elements();
        (bytes, elements) = (bytes + size, elements + count);
        let text = &tensor.text;
        let mut shape = shape_text(&text.shape);
        if let Some(shard) = &text.shard {
            let [start, end] = shard.rows;
            shape += &format!(" rows {start}..{end}");
        }
        let cells = [
            recipe_text(tensor),
            text.dtype.clone(),
            shape,
            text.usage.clone(),
            text.scales.clone(),
            size.to_string(),
            per(size, count),
        ];
        rows.insert(&tensor.name, cells);
    }
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
    let count = rows.len();
    for (name, cells) in rows {
        table.row([name.to_owned()].into_iter().chain(cells));
    }
    let mut out = format!(
        "{}: {count} tensors, {} quantized, {bytes} bytes, {} bits per element\n\n{}",
        message(&model.path().display().to_string()),
        tensors.len(),
        per(bytes, elements),
        table.render()
    );
    if !tensors.is_empty() {
        out.push('\n');
        out += &statistics(model, &tensors, reference)?.render();
    }
    Ok(out)
}

/// The table of scales and codes.
fn statistics(
    model: &Model,
    tensors: &BTreeMap<String, Quantized>,
    reference: Option<&Model>,
) -> Result<Columns> {
    let mut header = vec![
        "tensor",
        "used",
        "scales",
        "min",
        "max",
        "zeros",
        "saturated",
    ];
    if reference.is_some() {
        header.extend(["rel error", "max error"]);
    }
    let mut table = Columns::new(&header, &[0, 1]);
    for tensor in tensors.values() {
        for side in sides(model, tensor)? {
            let found = unpack(&Cpu, model, tensor, Some(side))?;
            let stats = Stats::of(&found, side)?;
            let dash = || "-".to_owned();
            let scale = |value: Option<f32>| value.map_or_else(dash, |v| format!("{v:.4e}"));
            let count = |value: Option<usize>| value.map_or_else(dash, |v| v.to_string());
            let mut cells = vec![
                tensor.name.clone(),
                side.to_string(),
                stats.scales.to_string(),
                scale(stats.range.map(|[low, _]| low)),
                scale(stats.range.map(|[_, high]| high)),
                count(stats.zeros),
                count(stats.saturated),
            ];
            if let Some(reference) = reference {
                let (reference, from) = referred(reference, tensor)?;
                let Distance { relative, largest } = Distance::of(&found, side, &reference, from)?;
                cells.extend([format!("{relative:.4e}"), format!("{largest:.4e}")]);
            }
            table.row(cells);
        }
    }
    Ok(table)
}

/// The orientations with data of their own; rowwise only where one buffer serves both.
fn sides(model: &Model, tensor: &Quantized) -> Result<Vec<Orientation>> {
    let first = orientation(model, tensor, None)?;
    let data = |o: Orientation| {
        let mut specs = tensor
            .specs
            .iter()
            .filter(|spec| spec.key.part == Part::Data);
        let spec = specs.find(|spec| spec.key.usage.contains(o.usage()))?;
        holding(&tensor.fields, spec.key, o).map(|field| (spec.key, field))
    };
    let shared =
        data(Orientation::Rowwise).map(|d| d.0) == data(Orientation::Columnwise).map(|d| d.0);
    if shared {
        return Ok(vec![first]);
    }
    Ok(Orientation::ALL
        .into_iter()
        .filter(|o| data(*o).is_some())
        .collect())
}

/// What a tensor was quantized from, and the element that it begins with.
fn referred<'a>(reference: &'a Model, tensor: &Quantized) -> Result<(Source<'a>, usize)> {
    let name = &tensor.name;
    let Some(found) = reference.get(name) else {
        return Err(refuse_file(
            reference.path(),
            format!(
                "it has no '{}'; give the model that was quantized as --reference",
                shown(name)
            ),
        ));
    };
    if found.shape != tensor.text.shape {
        return Err(refuse_file(
            reference.path(),
            format!(
                "'{}' is {} and was quantized as {}; give the model that was quantized",
                shown(name),
                dims(found.shape),
                dims(&tensor.text.shape)
            ),
        ));
    }
    let first_row = tensor.text.shard.as_ref().map_or(0, |shard| shard.rows[0]);
    Ok((found, first_row * tensor.full.cols))
}

/// The recipe with its element code where that is a choice.
fn recipe_text(tensor: &Quantized) -> String {
    format!(
        "{} {}",
        tensor.recipe.name(),
        tensor.recipe.kernel().element
    )
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

/// Bits per element.
fn per(bytes: usize, elements: usize) -> String {
    match elements {
        0 => "-".to_owned(),
        elements => format!("{:.3}", 8.0 * bytes as f64 / elements as f64),
    }
}

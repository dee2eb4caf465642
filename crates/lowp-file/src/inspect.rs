//! What a model holds: tensors, recipes, bytes, scales and errors.

use crate::error::{Result, file_error, mend_file};
use crate::fields::{Field, holding};
use crate::meta::{self, Quantized};
use crate::model::{Model, Tensor as Source};
pub use crate::options::Options;
use crate::remedy::Remedy;
use crate::stats::{Distance, Stats};
use crate::text::{dims, shown};
use crate::unpack::{orientation, unpack};
use lowp_format::{Orientation, Part, Recipe, elements_of};
use lowp_kernels::Cpu;
use serde::Serialize;

/// One file, or one sharded model.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The path of the file, or of the index of several.
    pub path: String,
    /// Bytes of all that it holds.
    pub bytes: usize,
    /// Elements of all tensors.
    pub elements: usize,
    /// Absent where there are no elements.
    pub bits_per_element: Option<f64>,
    /// Sorted by name.
    pub tensors: Vec<TensorReport>,
}

/// One tensor, quantized or not.
#[derive(Debug, Serialize)]
pub struct TensorReport {
    /// Its name.
    pub name: String,
    /// The dtype of a tensor that is not quantized, or of what was quantized.
    pub dtype: String,
    /// The dimensions of the whole tensor.
    pub shape: Vec<usize>,
    /// First row of this file, and the one after its last, where it holds one rank's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<[usize; 2]>,
    /// Bytes of all that it holds.
    pub bytes: usize,
    /// Absent where there are no elements.
    pub bits_per_element: Option<f64>,
    /// Absent of a tensor that is not quantized.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantized: Option<QuantizedReport>,
}

/// How a tensor is quantized.
#[derive(Debug, Serialize)]
pub struct QuantizedReport {
    /// The recipe.
    pub recipe: &'static str,
    /// The element code; where orientations differ, both, as `A and B`.
    pub elements: String,
    /// The options of the recipe.
    pub options: Options,
    /// The orientations that it serves: `rowwise`, `columnwise` or `both`.
    pub usage: String,
    /// The form of the block scales.
    pub scales: String,
    /// Orientations with data of their own.
    pub orientations: Vec<OrientationReport>,
}

/// The codes and scales of one orientation.
#[derive(Debug, Serialize)]
pub struct OrientationReport {
    /// Which it is.
    pub orientation: &'static str,
    /// What they look like.
    #[serde(flatten)]
    pub stats: Stats,
    /// Absent without a reference.
    #[serde(flatten)]
    pub distance: Option<Distance>,
}

/// Looks at every tensor of `model`.
///
/// # Errors
/// Metadata or tensors that make no sense, or a reference that does not fit.
pub fn inspect(model: &Model, reference: Option<&Model>) -> Result<Report> {
    let made = model.steady(report(model, reference));
    match reference {
        Some(reference) => reference.steady(made),
        None => made,
    }
}

fn report(model: &Model, reference: Option<&Model>) -> Result<Report> {
    let quantized = meta::quantized(model)?;
    let (mut bytes, mut elements, mut tensors) = (0, 0, Vec::new());
    for tensor in meta::others(model, &quantized) {
        let count: usize = tensor.shape.iter().product();
        (bytes, elements) = (bytes + tensor.len(), elements + count);
        tensors.push(TensorReport {
            name: tensor.name.to_owned(),
            quantized: None,
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape.to_vec(),
            rows: None,
            bytes: tensor.len(),
            bits_per_element: per(tensor.len(), count),
        });
    }
    for tensor in quantized.values() {
        let size: usize = tensor.fields.iter().map(Field::bytes).sum();
        let count = tensor.shape.elements();
        (bytes, elements) = (bytes + size, elements + count);
        let text = &tensor.text;
        tensors.push(TensorReport {
            name: tensor.name.clone(),
            quantized: Some(QuantizedReport {
                recipe: tensor.recipe.name(),
                elements: elements_of(&tensor.recipe),
                options: text.options.clone(),
                usage: text.usage.clone(),
                scales: text.scales.clone(),
                orientations: side_reports(model, tensor, reference)?,
            }),
            dtype: text.dtype.clone(),
            shape: text.shape.clone(),
            rows: text.shard.as_ref().map(|shard| shard.rows),
            bytes: size,
            bits_per_element: per(size, count),
        });
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Report {
        path: model.path().display().to_string(),
        bytes,
        elements,
        bits_per_element: per(bytes, elements),
        tensors,
    })
}

/// The codes and scales of `tensor`, and their error against `reference`.
fn side_reports(
    model: &Model,
    tensor: &Quantized,
    reference: Option<&Model>,
) -> Result<Vec<OrientationReport>> {
    let mut reports = Vec::new();
    for side in sides(model, tensor)? {
        let found = unpack(&Cpu, model, tensor, Some(side))?;
        let distance = match reference {
            Some(reference) => {
                let (reference, start) = source_of(tensor, reference)?;
                Some(Distance::of(&found, side, &reference, start)?)
            }
            None => None,
        };
        reports.push(OrientationReport {
            orientation: side.usage().label(),
            stats: Stats::of(&found, side)?,
            distance,
        });
    }
    Ok(reports)
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

/// What a tensor of `model` was quantized from, and the element of it that the tensor begins with.
fn source_of<'a>(tensor: &Quantized, model: &'a Model) -> Result<(Source<'a>, usize)> {
    let name = &tensor.name;
    let Some(found) = model.get(name) else {
        return Err(mend_file(
            model.path(),
            format!("it has no '{}'", shown(name)),
            Remedy::GiveReference,
        ));
    };
    if found.shape != tensor.text.shape {
        return Err(file_error!(
            model.path(),
            "'{}' is {} and was quantized as {}; give the model that was quantized",
            shown(name),
            dims(found.shape),
            dims(&tensor.text.shape)
        ));
    }
    let first_row = tensor.text.shard.as_ref().map_or(0, |shard| shard.rows[0]);
    Ok((found, first_row * tensor.full.cols))
}

/// Bits per element; `None` where there are no elements.
fn per(bytes: usize, elements: usize) -> Option<f64> {
    (elements > 0).then(|| 8.0 * bytes as f64 / elements as f64)
}

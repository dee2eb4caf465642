//! Which tensors of a model are the weights of another program.

use super::weight::Weight;
use crate::error::{Result, file_error, mend_file};
use crate::fields;
use crate::interchange::config::source_dtype;
use crate::interchange::forms::{self, Content, FORMS, Form, base};
use crate::interchange::hub::Hub;
use crate::interchange::record::{Recorded, records};
use crate::meta::{Quantized, Text};
use crate::model::{Model, Tensor};
use crate::remedy::Remedy;
use crate::text::{dims, shown};
use lowp_format::{BufferSpec, Origin, Recipe, Shape, Usage};
use safetensors::Dtype;
use std::collections::BTreeSet;

/// Last parts of names of tensors without which others mean something else.
const TELLING: [&str; 10] = [
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "qweight",
    "pre_quant_scale",
];

/// The weights of `hub`: those that it says it has, and those whose tensors are those of a form.
pub(crate) fn weights(hub: &Hub) -> Result<Vec<Weight<'_>>> {
    let model = &hub.model;
    let mut weights = Vec::new();
    let mut taken: BTreeSet<String> = BTreeSet::new();
    for (name, recorded) in records(model)? {
        let weight = recorded_weight(model, &name, recorded)?;
        taken.extend(weight.names());
        weights.push(weight);
    }
    for tensor in model
        .tensors()
        .filter(|tensor| !taken.contains(tensor.name))
    {
        let stem = ["weight", "weight_packed"].into_iter().find_map(|suffix| {
            let base = tensor.name.strip_suffix(suffix)?;
            (base.is_empty() || base.ends_with('.')).then_some(base)
        });
        let Some(stem) = stem else { continue };
        let found = FORMS
            .iter()
            .find_map(|form| Some((form, fit(model, stem, form)?)));
        if let Some((form, shape)) = found {
            weights.push(foreign_weight(hub, stem, form, shape)?);
        }
    }
    taken.extend(weights.iter().flat_map(Weight::names));
    reject_parts(model, &taken)?;
    Ok(weights)
}

/// The matrix that the tensors of `stem` are in `form`, if they all are there and nothing else.
fn fit(model: &Model, stem: &str, form: &Form) -> Option<Shape> {
    let codes = form
        .tensors
        .iter()
        .find(|stored| stored.content == Content::Codes)?;
    let found = model.get(&format!("{stem}{}", codes.suffix))?;
    let &[rows, cols] = found.shape else {
        return None;
    };
    let in_each = match found.dtype {
        Dtype::F4 => 1,
        _ => form.operand.per_byte(),
    };
    let shape = Shape::new(rows, cols.checked_mul(in_each)?);
    fields::matrix(&[shape.rows, shape.cols]).ok()?;
    let fits = form.tensors.iter().all(|stored| {
        let found = model.get(&format!("{stem}{}", stored.suffix));
        found.is_some_and(|found| stored.takes(&form.operand, shape, found.dtype, found.shape))
    });
    fits.then_some(shape)
}

/// A weight of a file that lowp exported.
fn recorded_weight<'a>(model: &'a Model, name: &str, recorded: Recorded) -> Result<Weight<'a>> {
    let Recorded { tensor, numbers } = recorded;
    let made = |spec: &BufferSpec| {
        let rowwise = spec.key.usage.contains(Usage::ROWWISE);
        rowwise
            || matches!(spec.origin, Origin::TransposeOf(key) if key.usage.contains(Usage::ROWWISE))
    };
    if !tensor.specs.iter().all(made) {
        return Err(file_error!(
            model.path(),
            "it says that '{}' is {} for {}, and the columnwise operand of that is in no form; export the model again",
            shown(name),
            tensor.recipe.name(),
            tensor.usage
        ));
    }
    let mut forms = forms::forms_of(&tensor.recipe);
    let found = forms.find(|form| {
        let stem = match form.tensors.len() {
            1 => model.get(name).map(|_| name),
            _ => base(name),
        };
        stem.is_some_and(|stem| stored_as(model, stem, form, &tensor))
    });
    match found {
        Some(_) => Ok(Weight {
            model,
            tensor,
            form: found,
            recorded: Some(numbers),
        }),
        None => Err(file_error!(
            model.path(),
            "it says that it has '{}' as {} of shape {}, and the tensors of that name are not all there or are something else; \
                 export the model again",
            shown(name),
            tensor.recipe.name(),
            dims(&tensor.text.shape)
        )),
    }
}

fn stored_as(model: &Model, stem: &str, form: &Form, tensor: &Quantized) -> bool {
    if let [only] = form.tensors {
        let found = model.get(stem);
        return found
            .is_some_and(|found| found.dtype == only.dtype && found.shape == tensor.text.shape);
    }
    fit(model, stem, form) == Some(tensor.full)
}

/// A weight of somebody else's file.
fn foreign_weight<'a>(
    hub: &'a Hub,
    stem: &str,
    form: &'static Form,
    shape: Shape,
) -> Result<Weight<'a>> {
    let model = &hub.model;
    let name = format!("{stem}weight");
    let wrong = |why: String| file_error!(model.path(), "'{}': {why}", shown(&name));
    let recipe = forms::recipe(form).ok_or_else(|| wrong(format!("no recipe is {}", form.name)))?;
    let text = Text::new(
        &recipe,
        source_dtype(hub.config.as_ref()),
        &[shape.rows, shape.cols],
        Usage::ROWWISE,
        lowp_format::Form::Padded,
    );
    let tensor = Quantized::from_text(&name, text).map_err(wrong)?;
    Ok(Weight {
        model,
        tensor,
        form: Some(form),
        recorded: None,
    })
}

/// Rejects tensors that are parts of weights in no form that is known: as plain tensors they would mean something else.
fn reject_parts(model: &Model, taken: &BTreeSet<String>) -> Result<()> {
    let mut left = model
        .tensors()
        .filter(|tensor| !taken.contains(tensor.name));
    let is_part = |tensor: &Tensor<'_>| {
        let last = tensor.name.rsplit('.').next().unwrap_or(tensor.name);
        TELLING.contains(&last) || (last == "weight" && is_codes(tensor.dtype))
    };
    match left.find(is_part) {
        None => Ok(()),
        Some(tensor) => Err(mend_file(
            model.path(),
            format!(
                "'{}' is {} {}, a part of a quantized weight whose other parts are missing or have shapes and dtypes of no form \
                 that lowp reads",
                shown(tensor.name),
                tensor.dtype,
                dims(tensor.shape)
            ),
            Remedy::GiveWhole,
        )),
    }
}

/// Whether a dtype is that of codes, which need scales.
fn is_codes(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F8_E4M3 | Dtype::F8_E5M2 | Dtype::F4)
}

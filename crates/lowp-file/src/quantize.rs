//! A model with its matrices in a low-precision recipe.

use crate::bands::{Bands, Cast};
use crate::error::{Result, file_error};
use crate::fields::{self, Field, worked};
use crate::flat::Flat;
pub use crate::flat::FlatCuts;
use crate::groups::{Amaxes, Groups};
use crate::interchange::hub::Hub;
use crate::keys;
use crate::meta::Text;
use crate::model::{Model, Tensor};
use crate::out::Out;
use crate::outputs::{Group, Outputs};
use crate::pack::Packed;
use crate::progress::Progress;
use crate::select::{Choice, Choices, Matrix, Setup};
use crate::source::load;
use crate::text::shown;
use crate::write::{Item, Parts};
use lowp_format::{Recipe, Usage};
use lowp_kernels::Backend;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Writes what `choices` of the model in `hub` become to `out`: cast on `backend`, as ranks do that cut the flattened elements where there
/// are `cuts`, which is the same. Returns the bytes that were written.
///
/// # Errors
/// Choices of another model, a tensor that cannot be read or cast, two that would have one name, or an output that cannot be written.
pub fn quantize<B: Backend>(
    backend: &B,
    hub: &Hub,
    choices: &Choices<'_>,
    cuts: Option<FlatCuts>,
    out: Out,
    progress: &dyn Progress,
) -> Result<u64> {
    choices.are_of(&hub.model)?;
    let outputs = outputs(backend, &hub.model, &choices.all, cuts, progress)?;
    out.write([&hub.model], &outputs, progress, |target| {
        hub.other_files.copy_all(target)
    })
}

/// What `choices` of `model` become, cast through flat slices where there are `cuts`.
pub(crate) fn outputs<'a, B: Backend>(
    backend: &'a B,
    model: &Model,
    choices: &[Choice<'a>],
    cuts: Option<FlatCuts>,
    progress: &'a dyn Progress,
) -> Result<Outputs<'a>> {
    let (mut groups, mut sources) = (Vec::new(), Vec::new());
    let members = Groups::of(choices);
    let mut jobs: Vec<(Choice<'a>, Matrix, Vec<Field>)> = Vec::new();
    for &choice in choices {
        let Choice {
            tensor,
            matrix,
            group,
        } = choice;
        let Some(matrix) = matrix else {
            groups.push(Group::of(Item::input(tensor)));
            continue;
        };
        let Matrix { shape, setup } = matrix;
        let fields = setup.fields(shape);
        let fields =
            fields.map_err(|e| file_error!(model.path(), "'{}': {e}", shown(tensor.name)))?;
        let fields = fields::called(&fields, setup.dtypes);
        sources.push(tensor.len());
        let mut text = text(&setup, tensor.dtype, tensor.shape, setup.usage);
        text.amax_group = members.names(group);
        groups.push(Group::quantized(jobs.len(), tensor.name, &fields, &text)?);
        jobs.push((choice, matrix, fields));
    }
    let (amaxes, memory) = (Amaxes::default(), Rc::default());
    let make = Box::new(move |job: usize| {
        let (Choice { tensor, group, .. }, matrix, fields) = &jobs[job];
        let Matrix { shape, setup } = *matrix;
        let recipe = setup.recipe;
        let whole = |tensor: &Tensor<'_>| Ok(0..tensor.shape.iter().product());
        let shared = amaxes.of(backend, &recipe, &members, *group, whole)?;
        let fields = fields.clone();
        let Some(cuts) = &cuts else {
            let cast = Cast {
                backend,
                tensor: *tensor,
                matrix: *matrix,
                fields,
                progress,
            };
            let bands = Bands::new(cast, shared, &memory)?;
            return Ok(Box::new(bands) as Box<dyn Parts>);
        };
        let specs = setup.recipe.buffers(setup.usage);
        let flat = Flat {
            recipe,
            shape: worked(shape, shape, &specs),
            specs: &specs,
            delayed_scale: setup.delayed_scale,
            shared,
        };
        let load = |range| load(backend, tensor, range, progress);
        let (tensor, amax) = cuts.cast(backend, &flat, load)?;
        Ok(Packed::parts(backend, tensor, amax, fields))
    });
    Ok(Outputs {
        groups,
        metadata: copied_metadata(model),
        make,
        sources,
    })
}

/// The metadata of the input that are not about quantized tensors, and the version of ours.
pub(crate) fn copied_metadata(model: &Model) -> BTreeMap<String, String> {
    let foreign = model
        .metadata()
        .iter()
        .filter(|(key, _)| !keys::is_ours(key));
    let ours = (keys::FORMAT_KEY.to_owned(), keys::FORMAT.to_owned());
    foreign
        .map(|(key, value)| (key.clone(), value.clone()))
        .chain([ours])
        .collect()
}

/// What the metadata say of a tensor that was `dtype` and `shape`, stored for `usage`.
pub(crate) fn text(setup: &Setup, dtype: Dtype, shape: &[usize], usage: Usage) -> Text {
    Text {
        delayed_scale: setup.delayed_scale,
        ..Text::new(&setup.recipe, dtype, shape, usage, setup.form)
    }
}

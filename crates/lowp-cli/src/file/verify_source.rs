//! `lowp verify --source`: whether a file is what `lowp quantize` makes of a model.

use super::args::Setup;
use super::difference::{Byte, Pair};
use super::fields::{self, Field};
use super::input_error::file_error;
use super::interchange::hub::Hub;
use super::meta::{self, Quantized};
use super::model::{Model, Tensor};
use super::names::{Dtypes, Named};
use super::progress::Progress;
use super::quantize;
use super::select::{Choice, Matrix, reject_quantized};
use super::write::{Item, ItemSource, Maker, reads};
use crate::device::OnDevice;
use crate::output::{dims, shown};
use anyhow::{Result, bail};
use lowp_kernels::Backend;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The check of a quantized file against its source: the model is quantized as the file says, and compared.
#[derive(Clone, Copy, Debug)]
pub(super) struct SourceCheck<'a> {
    /// The file.
    pub(super) quantized: &'a Path,
    /// The model.
    pub(super) source: &'a Path,
}

impl OnDevice for SourceCheck<'_> {
    type Out = ();

    /// Stops at the first difference, in the order of names.
    fn run<B: Backend>(self, backend: &B) -> Result<()> {
        let file = Hub::open(self.quantized)?.model;
        let tensors = meta::quantized(&file)?;
        if let Some(name) = tensors
            .values()
            .find(|t| t.shard.is_some())
            .map(|t| &t.name)
        {
            return Err(file_error(
                file.path(),
                format!(
                    "it holds one rank's rows of '{}'; gather the folder with `lowp unshard` first",
                    shown(name)
                ),
            ));
        }
        let model = Hub::open(self.source)?.model;
        reject_quantized(&model)?;
        let choices = choices(&file, &tensors, &model)?;
        let progress = Progress::new("verify");
        let weights = quantize::weights(backend, &model, &choices, None, &progress)?;
        let outputs = weights.into_outputs();
        outputs.check()?;

        let items: BTreeMap<&str, &Item<'_>> = outputs
            .items
            .iter()
            .map(|item| (item.name.as_str(), item))
            .collect();
        let names: BTreeSet<&str> = file
            .tensors()
            .map(|tensor| tensor.name)
            .chain(items.keys().copied())
            .collect();
        let (a, b) = names_of(&file, &model);
        let requantized = format!("{b} quantized again");
        let order: Vec<&Item<'_>> = items.values().copied().collect();
        progress.begin(outputs.bytes() + reads(&order, &outputs.sources));
        let mut maker = outputs.maker();
        for name in names {
            let item = items.get(name).copied();
            let made = item.is_some_and(|item| matches!(item.source, ItemSource::Made { .. }));
            let pair = Pair {
                a: &a,
                b: if made { &requantized } else { &b },
                tensors: &tensors,
            };
            let (tensor, item) = match (file.get(name), item) {
                (Some(tensor), Some(item)) => (tensor, item),
                (_, None) => return Err(pair.only_in_a(name)),
                (None, _) => return Err(pair.only_in_b(name)),
            };
            if (tensor.dtype, tensor.shape) != (item.dtype, &item.shape[..]) {
                let (found, expected) =
                    ((tensor.dtype, tensor.shape), (item.dtype, &item.shape[..]));
                return Err(pair.kinds(name, found, expected));
            }
            if let Some(byte) = first_difference(&tensor, item, &mut maker, &progress)? {
                return Err(pair.bytes(name, byte));
            }
        }
        let (count, bytes) = (outputs.items.len(), outputs.bytes());
        drop((maker, items));
        drop(outputs);
        progress.finish();
        crate::output::print(&format!(
            "equal: {count} tensors, {bytes} bytes; {} quantized again\n",
            tensors.len()
        ))
    }
}

fn names_of(file: &Model, model: &Model) -> (String, String) {
    let name = |model: &Model| model.path().display().to_string();
    (name(file), name(model))
}

/// The tensors of `model` with what `tensors` of `file` say was made of them.
///
/// # Errors
/// A quantized tensor without a source, or with a source of another dtype or shape.
fn choices<'a>(
    file: &Model,
    tensors: &BTreeMap<String, Quantized>,
    model: &'a Model,
) -> Result<Vec<Choice<'a>>> {
    let (a, b) = names_of(file, model);
    for (name, tensor) in tensors {
        let Some(source) = model.get(name) else {
            bail!("'{}' is in {a} and not in {b}", shown(name));
        };
        let text = &tensor.text;
        if source.shape != text.shape || Named::label(source.dtype) != text.dtype {
            bail!(
                "'{}' was {} {} when it was quantized for {a} and is {} {} in {b}",
                shown(name),
                text.dtype,
                dims(&text.shape),
                source.dtype,
                dims(source.shape)
            );
        }
    }
    let groups = groups(file, tensors, model)?;
    let choice = |tensor: Tensor<'a>| Choice {
        tensor,
        group: groups.get(tensor.name).copied(),
        matrix: tensors.get(tensor.name).map(|quantized| Matrix {
            shape: quantized.full,
            setup: Setup {
                recipe: quantized.recipe,
                usage: quantized.usage,
                form: quantized.form,
                delayed_scale: quantized.text.delayed_scale,
                dtypes: dtypes(&quantized.fields),
            },
        }),
    };
    Ok(model.tensors().map(choice).collect())
}

/// What the file calls the codes of a tensor.
fn dtypes(fields: &[Field]) -> Dtypes {
    let native = fields::called(fields, Dtypes::Native);
    let is_native = fields
        .iter()
        .zip(&native)
        .all(|(field, native)| field.dtype == native.dtype);
    match is_native {
        true => Dtypes::Native,
        false => Dtypes::U8,
    }
}

/// The numbers of the groups that have one amax, by name.
fn groups<'t>(
    file: &Model,
    tensors: &'t BTreeMap<String, Quantized>,
    model: &Model,
) -> Result<BTreeMap<&'t str, usize>> {
    let (mut numbers, mut groups) = (BTreeMap::new(), BTreeMap::new());
    for (name, tensor) in tensors {
        let Some(group) = &tensor.text.amax_group else {
            continue;
        };
        // All of its members say the same.
        let other = group.iter().find(|member| {
            let of_member = tensors.get(*member).map(|other| &other.text.amax_group);
            of_member != Some(&tensor.text.amax_group)
        });
        if let Some(other) = other {
            return Err(file_error(
                file.path(),
                format!(
                    "'{}' has one amax with '{}', which is not there or says otherwise; quantize {} again",
                    shown(name),
                    shown(other),
                    model.path().display()
                ),
            ));
        }
        let next = numbers.len();
        groups.insert(name.as_str(), *numbers.entry(group).or_insert(next));
    }
    Ok(groups)
}

/// The first byte of `tensor` that is not that of `item`, which has its length.
fn first_difference(
    tensor: &Tensor<'_>,
    item: &Item<'_>,
    maker: &mut Maker<'_, '_>,
    progress: &Progress,
) -> Result<Option<Byte>> {
    let (mut start, mut found) = (0, None);
    maker.write(item, &mut |made| {
        if found.is_none() {
            let range = start..start + made.len();
            found = Byte::first(start, &tensor.bytes_at(range)?, made);
        }
        start += made.len();
        progress.add(made.len());
        Ok(())
    })?;
    Ok(found)
}

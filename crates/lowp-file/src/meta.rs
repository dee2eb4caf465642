//! What the file's metadata say of each quantized tensor: enough to read it back without any option.

use crate::cast::{has_delayed_scale, is_scale};
use crate::dtypes::Named;
use crate::error::{Result, file_error, mend_file};
use crate::fields::{self, Field};
use crate::keys::{TENSOR_PREFIX, key};
use crate::model::{Model, Tensor};
use crate::options::Options;
use crate::remedy::Remedy;
use crate::text::{message, shown};
use lowp_format::has_tensor_scale;
use lowp_format::{AnyRecipe, BufferList, Form, FormatError, Recipe, RowCuts, Shape, Usage};
use safetensors::Dtype;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShardText {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// First row, and the one after the last.
    pub(crate) rows: [usize; 2],
    /// What the whole tensor serves.
    pub(crate) usage: String,
    /// The form in which `lowp unshard` writes its block scales.
    pub(crate) scales: String,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Text {
    pub(crate) recipe: String,
    pub(crate) options: Options,
    /// The dimensions of the source, before leading ones are flattened to rows.
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: String,
    pub(crate) usage: String,
    pub(crate) scales: String,
    #[serde(
        default,
        deserialize_with = "narrow",
        skip_serializing_if = "Option::is_none"
    )]
    pub(crate) delayed_scale: Option<f32>,
    /// The names of all tensors that it has one amax with, its own among them, sorted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) amax_group: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shard: Option<ShardText>,
}

impl Text {
    /// A tensor of `dtype` and `shape` that was quantized as `recipe` says for `usage`, scales in `form`.
    pub(crate) fn new(
        recipe: &impl Recipe,
        dtype: Dtype,
        shape: &[usize],
        usage: Usage,
        form: Form,
    ) -> Self {
        Self {
            recipe: recipe.name().to_owned(),
            options: Options::of(recipe),
            shape: shape.to_vec(),
            dtype: Named::label(dtype).to_owned(),
            usage: usage.label().to_owned(),
            scales: Named::label(form).to_owned(),
            delayed_scale: None,
            amax_group: None,
            shard: None,
        }
    }
}

/// A number that f32 holds; a larger one would be infinite.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the check is made on the narrow value"
)]
fn narrow<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f32>, D::Error> {
    let Some(wide) = Option::<f64>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let narrow = wide as f32;
    if narrow.is_infinite() {
        return Err(D::Error::custom(format!(
            "it has no delayed scale {wide:?}"
        )));
    }
    Ok(Some(narrow))
}

/// The part of a tensor that a rank file holds, checked.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    pub(crate) rank: usize,
    pub(crate) cuts: RowCuts,
    pub(crate) usage: Usage,
    pub(crate) form: Form,
}

/// A quantized tensor of a file: what it is, and where its fields are.
#[derive(Clone, Debug)]
pub struct Quantized {
    pub(crate) name: String,
    pub(crate) text: Text,
    pub(crate) recipe: AnyRecipe,
    pub(crate) full: Shape,
    pub(crate) shape: Shape,
    pub(crate) usage: Usage,
    /// Of the block scales in this file.
    pub(crate) form: Form,
    pub(crate) specs: BufferList,
    pub(crate) fields: Vec<Field>,
    pub(crate) shard: Option<Shard>,
}

impl Quantized {
    pub(crate) fn check_whole(&self, model: &Model) -> Result<()> {
        match self.shard {
            None => Ok(()),
            Some(_) => Err(mend_file(
                model.path(),
                format!("'{}' is a part of a tensor", shown(&self.name)),
                Remedy::Unshard,
            )),
        }
    }

    pub(crate) fn from_text(name: &str, mut text: Text) -> Result<Self, String> {
        let named = |what: &str, name: &str| format!("it has no {what} '{name}'");
        let usage = |name: &str| Usage::named(name).ok_or_else(|| named("usage", name));
        let form = |name: &str| Form::named(name).ok_or_else(|| named("scales", name));
        let problem = |e: FormatError| e.to_string();
        let recipe = text.options.recipe(&text.recipe)?;
        // Whatever the file leaves out, or calls by an older name.
        text.options = Options::of(&recipe);
        if let Some(scale) = text.delayed_scale
            && !(has_delayed_scale(&recipe) && is_scale(scale))
        {
            return Err(format!("{} has no delayed scale {scale}", text.recipe));
        }
        if let Some(group) = &text.amax_group {
            let sorted = group.windows(2).all(|pair| pair[0] < pair[1]);
            if !sorted || group.len() < 2 || !group.iter().any(|member| member == name) {
                return Err("its amax_group is not a sorted list of names with its own".to_owned());
            }
            if !has_tensor_scale(&recipe) {
                return Err(format!("{} has no amax of a whole tensor", text.recipe));
            }
        }
        let full = fields::matrix(&text.shape).map_err(problem)?;
        recipe.check(full).map_err(problem)?;
        let shard = match &text.shard {
            None => None,
            Some(shard) => Some(read_shard(shard, &recipe, full, usage(&shard.usage)?)?),
        };
        let (shape, specs, form) = match &shard {
            None => (
                full,
                recipe.buffers(usage(&text.usage)?),
                form(&text.scales)?,
            ),
            Some(shard) => {
                let rows = shard.cuts.range(shard.rank).len();
                (
                    full.with_rows(rows),
                    recipe.stored(shard.usage),
                    Form::Compact,
                )
            }
        };
        let usage = usage(&text.usage)?;
        let fields = fields::fields(&recipe, &specs, shape, usage, form).map_err(problem)?;
        Dtype::named(&text.dtype).ok_or_else(|| named("dtype", &text.dtype))?;
        let name = name.to_owned();
        Ok(Self {
            name,
            text,
            recipe,
            full,
            shape,
            usage,
            form,
            specs,
            fields,
            shard,
        })
    }
}

/// A world that no file of ours exceeds.
pub const MAX_WORLD: usize = 1024;

fn read_shard(
    text: &ShardText,
    recipe: &AnyRecipe,
    full: Shape,
    usage: Usage,
) -> Result<Shard, String> {
    let ShardText {
        rank,
        world,
        rows: [start, end],
        ref scales,
        ..
    } = *text;
    if world > MAX_WORLD || rank >= world {
        return Err(format!("rank {rank} of {world} is out of range"));
    }
    let form = Form::named(scales).ok_or_else(|| format!("it has no scales '{scales}'"))?;
    let cuts =
        RowCuts::new(full.rows, world, recipe.row_quantum(usage)).map_err(|e| e.to_string())?;
    let range = cuts.range(rank);
    if (range.start, range.end) != (start, end) {
        return Err(format!(
            "rows {start}..{end} are not those of rank {rank}: {}..{}",
            range.start, range.end
        ));
    }
    Ok(Shard {
        rank,
        cuts,
        usage,
        form,
    })
}

/// The quantized tensors of `model`, by name; every field is there with the dtype and shape that it must have.
///
/// # Errors
/// Metadata that say nothing sensible, or that the tensors do not fit.
pub fn quantized(model: &Model) -> Result<BTreeMap<String, Quantized>> {
    let keys = model.metadata().keys();
    let names = keys.filter_map(|key| key.strip_prefix(TENSOR_PREFIX));
    let tensors = names.filter_map(|name| {
        let found = find(model, name).transpose()?;
        Some(found.map(|tensor| (name.to_owned(), tensor)))
    });
    tensors.collect()
}

/// The tensors of `model` that are no fields of the `quantized` ones.
pub(crate) fn others<'m>(
    model: &'m Model,
    quantized: &BTreeMap<String, Quantized>,
) -> impl Iterator<Item = Tensor<'m>> + use<'m> {
    let fields: BTreeSet<String> = quantized.values().flat_map(Quantized::fields).collect();
    let tensors = model.tensors();
    tensors.filter(move |tensor| !fields.contains(tensor.name))
}

pub(crate) fn find(model: &Model, name: &str) -> Result<Option<Quantized>> {
    let Some(json) = model.metadata().get(&key(name)) else {
        return Ok(None);
    };
    let text = serde_json::from_str(json).map_err(|e| e.to_string());
    let tensor = text.and_then(|text| Quantized::from_text(name, text));
    let mut tensor = tensor.map_err(|why| {
        file_error!(
            model.path(),
            "the metadata of '{}' make no sense: {}; quantize the model again",
            shown(name),
            message(&why)
        )
    })?;
    for field in &mut tensor.fields {
        if let Some(found) = model.get(&field.name(name)) {
            field.found_as(found.dtype, found.shape);
        }
        model.expect(&field.name(name), field.dtype, &field.shape)?;
    }
    Ok(Some(tensor))
}

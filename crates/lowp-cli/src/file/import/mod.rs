//! `lowp import`: quantized weights of other programs as lowp's own files, or decoded.

mod find;
mod weight;

use super::dequantize::Overflows;
use super::fields;
use super::input_error::{file_error, input_error};
use super::interchange::config::{self, Modules};
use super::interchange::forms::Target;
use super::interchange::hub::Hub;
use super::interchange::record;
use super::interchange::shards::{Group, Weights, write_text};
use super::meta;
use super::names::{Dtypes, DtypesArgs, FloatName};
use super::out::OutArgs;
use super::progress::Progress;
use super::quantize::{copied_metadata, made_items};
use super::spare::Turns;
use super::summary::{Summary, Verbosity};
use super::write::{Item, ItemSource};
use crate::output::note;
use anyhow::Result;
use clap::ValueEnum;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use weight::Weight;

/// Read a quantized model of another program
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp import hub -o q.safetensors
  lowp import hub -o folder --max-shard-size 2GB
  lowp import DeepSeek-V3 -o decoded --to bf16

IN is a folder as Hugging Face keeps models, a safetensors file or the index of a sharded model, in
a form of compressed-tensors, ModelOpt or DeepSeek, or with the names of TransformerEngine. Where
`lowp export` wrote it, the result is what was exported, byte for byte; elsewhere the recipe is the
first whose codes and scales these are, with its default options, and the amax of a tensor is the
nearest of which the stored scale follows (docs/decisions/0017-interchange.md).

Of a folder, config.json says nothing of quantization any more.")]
pub(crate) struct Args {
    /// A quantized model
    #[arg(value_name = "IN")]
    input: PathBuf,

    #[command(flatten)]
    out: OutArgs,

    #[command(flatten)]
    dtypes: DtypesArgs,

    /// Decode the weights instead
    #[arg(long, value_name = "FLOAT")]
    to: Option<Float>,

    #[command(flatten)]
    verbosity: Verbosity,
}

/// What weights are decoded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Float {
    /// F32
    Fp32,
    /// BF16, rounded to nearest even
    Bf16,
}

impl From<Float> for FloatName {
    fn from(float: Float) -> Self {
        match float {
            Float::Fp32 => FloatName::F32,
            Float::Bf16 => FloatName::Bf16,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be read or has none of the forms, or an output that cannot be written.
pub(super) fn main(args: &Args) -> Result<()> {
    let summary = Summary::begin(args.verbosity);
    let hub = Hub::open(&args.input)?;
    config::check(&hub)?;
    let model = &hub.model;
    let found = find::weights(&hub)?;
    let own = meta::quantized(model)?;
    if found.is_empty() && own.is_empty() {
        return Err(file_error(
            model.path(),
            "it holds no quantized weight in a form that lowp reads: compressed-tensors, modelopt, deepseek or te",
        ));
    }
    let kept = if args.to.is_some() { 0 } else { own.len() };
    let weights = weights(
        &hub,
        found,
        own,
        (args.to.map(Into::into), args.dtypes.dtypes),
    )?;
    let overflows = Overflows::default();
    let written = weights.write(args, &hub, &overflows)?;
    if let Some(float) = args.to {
        overflows.warn(float.into(), "--to fp32");
    }
    let foreign = weights
        .weights
        .iter()
        .filter(|weight| !weight.is_recorded())
        .count();
    if summary.is_told() && foreign > 0 && args.to.is_none() {
        note(&format!(
            "note: {foreign} weights do not say how they were made; their recipe is the first that decodes them, with its default options"
        ));
    }
    let count = weights.weights.len() + kept;
    summary.done(&format!("imported {count} weights"), model.bytes(), written);
    Ok(())
}

/// How many weights a model has in forms of other programs.
#[cfg(test)]
pub(super) fn count(hub: &Hub) -> Result<usize> {
    config::check(hub)?;
    Ok(find::weights(hub)?.len())
}

/// What is written.
struct Imported<'a> {
    weights: Vec<Weight<'a>>,
    groups: Vec<Group<'a>>,
    metadata: BTreeMap<String, String>,
    float: Option<FloatName>,
}

/// The weights of `hub` and everything else in it.
fn weights<'a>(
    hub: &'a Hub,
    found: Vec<Weight<'a>>,
    own: BTreeMap<String, meta::Quantized>,
    (float, dtypes): (Option<FloatName>, Dtypes),
) -> Result<Imported<'a>> {
    let model = &hub.model;
    let mut weights = found;
    let mut taken: BTreeSet<String> = weights.iter().flat_map(Weight::names).collect();
    let mut groups: Vec<(String, Group<'a>)> = Vec::new();
    for (name, tensor) in own {
        let names: Vec<String> = tensor
            .fields
            .iter()
            .map(|field| field.name(&name))
            .collect();
        if float.is_some() {
            taken.extend(names);
            weights.push(Weight::own(model, tensor)?);
            continue;
        }
        let items = names
            .iter()
            .zip(&tensor.fields)
            .filter_map(|(name, field)| {
                let field = field.called(dtypes);
                Some(Item {
                    dtype: field.dtype,
                    shape: field.shape,
                    ..Item::input(model.get(name)?)
                })
            });
        let mut group = Group {
            items: items.collect(),
            metadata: BTreeMap::new(),
        };
        let key = meta::key(&name);
        let text = model.metadata().get(&key).cloned();
        group.metadata.extend(text.map(|text| (key, text)));
        taken.extend(names);
        groups.push((name, group));
    }
    for (job, weight) in weights.iter().enumerate() {
        let (name, tensor) = (weight.name().to_owned(), weight.tensor());
        let mut group = Group::default();
        match float {
            None => {
                group.items = made_items(job, &name, &fields::called(&tensor.fields, dtypes));
                group
                    .metadata
                    .insert(meta::key(&name), serde_json::to_string(&tensor.text)?);
            }
            Some(float) => group.items.push(Item {
                name: name.clone(),
                dtype: float.into(),
                shape: tensor.text.shape.clone(),
                bytes: tensor.full.elements() * Dtype::from(float).bitsize() / 8,
                source: ItemSource::Made { job, part: 0 },
            }),
        }
        groups.push((name, group));
    }
    let passed = model
        .tensors()
        .filter(|tensor| !taken.contains(tensor.name));
    groups.extend(passed.map(|tensor| (tensor.name.to_owned(), Group::of(Item::input(tensor)))));
    groups.sort_by(|a, b| a.0.cmp(&b.0));
    let mut metadata = copied_metadata(model);
    metadata.retain(|key, _| !record::is_record(key));
    if float.is_some() {
        metadata.remove(meta::FORMAT_KEY);
    }
    let groups = groups.into_iter().map(|(_, group)| group).collect();
    Ok(Imported {
        weights,
        groups,
        metadata,
        float,
    })
}

impl<'a> Imported<'a> {
    /// Writes a file or a folder. Returns the bytes.
    fn write(&self, args: &Args, hub: &Hub, overflows: &Overflows) -> Result<u64> {
        let memory = Turns::default();
        let weights = Weights {
            groups: self
                .groups
                .iter()
                .map(|group| Group {
                    items: group.items.clone(),
                    metadata: group.metadata.clone(),
                })
                .collect(),
            metadata: self.metadata.clone(),
            make: Box::new(|job| match self.weights.get(job) {
                Some(weight) => weight.parts(self.float, overflows, &memory),
                None => Err(input_error("there is no such weight")),
            }),
            sources: Vec::new(),
        };
        weights.check()?;
        let progress = Progress::new("import");
        let out = args.out.open(hub.model.files())?;
        let written = out.write([&hub.model], &weights, &progress, |target| {
            let mut written = 0;
            for (name, document) in Modules::default().documents(Target::Te, hub.config.as_ref())? {
                written += write_text(target, name, &document)?;
            }
            Ok(written + hub.beside.copy_others(target)?)
        })?;
        progress.finish();
        Ok(written)
    }
}

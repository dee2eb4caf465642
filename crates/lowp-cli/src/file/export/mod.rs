//! `lowp export`: a quantized model in the files of other programs.

mod checkpoint;
#[cfg(test)]
mod tests;
mod weight;

use super::dequantize::Overflows;
use super::input_error::{file_error, input_error};
use super::interchange::config::Modules;
use super::interchange::forms::{self, Target};
use super::interchange::hub::Hub;
use super::interchange::record;
use super::interchange::shards::{Group, Weights, write_text};
use super::interchange::size::Size;
use super::meta;
use super::names::FloatName;
use super::progress::Progress;
use super::quantize::copied_metadata;
use super::saved;
use super::select::AMAX_GROUP;
use super::spare::Turns;
use super::summary::{Summary, Verbosity};
use super::target::FolderTarget;
use super::write::{Item, Parts};
use crate::globs;
use crate::json_object::JsonObject;
use crate::output::{note, shown};
use anyhow::Result;
use checkpoint::Trained;
use lowp_format::{Recipe, Usage};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use weight::{Weight, Work};

pub(super) use checkpoint::transposed;
pub(super) use weight::{base, choice, outer};

/// Write a quantized model in the form of other programs
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:
  lowp export q.safetensors -o hub --to compressed-tensors
  lowp export model-folder -o hub --to modelopt --max-shard-size 2GB
  lowp export checkpoints/run-seed0 -o hub --to bf16

IN is a file that `lowp quantize` wrote, the index of such a model, a folder as Hugging Face keeps
models, or a folder of checkpoints of `lowp train --save`, of which the latest is taken. The folder
that is written has model.safetensors, or several files and their index, and config.json; tokenizers
and whatever else lies in IN's folder are carried along.

Codes and scales are the bytes of IN: scales that one format has of larger blocks than the other are
repeated. Stored is the rowwise operand; te has all, and fp32 and bf16 are decoded (of a checkpoint:
its f32 masters). `lowp import` makes the file again. Which recipe goes to which target, and what
the target calls it:

{}
Every recipe goes to fp32, bf16 and te. A recipe with FP8 codes of E5M2 (--format e5m2) or one amax
per row (--row-scaled) goes to these three alone.", forms::table()))]
pub(crate) struct Args {
    /// A quantized model, or a checkpoint
    #[arg(value_name = "IN")]
    input: PathBuf,

    /// The folder to write: absent, or empty
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,

    /// What reads it
    #[arg(long, value_name = "TARGET")]
    to: Target,

    /// Weights that a pattern matches and that differ in its braces alone must have one amax, as TARGET's readers want of layers which
    /// they run as one: '*.{q,k,v}_proj.weight,*.{gate,up}_proj.weight'
    #[arg(long, value_name = "GLOB,..")]
    amax_group: Vec<String>,

    /// Most bytes of tensors in a file; a tensor and its scales stay together
    #[arg(long, value_name = "SIZE", default_value = "5GB")]
    max_shard_size: Size,

    #[command(flatten)]
    verbosity: Verbosity,
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be read or has no form of the target, or a folder that cannot be written.
pub(super) fn main(args: &Args) -> Result<()> {
    if saved::is_saved(&args.input) {
        let values = matches!(args.to, Target::Fp32 | Target::Bf16);
        let trained = Trained::open(&args.input, values)?;
        return Input::of_checkpoint(&trained, args.to)?.export(args, None, trained.bytes());
    }
    let hub = Hub::open(&args.input)?;
    Input::of_model(&hub, args.to)?.export(args, Some(&hub), hub.model.bytes())
}

/// What is exported.
struct Input<'a> {
    weights: Vec<Weight<'a>>,
    /// Tensors that were not quantized.
    plain: Vec<Item<'a>>,
    /// Makes those of them that are no tensors of a file.
    masters: Option<&'a Trained>,
    metadata: BTreeMap<String, String>,
    config: Option<JsonObject>,
}

impl<'a> Input<'a> {
    fn of_model(hub: &'a Hub, to: Target) -> Result<Self> {
        let model = &hub.model;
        let tensors = meta::quantized(model)?;
        if tensors.is_empty() {
            return Err(file_error(
                model.path(),
                "it holds no tensor that lowp quantized; quantize the model first (lowp quantize), or read that of another \
                 program (lowp import)",
            ));
        }
        let fields: BTreeSet<String> = tensors
            .values()
            .flat_map(|tensor| tensor.fields.iter().map(|field| field.name(&tensor.name)))
            .collect();
        let passed = model
            .tensors()
            .filter(|tensor| !fields.contains(tensor.name));
        let plain = passed.map(Item::input).collect();
        let weights = tensors.into_values();
        let weights = weights.map(|tensor| Weight::of_file(model, tensor, to));
        let mut metadata = copied_metadata(model);
        metadata.remove(meta::FORMAT_KEY);
        metadata.retain(|key, _| !record::is_record(key));
        Ok(Self {
            weights: weights.collect::<Result<_>>()?,
            plain,
            masters: None,
            metadata,
            config: hub.config.clone(),
        })
    }

    fn of_checkpoint(trained: &'a Trained, to: Target) -> Result<Self> {
        let decoded = matches!(to, Target::Fp32 | Target::Bf16);
        let mut input = Self {
            weights: Vec::new(),
            plain: trained.plain_items(decoded, float(to))?,
            masters: Some(trained),
            metadata: BTreeMap::new(),
            config: trained.config(),
        };
        if !decoded {
            let weights = trained.weights().iter();
            let weights = weights.map(|weight| Weight::of_checkpoint(trained, weight, to));
            input.weights = weights.collect::<Result<_>>()?;
        }
        Ok(input)
    }

    fn export(mut self, args: &Args, hub: Option<&Hub>, read: u64) -> Result<()> {
        let summary = Summary::begin(args.verbosity);
        self.check_amaxes(&args.amax_group)?;
        let (mut modules, mut groups, mut lost) = (Modules::default(), Vec::new(), 0);
        if !self.metadata.contains_key("format") {
            // What transformers look for.
            self.metadata.insert("format".to_owned(), "pt".to_owned());
        }
        if args.to == Target::Te {
            self.metadata
                .insert(meta::FORMAT_KEY.to_owned(), meta::FORMAT.to_owned());
        }
        for (job, weight) in self.weights.iter().enumerate() {
            groups.push((weight.name(), weight.group(job)?));
            if let Work::Stored(form) = weight.work {
                modules.add(form, weight.name());
                lost += usize::from(weight.loses_columnwise());
            }
        }
        for item in &self.plain {
            if item.shape.len() >= 2 {
                modules.add_plain(&item.name);
            }
        }
        let plain = self
            .plain
            .iter()
            .map(|item| (item.name.as_str(), Group::of(item.clone())));
        groups.extend(plain);
        groups.sort_by(|a, b| a.0.cmp(b.0));
        let (overflows, memory) = (Overflows::default(), Turns::default());
        let weights = Weights {
            groups: groups.into_iter().map(|(_, group)| group).collect(),
            metadata: std::mem::take(&mut self.metadata),
            make: Box::new(|job| match self.weights.get(job) {
                Some(weight) => weight.parts(&overflows, &memory),
                None => self.plain_parts(job, args.to, &overflows),
            }),
            sources: Vec::new(),
        };
        weights.check()?;
        let documents = modules.documents(args.to, self.config.as_ref())?;
        let files = hub.into_iter().flat_map(|hub| hub.model.files());
        let target = FolderTarget::new(&args.output, files)?;
        let progress = Progress::new("export");
        progress.begin(weights.work(args.max_shard_size.0));
        let mut written = weights.write(&target, args.max_shard_size.0, &progress)?;
        for (name, document) in &documents {
            written += write_text(&target, name, document)?;
        }
        if let Some(hub) = hub {
            written += hub.beside.copy_others(&target)?;
            hub.model.steady(Ok(()))?;
        }
        target.publish()?;
        progress.finish();
        if let Some(float) = float(args.to) {
            overflows.warn(float, "--to fp32");
        }
        if !args.to.takes_all()
            && let Some(module) = modules.embedding()
        {
            note(&format!(
                "warning: '{}' is quantized and looks like an embedding; readers of {} quantize linear layers alone, so \
                 leave it out when you quantize (--ignore '*embed*')",
                shown(module),
                args.to.name()
            ));
        }
        if summary.is_told() && lost > 0 {
            note(&format!(
                "note: {lost} weights have a columnwise operand of their own, which {} has no place for",
                args.to.name()
            ));
        }
        if let Some(hub) = hub.filter(|_| summary.is_told()) {
            hub.beside.tell();
        }
        let all = self.weights.len() + self.plain.len();
        let stored = self
            .weights
            .iter()
            .filter(|weight| !matches!(weight.work, Work::Decoded(_)));
        let what = format!(
            "exported {all} tensors, {} of them quantized",
            stored.count()
        );
        summary.done(&what, read, written);
        Ok(())
    }

    /// Checks that weights of the groups that `patterns` make have one amax and one scale.
    fn check_amaxes(&self, patterns: &[String]) -> Result<()> {
        if patterns.is_empty() {
            return Ok(());
        }
        let weights: Vec<&Weight<'_>> = self
            .weights
            .iter()
            .filter(|weight| weight.has_tensor_scale())
            .collect();
        let names: Vec<&str> = weights.iter().map(|weight| weight.name()).collect();
        let groups = globs::groups(AMAX_GROUP, patterns, &names, || {
            format!(
                "{} weights are written with a scale that follows from the amax of the tensor",
                names.len()
            )
        })?;
        for group in groups {
            let first = weights[group[0]];
            let numbers = first.numbers()?;
            for other in group[1..].iter().map(|&member| weights[member]) {
                if other.numbers()? != numbers {
                    return Err(input_error(format!(
                        "{AMAX_GROUP}: '{}' and '{}' have amaxes of their own; quantize or train them with {AMAX_GROUP}, or leave it out",
                        shown(first.name()),
                        shown(other.name())
                    )));
                }
            }
        }
        Ok(())
    }

    /// The values of a tensor that a checkpoint has as masters; its job follows those of the weights.
    fn plain_parts<'p>(
        &'p self,
        job: usize,
        to: Target,
        overflows: &'p Overflows,
    ) -> Result<Box<dyn Parts + 'p>> {
        let trained = self
            .masters
            .ok_or_else(|| input_error("there is no such tensor"))?;
        trained.parts(job, float(to).unwrap_or(FloatName::F32), overflows)
    }
}

/// What values are decoded to, where they are.
fn float(to: Target) -> Option<FloatName> {
    match to {
        Target::Fp32 => Some(FloatName::F32),
        Target::Bf16 => Some(FloatName::Bf16),
        _ => None,
    }
}

/// The error of a weight that `to` has no form for.
fn no_form(name: &str, recipe: &impl Recipe, to: Target) -> anyhow::Error {
    let kernel = recipe.kernel(lowp_format::Orientation::Rowwise);
    input_error(format!(
        "'{}' is {} with {} codes, which {} has no form for; give --to {} (`lowp export --help` has a table)",
        shown(name),
        recipe.name(),
        kernel.element,
        to.name(),
        forms::targets(recipe).join(", ")
    ))
}

/// The orientations that can be made of the buffers that serve the rowwise one.
fn restorable(recipe: &impl Recipe, usage: Usage) -> Usage {
    let stored = recipe.stored(Usage::BOTH);
    let rowwise = stored
        .iter()
        .all(|spec| spec.key.usage.contains(Usage::ROWWISE));
    if rowwise {
        usage | Usage::ROWWISE
    } else {
        Usage::ROWWISE
    }
}

//! [`Export`]: a quantized model in the files of other programs.

mod checkpoint;
mod fused;
mod weight;

use crate::decoding::Decoder;
use crate::dtypes::OutputDtype;
use crate::error::{Result, input_error, mend_file};
use crate::interchange::config::Modules;
use crate::interchange::hub::{Hub, OtherFiles};
use crate::interchange::record;
use crate::json::JsonObject;
use crate::keys;
use crate::meta;
use crate::model::Model;
use crate::out::Out;
use crate::outputs::{Group, Outputs};
use crate::progress::Progress;
use crate::quantize::copied_metadata;
use crate::remedy::Remedy;
use crate::round::Overflows;
use crate::select::check_groups;
use crate::write::Item;
use lowp_kernels::Cpu;
use std::collections::BTreeMap;
use std::path::Path;
use weight::{Source, Weight, Work};

pub use crate::interchange::forms::{ExportTarget, stored_name, targets};
pub use checkpoint::TrainedCheckpoint;
pub use fused::{FusedLayers, run_as_one};
pub(crate) use weight::choice;

/// A model or a checkpoint that is to be exported.
#[derive(Debug)]
pub struct Export<'a> {
    to: ExportTarget,
    hub: Option<&'a Hub>,
    /// What is carried along.
    others: Option<&'a OtherFiles>,
    weights: Vec<Weight<'a>>,
    /// Tensors that were not quantized.
    plain: Vec<Item<'a>>,
    /// Makes those of them that are no tensors of a file.
    masters: Option<&'a TrainedCheckpoint>,
    metadata: BTreeMap<String, String>,
    config: Option<JsonObject>,
}

impl<'a> Export<'a> {
    /// The model in `hub`, for the target `to`.
    ///
    /// # Errors
    /// It holds no quantized tensor, or one that has no form of the target.
    pub fn of_model(hub: &'a Hub, to: ExportTarget) -> Result<Self> {
        let model = &hub.model;
        let tensors = meta::quantized(model)?;
        if tensors.is_empty() {
            return Err(mend_file(
                model.path(),
                "it holds no tensor that lowp quantized",
                Remedy::Quantize,
            ));
        }
        let plain = meta::others(model, &tensors).map(Item::input).collect();
        let weights = tensors.into_values();
        let weights = weights.map(|tensor| {
            tensor.check_whole(model)?;
            Weight::new(tensor, Source::File(model), to)
        });
        let mut metadata = copied_metadata(model);
        metadata.remove(keys::FORMAT_KEY);
        metadata.retain(|key, _| !record::is_record(key));
        Ok(Self {
            to,
            hub: Some(hub),
            others: Some(&hub.other_files),
            weights: weights.collect::<Result<_>>()?,
            plain,
            masters: None,
            metadata,
            config: hub.config.clone(),
        })
    }

    /// A checkpoint, for the target `to`.
    ///
    /// # Errors
    /// A weight has no form of the target, or the checkpoint is damaged.
    pub fn of_checkpoint(trained: &'a TrainedCheckpoint, to: ExportTarget) -> Result<Self> {
        let decoded = matches!(to, ExportTarget::Fp32 | ExportTarget::Bf16);
        let mut input = Self {
            to,
            hub: None,
            others: Some(trained.other_files()),
            weights: Vec::new(),
            plain: trained.plain_items(decoded, to.float())?,
            masters: Some(trained),
            metadata: BTreeMap::new(),
            config: trained.config(),
        };
        if !decoded {
            let weights = trained.weights.iter().map(|weight| {
                let source = Source::Checkpoint(trained, weight);
                Weight::new(trained.quantized(weight)?, source, to)
            });
            input.weights = weights.collect::<Result<_>>()?;
        }
        Ok(input)
    }

    /// The names of the weights that are written with a scale which follows from the amax of the tensor.
    pub fn scaled(&self) -> Vec<&str> {
        let weights = self.with_tensor_scale();
        weights.map(|weight| &*weight.tensor.name).collect()
    }

    fn with_tensor_scale(&self) -> impl Iterator<Item = &Weight<'a>> {
        let weights = self.weights.iter();
        weights.filter(|weight| weight.has_tensor_scale())
    }

    /// The first two weights of one of the `groups` that do not have one amax and one scale; members are numbers of [`Export::scaled`].
    ///
    /// # Errors
    /// The source cannot be read; a group of fewer than two, a number that there is not, or one in two groups.
    pub fn first_unlike(&self, groups: &[Vec<usize>]) -> Result<Option<[&str; 2]>> {
        let weights: Vec<&Weight<'_>> = self.with_tensor_scale().collect();
        check_groups(groups, weights.len())?;
        for group in groups {
            let first = weights[group[0]];
            let numbers = first.numbers()?;
            for other in group[1..].iter().map(|&member| weights[member]) {
                if other.numbers()? != numbers {
                    return Ok(Some([&first.tensor.name, &other.tensor.name]));
                }
            }
        }
        Ok(None)
    }

    /// Layers that engines run as one with one scale of the tensor, and that have others each in what is written.
    ///
    /// # Errors
    /// The source cannot be read.
    pub fn fused(&self) -> Result<Vec<FusedLayers<'_>>> {
        fused::find(&self.weights)
    }

    /// Writes the folder `output`, absent or empty, with at most `most` bytes of tensors in a file; a tensor and its scales stay together.
    ///
    /// # Errors
    /// A weight cannot be read, or the folder cannot be written.
    pub fn write(mut self, output: &Path, most: u64, progress: &dyn Progress) -> Result<Exported> {
        let (to, hub, others) = (self.to, self.hub, self.others);
        let (mut modules, mut groups, mut lost) = (Modules::default(), Vec::new(), 0);
        if !self.metadata.contains_key("format") {
            // What transformers look for.
            self.metadata.insert("format".to_owned(), "pt".to_owned());
        }
        if to == ExportTarget::Te {
            self.metadata
                .insert(keys::FORMAT_KEY.to_owned(), keys::FORMAT.to_owned());
        }
        for (job, weight) in self.weights.iter().enumerate() {
            groups.push(weight.group(job)?);
            if let Work::Stored(form) = weight.work {
                modules.add(form, &weight.tensor.name);
                lost += usize::from(weight.loses_columnwise());
            }
        }
        for item in &self.plain {
            if item.shape.len() >= 2 {
                modules.add_plain(&item.name);
            }
        }
        groups.extend(self.plain.iter().cloned().map(Group::of));
        let decoder = Decoder::new(&Cpu, to.float().unwrap_or(OutputDtype::F32));
        let metadata = std::mem::take(&mut self.metadata);
        let make = Box::new(|job: usize| match (self.weights.get(job), self.masters) {
            (Some(weight), _) => weight.parts(&decoder),
            (None, Some(trained)) => trained.parts(job, &decoder),
            (None, None) => Err(input_error("there is no such tensor")),
        });
        let outputs = Outputs::sorted(groups, metadata, make);
        let documents = modules.documents(to, self.config.as_ref())?;
        let models = || hub.into_iter().map(|hub| &hub.model);
        let out = Out::folder(output, models().flat_map(Model::files), most)?;
        let bytes = out.write(models(), &outputs, progress, |target| {
            let mut written = 0;
            for (name, document) in &documents {
                written += target.write_text(name, document)?;
            }
            Ok(written + others.map_or(Ok(0), |others| others.copy_others(target))?)
        })?;
        drop(outputs);
        let decoded = |weight: &&Weight<'_>| matches!(weight.work, Work::Decoded(_));
        Ok(Exported {
            tensors: self.weights.len() + self.plain.len(),
            quantized: self.weights.len() - self.weights.iter().filter(decoded).count(),
            bytes,
            lost,
            embedding: modules.embedding().map(ToOwned::to_owned),
            overflows: decoder.overflows,
        })
    }
}

/// What was exported.
#[derive(Debug)]
pub struct Exported {
    /// Tensors of the source, each with its scales.
    pub tensors: usize,
    /// Those that were written quantized.
    pub quantized: usize,
    /// Bytes that were written.
    pub bytes: u64,
    /// Weights with a columnwise operand of their own, which the target has no place for.
    pub lost: usize,
    /// A quantized module that is called as embeddings are, which readers of most targets do not quantize.
    pub embedding: Option<String>,
    /// Values that became infinite.
    pub overflows: Overflows,
}

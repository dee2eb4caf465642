//! [`Import`]: quantized weights of other programs as lowp's own files, or decoded.

mod find;
mod values;
mod weight;

use crate::decoding::Decoder;
use crate::dtypes::{Dtypes, OutputDtype};
use crate::error::{FileError, Result, input_error};
use crate::fields;
use crate::interchange::config::{self, Modules};
use crate::interchange::forms::ExportTarget;
use crate::interchange::hub::Hub;
use crate::interchange::record::{self, Numbers};
use crate::keys;
use crate::meta;
use crate::out::Out;
use crate::outputs::{Group, Outputs};
use crate::progress::Progress;
use crate::quantize::copied_metadata;
use crate::round::Overflows;
use crate::write::{Item, check_names};
use lowp_kernels::Cpu;
use std::collections::{BTreeMap, BTreeSet};
pub use values::Values;
use weight::Weight;

/// Quantized weights of another program, and everything else that lies in their model.
#[derive(Debug)]
pub struct Import<'a> {
    hub: &'a Hub,
    /// The weights in a form of another program, and those of lowp's own files that are decoded.
    weights: Vec<Weight<'a>>,
    /// Those of lowp's own files that stay as they are.
    kept: usize,
    groups: Vec<Group<'a>>,
    metadata: BTreeMap<String, String>,
    float: Option<OutputDtype>,
}

fn collect<'a>(
    hub: &'a Hub,
    found: Vec<Weight<'a>>,
    own: BTreeMap<String, meta::Quantized>,
    float: Option<OutputDtype>,
    dtypes: Dtypes,
) -> Result<Import<'a>> {
    let model = &hub.model;
    let mut weights = found;
    let mut taken: BTreeSet<String> = weights.iter().flat_map(Weight::names).collect();
    let mut groups: Vec<Group<'a>> = Vec::new();
    let kept = if float.is_some() { 0 } else { own.len() };
    for (name, tensor) in own {
        taken.extend(tensor.fields());
        if float.is_some() {
            tensor.check_whole(model)?;
            weights.push(Weight {
                model,
                tensor,
                form: None,
                recorded: Some(Numbers::default()),
            });
            continue;
        }
        let items = tensor.fields.iter().filter_map(|field| {
            let called = field.called(dtypes);
            Some(Item {
                dtype: called.dtype,
                shape: called.shape,
                ..Item::input(model.get(&field.name(&name))?)
            })
        });
        let items = items.collect();
        let key = keys::key(&name);
        let text = model.metadata().get(&key).cloned();
        groups.push(Group {
            name,
            items,
            metadata: text.map(|text| (key, text)).into_iter().collect(),
        });
    }
    for (job, weight) in weights.iter().enumerate() {
        let tensor = &weight.tensor;
        groups.push(match float {
            None => {
                let fields = fields::called(&tensor.fields, dtypes);
                Group::quantized(job, &tensor.name, &fields, &tensor.text)?
            }
            Some(float) => Group::decoded(job, tensor, float),
        });
    }
    let passed = model.tensors();
    let passed = passed.filter(|tensor| !taken.contains(tensor.name));
    groups.extend(passed.map(Item::input).map(Group::of));
    groups.sort_by(|a, b| a.name.cmp(&b.name));
    let mut metadata = copied_metadata(model);
    metadata.retain(|key, _| !record::is_record(key));
    if float.is_some() {
        metadata.remove(keys::FORMAT_KEY);
    }
    Ok(Import {
        hub,
        weights,
        kept,
        groups,
        metadata,
        float,
    })
}

impl<'a> Import<'a> {
    /// The weights of the model in `hub`, in the forms that their tensors and its configuration say. They are decoded to `float` if there is
    /// one; else their codes are called as `dtypes` says.
    ///
    /// # Errors
    /// There are none, or they are in no form that is read.
    pub fn new(hub: &'a Hub, float: Option<OutputDtype>, dtypes: Dtypes) -> Result<Self> {
        config::check(hub)?;
        let model = &hub.model;
        let found = find::weights(hub)?;
        let own = meta::quantized(model)?;
        if found.is_empty() && own.is_empty() {
            return Err(FileError::in_file(
                model.path(),
                "it holds no quantized weight in a form that lowp reads: compressed-tensors, modelopt, deepseek or te",
            ));
        }
        let import = collect(hub, found, own, float, dtypes)?;
        check_names(import.groups.iter().flat_map(|group| &group.items))?;
        Ok(import)
    }

    /// Number of weights.
    pub fn weights(&self) -> usize {
        self.weights.len() + self.kept
    }

    /// Number of weights that do not say how they were made: their recipe is the first that decodes them, with its default options.
    pub fn foreign(&self) -> usize {
        let weights = self.weights.iter();
        weights.filter(|weight| weight.recorded.is_none()).count()
    }

    /// Writes lowp's own file or folder. Returns the bytes that were written, and values that became infinite.
    ///
    /// # Errors
    /// A weight cannot be read, its parts do not fit each other, or the output cannot be written.
    pub fn write(&self, out: Out, progress: &dyn Progress) -> Result<(u64, Overflows)> {
        let hub = self.hub;
        let decoder = Decoder::new(&Cpu, self.float.unwrap_or(OutputDtype::F32));
        let make = Box::new(|job: usize| match self.weights.get(job) {
            Some(weight) => weight.parts(self.float.map(|_| &decoder)),
            None => Err(input_error("there is no such weight")),
        });
        let outputs = Outputs::sorted(self.groups.clone(), self.metadata.clone(), make);
        let written = out.write([&hub.model], &outputs, progress, |target| {
            let mut written = 0;
            for (name, document) in
                Modules::default().documents(ExportTarget::Te, hub.config.as_ref())?
            {
                written += target.write_text(name, &document)?;
            }
            Ok(written + hub.other_files.copy_others(target)?)
        })?;
        drop(outputs);
        Ok((written, decoder.overflows))
    }
}

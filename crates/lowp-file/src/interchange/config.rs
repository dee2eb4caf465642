//! What the configuration of a model says of its quantized weights, for each target, and which configurations are read.

use crate::error::{Result, file_error};
use crate::interchange::forms::{ExportTarget, Form};
use crate::interchange::hub::{CONFIG, Hub, MODELOPT_CONFIG};
use crate::json::JsonObject;
use crate::json::json_text;
use crate::text::shown;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

const KEY: &str = "quantization_config";
/// The version of ModelOpt whose files are followed.
const MODELOPT_VERSION: &str = "0.39.0";
/// What compressed-tensors calls models of several formats.
const MIXED: &str = "mixed-precision";
/// What ModelOpt calls them.
const MIXED_ALGO: &str = "MIXED_PRECISION";
/// The class of layers that readers quantize.
const LINEAR: &str = "Linear";

/// The modules of a model by what became of their weights.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    /// Those that are quantized, by form.
    groups: Vec<(&'static Form, Vec<String>)>,
    plain: Vec<String>,
}

impl Modules {
    /// Adds the module whose weight is `name`, stored as `form`.
    pub(crate) fn add(&mut self, form: &'static Form, name: &str) {
        if form.inputs == "null" && form.weights == "null" && form.tensors.len() == 1 {
            return self.add_plain(name);
        }
        let module = module(name).unwrap_or(name).to_owned();
        let known = self
            .groups
            .iter_mut()
            .find(|(known, _)| std::ptr::eq(*known, form));
        match known {
            Some((_, modules)) => modules.push(module),
            None => self.groups.push((form, vec![module])),
        }
    }

    /// Adds the module whose weight is `name` and was not quantized. Other tensors are weights of no module.
    pub(crate) fn add_plain(&mut self, name: &str) {
        self.plain.extend(module(name).map(ToOwned::to_owned));
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.groups.is_empty()
    }

    /// The first quantized module that is called as embeddings are.
    pub(crate) fn embedding(&self) -> Option<&str> {
        let mut modules = self.groups.iter().flat_map(|(_, modules)| modules);
        let found = modules.find(|name| {
            name.rsplit('.')
                .next()
                .is_some_and(|name| name.contains("embed"))
        });
        found.map(String::as_str)
    }

    /// What `config.json` says of them, in the words of `target`.
    fn quantization_config(&self, target: ExportTarget) -> Result<Option<Value>> {
        let names = |pick: fn(&Form) -> &'static str| {
            let mut names: Vec<&str> = self.groups.iter().map(|(form, _)| pick(form)).collect();
            names.dedup();
            names
        };
        if self.is_plain() {
            return Ok(None);
        }
        Ok(match target {
            ExportTarget::Fp32 | ExportTarget::Bf16 | ExportTarget::Te => None,
            ExportTarget::CompressedTensors => {
                let format = match names(|form| form.name)[..] {
                    [format] => format,
                    _ => MIXED,
                };
                Some(json!({
                    "quant_method": "compressed-tensors",
                    "format": format,
                    "quantization_status": "compressed",
                    "global_compression_ratio": null,
                    "kv_cache_scheme": null,
                    "ignore": self.plain,
                    "config_groups": self.config_groups(true)?,
                }))
            }
            ExportTarget::Modelopt => Some(json!({
                "quant_method": "modelopt",
                "producer": producer(),
                "ignore": self.plain,
                "config_groups": self.config_groups(false)?,
                "quant_algo": self.algo(),
            })),
            ExportTarget::Deepseek => Some(json!({
                "quant_method": "fp8",
                "fmt": names(|form| form.name)[0],
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": self.plain,
            })),
        })
    }

    /// The groups, each with the settings of its form: all linear layers where there is one group, else those that are named.
    fn config_groups(&self, with_format: bool) -> Result<Value> {
        let mut groups = Map::new();
        for (number, (form, modules)) in self.groups.iter().enumerate() {
            let [weights, inputs]: [Value; 2] = [
                serde_json::from_str(form.weights)?,
                serde_json::from_str(form.inputs)?,
            ];
            let targets = match self.groups.len() {
                1 => json!([LINEAR]),
                _ => json!(modules),
            };
            let mut group = json!({
                "targets": targets,
                "weights": weights,
                "input_activations": inputs,
                "output_activations": null,
            });
            if with_format {
                group["format"] = form.name.into();
            }
            groups.insert(format!("group_{number}"), group);
        }
        Ok(Value::Object(groups))
    }

    fn algo(&self) -> &'static str {
        match &self.groups[..] {
            [(form, _)] => form.name,
            _ => MIXED_ALGO,
        }
    }

    /// `hf_quant_config.json`, which ModelOpt writes next to the weights.
    fn modelopt_config(&self) -> Result<Value> {
        let mut quantization = json!({
            "quant_algo": self.algo(),
            "kv_cache_quant_algo": null,
            "exclude_modules": self.plain,
        });
        let group_size = |form: &Form| -> Result<Option<Value>> {
            let weights: Value = serde_json::from_str(form.weights)?;
            Ok(weights.get("group_size").cloned())
        };
        if let [(form, _)] = &self.groups[..] {
            if let Some(size) = group_size(form)? {
                quantization["group_size"] = size;
            }
        } else {
            let mut layers = Map::new();
            for (form, modules) in &self.groups {
                let mut layer = json!({ "quant_algo": form.name });
                if let Some(size) = group_size(form)? {
                    layer["group_size"] = size;
                }
                layers.extend(modules.iter().map(|name| (name.clone(), layer.clone())));
            }
            quantization["quantized_layers"] = Value::Object(layers);
        }
        Ok(json!({ "producer": producer(), "quantization": quantization }))
    }

    /// The documents that `target` has next to the weights, by name; `config` is what else `config.json` says.
    pub(crate) fn documents(
        &self,
        target: ExportTarget,
        config: Option<&JsonObject>,
    ) -> Result<Vec<(&'static str, String)>> {
        let mut documents = Vec::new();
        let quantization = self.quantization_config(target)?;
        if config.is_some() || quantization.is_some() {
            let empty = JsonObject::from(&Map::new());
            let config = config.unwrap_or(&empty);
            let config = match quantization {
                Some(value) => config.with(KEY, &value),
                None => config.without(KEY),
            };
            documents.push((CONFIG, config.text().to_owned()));
        }
        if target == ExportTarget::Modelopt && !self.is_plain() {
            documents.push((MODELOPT_CONFIG, json_text(&self.modelopt_config()?)?));
        }
        Ok(documents)
    }
}

fn module(name: &str) -> Option<&str> {
    name.strip_suffix(".weight")
}

/// Readers take files of this producer for ModelOpt's.
fn producer() -> Value {
    json!({ "name": "modelopt", "version": MODELOPT_VERSION })
}

/// What the source of weights was, by the configuration of their model: one of the three dtypes that are quantized.
pub(crate) fn source_dtype(config: Option<&JsonObject>) -> Dtype {
    let value = |key| config.and_then(|config| config.get(key).ok().flatten());
    let said = value("dtype").or_else(|| value("torch_dtype"));
    match said.as_ref().and_then(Value::as_str) {
        Some("float32") => Dtype::F32,
        Some("float16") => Dtype::F16,
        _ => Dtype::BF16,
    }
}

fn is_known(format: &str) -> bool {
    let known = super::forms::FORMS.iter().any(|form| form.name == format);
    known || ["naive-quantized", "dense", MIXED].contains(&format)
}

/// Rejects configurations of weights that `lowp import` does not read, or whose meaning is more than their tensors.
pub(crate) fn check(hub: &Hub) -> Result<()> {
    let folder = hub.model.path().parent().unwrap_or(hub.model.path());
    let unknown = |name: &str, why: String| {
        let path = folder.join(name);
        Err(file_error!(
            &path,
            "{why}; lowp reads compressed-tensors, modelopt and fp8 with blocks of 128x128"
        ))
    };
    let config = match hub.config.as_ref().map(|config| config.get(KEY)) {
        None | Some(Ok(None)) => return Ok(()),
        Some(Ok(Some(config))) => config,
        Some(Err(why)) => return unknown(CONFIG, shown(&why).to_string()),
    };
    let text = |key: &str| config[key].as_str();
    let method = text("quant_method").unwrap_or_default();
    match method {
        "compressed-tensors" => {
            let groups = config["config_groups"].as_object().into_iter();
            let groups = groups.flat_map(Map::values);
            let formats = groups.filter_map(|group| group["format"].as_str());
            if let Some(format) = formats
                .chain(text("format"))
                .find(|format| !is_known(format))
            {
                return unknown(
                    CONFIG,
                    format!("its weights have the format '{}'", shown(format)),
                );
            }
            let transforms = config["transform_config"].as_object();
            if transforms.is_some_and(|transforms| !transforms.is_empty()) {
                return unknown(
                    CONFIG,
                    "its transform_config says that weights were rotated before they were quantized, which lowp does not undo".to_owned(),
                );
            }
            Ok(())
        }
        "modelopt" => Ok(()),
        "fp8" => match &config["weight_block_size"] {
            Value::Null => Ok(()),
            size if *size == json!([128, 128]) => Ok(()),
            size => unknown(
                CONFIG,
                format!("its weight_block_size is {}", shown(&size.to_string())),
            ),
        },
        method => unknown(CONFIG, format!("its quant_method is '{}'", shown(method))),
    }
}

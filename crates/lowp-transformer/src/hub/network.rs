//! [`GptConfig::of_hub`]: the network that a config.json describes, where lowp computes it. What transformers reads of such a file is
//! read here too, or it is an error that names the key.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use lowp_file::text::shown;

use super::keys::Keys;
use super::{HubError, MAX_BLOCKS, MAX_HEADS, MAX_VOCABULARY, MAX_WIDTH, TIED};
use crate::hub::types::TYPES;
use crate::llama::{Family, Llama};
use crate::{Arch, GptConfig, Rope};

/// Tokens of a sequence, unless it is given or the model has fewer positions.
const SEQ: usize = 1024;

/// Keys that must have the only value that is computed here, and what they ask for otherwise.
const REJECTED: [(&str, &str); 10] = [
    ("attention_bias", "biases of attention"),
    ("mlp_bias", "biases of the MLP"),
    ("qkv_bias", "biases of queries, keys and values"),
    ("attention_dropout", "dropout in attention"),
    ("auto_map", "a network by code of its own"),
    ("text_config", "a model within another one"),
    ("vision_config", "a model of images"),
    ("num_local_experts", "experts"),
    ("num_experts", "experts"),
    ("is_encoder_decoder", "an encoder beside the decoder"),
];

impl GptConfig {
    /// The positions that the model of `config`, whose network this is, was trained on, if its sequences have more: later ones were never
    /// trained, and its rotary positions do not extend to them.
    pub fn trained_positions(&self, config: &Value) -> Option<usize> {
        let Arch::Llama(Llama { rope, .. }) = self.arch else {
            return None;
        };
        let positions = usize::try_from(config["max_position_embeddings"].as_u64()?).ok()?;
        (self.seq > positions && !rope.scaling.extends(positions)).then_some(positions)
    }

    /// The network that `config`, the contents of the file `name`, describes, for sequences of `seq` tokens: Llama, Mistral and Qwen3.
    ///
    /// # Errors
    /// Another kind of model, a key that is missing or has a number that no model has, or one that asks for what is not computed here;
    /// each is named.
    pub fn of_hub(name: &str, config: &Value, seq: Option<usize>) -> Result<Self, HubError> {
        let keys = Keys::new(name, config.clone())?;
        let family = family(&keys)?;
        for (key, what) in REJECTED {
            if keys.is_set(key) {
                return Err(unable(&keys, key, what));
            }
        }
        let known = TYPES.iter().find(|known| known.name == family.model_type());
        let defaults = known.and_then(|known| known.defaults);
        let defaults = defaults.map(serde_json::from_str).transpose();
        let keys = keys.with_defaults(defaults.map_err(|e| HubError(e.to_string()))?);
        let object = config.as_object().cloned().unwrap_or_default();
        let act = object.get("hidden_act").filter(|act| !act.is_null());
        if let Some(other) = act.filter(|act| *act != "silu") {
            let what = format!(
                "the activation {}; silu is possible",
                shown(&other.to_string())
            );
            return Err(unable(&keys, "hidden_act", &what));
        }
        let dim = keys.number("hidden_size", 1..=MAX_WIDTH)?;
        let heads = keys.number("num_attention_heads", 1..=MAX_HEADS)?;
        let kv_heads = keys.find("num_key_value_heads", 1..=MAX_HEADS)?;
        let head_dim = keys.find("head_dim", 1..=MAX_WIDTH)?;
        let positions = value::<usize>(&keys, &object, "max_position_embeddings")?;
        let eps = value::<f32>(&keys, &object, "rms_norm_eps")?.unwrap_or(1e-6);
        if !(eps >= 0.0 && eps.is_finite()) {
            return Err(keys.error(format!(
                "rms_norm_eps is {eps:?}: expected a number from 0 on"
            )));
        }
        let layers = keys.number("num_hidden_layers", 1..=MAX_BLOCKS)?;
        let llama = Llama {
            family,
            kv_heads: kv_heads.unwrap_or(heads),
            head_dim: head_dim.filter(|width| width * heads != dim),
            gated: Some(keys.number("intermediate_size", 1..=MAX_WIDTH)?),
            rope: rope(&keys, &object)?,
            eps,
            window: window(&keys, &object, family)?,
            tied: keys.flag(TIED)?.unwrap_or(false),
        };
        let most = positions.unwrap_or(SEQ).max(1);
        Ok(Self {
            dim,
            layers,
            heads,
            seq: seq.unwrap_or(SEQ.min(most)),
            vocab: keys.number("vocab_size", 1..=MAX_VOCABULARY)?,
            arch: Arch::Llama(llama),
        })
    }
}

/// The error that `key` asks for `what`.
fn unable(keys: &Keys, key: &str, what: &str) -> HubError {
    keys.error(format!(
        "{key} asks for {what}, which lowp does not train; `lowp plan` may know its costs"
    ))
}

fn family(keys: &Keys) -> Result<Family, HubError> {
    let found = keys
        .text("model_type")?
        .ok_or_else(|| keys.missing("model_type"))?;
    let mut families = Family::ALL.into_iter();
    families
        .find(|family| family.model_type() == found)
        .ok_or_else(|| {
            let known = Family::ALL.map(Family::model_type);
            keys.error(format!(
                "model_type is {}, and lowp trains {}",
                shown(found),
                known.join(", ")
            ))
        })
}

/// The value of `key`, if it is there.
fn value<T: DeserializeOwned>(
    keys: &Keys,
    object: &Map<String, Value>,
    key: &str,
) -> Result<Option<T>, HubError> {
    match object.get(key).filter(|value| !value.is_null()) {
        None => Ok(None),
        Some(value) => serde_json::from_value(value.clone())
            .map(Some)
            .map_err(|error| {
                keys.error(format!("{key} is {}: {error}", shown(&value.to_string())))
            }),
    }
}

/// Rotary positions: `rope_parameters` as transformers 5 writes them, or `rope_theta` and `rope_scaling` as those before it.
fn rope(keys: &Keys, object: &Map<String, Value>) -> Result<Rope, HubError> {
    let mut rope = Rope::default();
    if let Some(theta) = value(keys, object, "rope_theta")? {
        rope.theta = theta;
    }
    whole_heads(keys, object)?;
    // Transformers reads the first that says something.
    for key in ["rope_scaling", "rope_parameters"] {
        let of = value::<Map<String, Value>>(keys, object, key)?;
        let Some(mut of) = of.filter(|of| !of.is_empty()) else {
            continue;
        };
        if let Some((layers, _)) = of.iter().find(|(_, value)| value.is_object()) {
            let what = format!("other rotary positions in layers of type {layers}");
            return Err(unable(keys, key, &what));
        }
        if let Some(theta) = value(keys, &of, "rope_theta")? {
            rope.theta = theta;
        }
        whole_heads(keys, &of)?;
        // The older name.
        if let Some(kind) = of.remove("type") {
            of.entry("rope_type").or_insert(kind);
        }
        let kind = of.entry("rope_type").or_insert_with(|| "default".into());
        let kind = kind.to_string();
        // The model's own key goes first, and the number of positions stands in for both.
        let original = "original_max_position_embeddings";
        let positions = [
            object.get(original),
            of.get(original),
            object.get("max_position_embeddings"),
        ];
        let positions = positions
            .into_iter()
            .flatten()
            .find(|positions| !positions.is_null());
        if let Some(positions) = positions.cloned() {
            of.insert(original.to_owned(), positions);
        }
        rope.scaling = serde_json::from_value(Value::Object(of)).map_err(|error| {
            let known = "default, linear and llama3";
            unable(
                keys,
                key,
                &format!(
                    "rotary positions of type {}: {error}; there are {known}",
                    shown(&kind)
                ),
            )
        })?;
        break;
    }
    match rope.scaling.is_sound() && rope.theta > 0.0 && rope.theta.is_finite() {
        true => Ok(rope),
        false => Err(keys.error(format!(
            "rope_theta {} with {:?}: the base and the factors must be positive, and the factor of high frequencies the larger one",
            rope.theta, rope.scaling
        ))),
    }
}

/// Only whole heads are turned.
fn whole_heads(keys: &Keys, object: &Map<String, Value>) -> Result<(), HubError> {
    let key = "partial_rotary_factor";
    match value::<f64>(keys, object, key)? {
        None | Some(1.0) => Ok(()),
        Some(_) => Err(unable(keys, key, "heads that turn in part")),
    }
}

/// The positions that each token sees: one window in all blocks, or none.
fn window(
    keys: &Keys,
    object: &Map<String, Value>,
    family: Family,
) -> Result<Option<usize>, HubError> {
    let used = value::<bool>(keys, object, "use_sliding_window")?;
    let window = match (family, used) {
        (Family::Llama, _) | (Family::Qwen3, None | Some(false)) => None,
        // Without the key, transformers takes 4096.
        (Family::Mistral, _) if !object.contains_key("sliding_window") => Some(4096),
        _ => value::<usize>(keys, object, "sliding_window")?,
    };
    let types = value::<Vec<String>>(keys, object, "layer_types")?.unwrap_or_default();
    let expected = match window {
        Some(_) => "sliding_attention",
        None => "full_attention",
    };
    let first = value::<usize>(keys, object, "max_window_layers")?;
    if window.is_some() && family == Family::Qwen3 && first != Some(0) {
        let what = "full attention in the first blocks and a window in others";
        return Err(unable(keys, "max_window_layers", what));
    }
    match types.iter().find(|found| *found != expected) {
        Some(other) => {
            let what = format!("{} where sliding_window says otherwise", shown(other));
            Err(unable(keys, "layer_types", &what))
        }
        None if window == Some(0) => Err(keys.error("sliding_window is 0; null is no window")),
        None => Ok(window),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_train::Model as _;
    use serde_json::json;

    fn of(config: &Value) -> Result<GptConfig, String> {
        GptConfig::of_hub("config.json", config, Some(64)).map_err(|error| error.to_string())
    }

    fn small(model_type: &str) -> Value {
        json!({
            "model_type": model_type, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        })
    }

    /// What a checkpoint says of a model for transformers describes the same model.
    #[test]
    fn a_model_is_what_its_configuration_says() {
        let mut llama = small("llama");
        llama["rope_scaling"] = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        });
        llama["rope_theta"] = json!(500_000.0);
        let mut mistral = small("mistral");
        mistral["sliding_window"] = json!(16);
        let mut qwen = small("qwen3");
        qwen["head_dim"] = json!(16);
        qwen["tie_word_embeddings"] = json!(true);
        for config in [llama, mistral, qwen] {
            let model = of(&config).expect("a model");
            assert_eq!(model.check(), Ok(()));
            let again = model.transformers().expect("a configuration");
            assert_eq!(of(&again), Ok(model));
            let json = serde_json::to_string(&model).expect("JSON");
            assert_eq!(serde_json::from_str::<GptConfig>(&json).ok(), Some(model));
            // The plan of the same file has the same parameters.
            let plan = super::super::HubModel::new("config.json", config).expect("a plan");
            let planned: u128 = plan.shapes.parameters().iter().sum();
            assert_eq!(planned, model.parameters() as u128);
        }
    }

    /// As in transformers, even where a missing key has another default.
    #[test]
    fn null_heads_of_keys_are_as_many_as_heads() {
        for model_type in ["llama", "mistral", "qwen3"] {
            let [mut null, mut all] = [small(model_type), small(model_type)];
            null["num_key_value_heads"] = Value::Null;
            all["num_key_value_heads"] = json!(4);
            assert_eq!(of(&null), of(&all));
            // Also where no type says what is like Llama.
            let plans = [null, all].map(|mut config| {
                config["tie_word_embeddings"] = json!(false);
                config.as_object_mut().expect("keys").remove("model_type");
                let plan = super::super::HubModel::new("config.json", config).expect("a plan");
                plan.shapes.parameters().iter().sum::<u128>()
            });
            assert_eq!(plans[0], plans[1]);
        }
    }

    #[test]
    fn what_is_not_computed_is_named() {
        for (model_type, key, value) in [
            ("llama", "attention_bias", json!(true)),
            ("llama", "hidden_act", json!("gelu")),
            (
                "llama",
                "rope_scaling",
                json!({"type": "yarn", "factor": 2.0}),
            ),
            (
                "llama",
                "layer_types",
                json!(["sliding_attention", "full_attention"]),
            ),
            ("qwen3", "attention_dropout", json!(0.1)),
            ("gemma", "model_type", json!("gemma")),
            ("llama", "vocab_size", json!(-1)),
        ] {
            let mut config = small(model_type);
            config[key] = value;
            let error = of(&config).expect_err(key);
            assert!(error.contains(key), "{error}");
        }
    }
}

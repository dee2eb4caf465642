//! The models that a config.json of Hugging Face describes: those like Llama, with experts or without, and GPT-2.

use super::keys::{Keys, names};
use super::layers::Model;
use super::types::{GPT2, TYPES, Type};
use crate::output::shown;
use crate::usage::UsageError;

/// Largest width of anything.
const MAX_WIDTH: usize = 1 << 24;
/// Most heads, blocks, and experts of a block.
const MAX_HEADS: usize = 1 << 14;
const MAX_BLOCKS: usize = 1 << 12;
const MAX_EXPERTS: usize = 1 << 12;
const MAX_VOCABULARY: usize = 1 << 26;
/// Most linear layers in all.
const MAX_LAYERS: usize = 1 << 20;
/// The number of experts, by one of its names.
const EXPERTS: &str = "num_experts";
/// Whether the head is the embedding.
const TIED: &str = "tie_word_embeddings";

/// Keys of layers that a plan does not know, where they are set.
const UNKNOWN: &[(&str, &str)] = &[
    ("kv_lora_rank", "attention over compressed keys and values"),
    ("q_lora_rank", "attention over compressed queries"),
    (
        "text_config",
        "a model within another one (give that object as a file of its own)",
    ),
    (
        "vision_config",
        "a model of images (leave the key out to plan the rest)",
    ),
    (
        "num_nextn_predict_layers",
        "blocks that predict further tokens (leave the key out to plan the rest)",
    ),
    ("mlp_only_layers", "dense blocks among sparse ones"),
    (
        "interleave_moe_layer_step",
        "dense blocks among sparse ones",
    ),
    ("block_configs", "blocks of different sizes"),
    ("layers_block_type", "blocks of different kinds"),
    ("is_encoder_decoder", "an encoder beside the decoder"),
    ("add_cross_attention", "attention to an encoder"),
];

/// The model that `keys` describe.
///
/// # Errors
/// A key that is missing, has a number that no model has, or speaks of layers that are not known here; each is named.
pub(super) fn model(name: &str, keys: Keys) -> Result<Model, UsageError> {
    for (key, what) in UNKNOWN {
        if keys.is_set(key) {
            return Err(keys.error(format!(
                "{key} is set: {what}; lowp plans models like Llama, with experts or without, and GPT-2"
            )));
        }
    }
    // Every block, or every block after the first ones.
    for key in ["moe_layer_freq", "decoder_sparse_step"] {
        if let Some(each) = keys.find(key, 1..=MAX_BLOCKS)?
            && each != 1
        {
            return Err(keys.error(format!(
                "{key} is {each}: dense blocks among sparse ones, which lowp does not plan; 1 is possible"
            )));
        }
    }
    let mut model = Model {
        name: name.to_owned(),
        ..Model::default()
    };
    let found = match keys.text("model_type")? {
        None => None,
        Some(found) => {
            let known = TYPES.iter().find(|known| known.name == found);
            Some(known.ok_or_else(|| {
                let known: Vec<&str> = TYPES.iter().map(|known| known.name).collect();
                keys.error(format!(
                    "model_type is {}, and lowp plans {}; leave the key out if the model has the layers of Llama",
                    shown(found),
                    known.join(", ")
                ))
            })?)
        }
    };
    let defaults = found.and_then(|found| found.defaults);
    let defaults = defaults.map(serde_json::from_str).transpose();
    let defaults = defaults.map_err(|e| keys.error(format!("its type: {e}")))?;
    let keys = keys.with_defaults(defaults);
    if let Some(found) = found.filter(|found| found.experts.is_none())
        && let Some(key) = names(EXPERTS).find(|key| keys.is_set(key))
    {
        return Err(keys.error(format!(
            "{key} is set, and models of type {} have no experts; leave out that key, or model_type",
            found.name
        )));
    }
    let is_gpt2 = found.map_or(keys.get("n_embd").is_some(), |found| found.name == GPT2);
    match is_gpt2 {
        true => gpt2(&keys, &mut model)?,
        false => llama(&keys, found, &mut model)?,
    }
    if let (Some(found), [_, ..]) = (found, &keys.assumed()[..]) {
        model.notes.push(format!(
            "the file lacks keys: {}, as in transformers' configuration of {}",
            keys.assumed().join(", "),
            found.name
        ));
    }
    model.check()?;
    Ok(model)
}

/// Experts of a sparse block.
#[derive(Clone, Copy, Debug)]
struct Experts {
    count: usize,
    width: usize,
    /// Width of the experts that see every token, if there are any.
    shared: usize,
    /// Whether these are weighed by a gate.
    gated: bool,
    /// The first block that has experts.
    from: usize,
}

/// What a config says of experts, of a type that counts them by the key `known`, if it has any.
fn experts(keys: &Keys, known: Option<&str>, blocks: usize) -> Result<Option<Experts>, UsageError> {
    let count = match known {
        Some(key) => Some(keys.number(key, 1..=MAX_EXPERTS)?),
        None => keys.find(EXPERTS, 1..=MAX_EXPERTS)?,
    };
    let Some(count) = count else {
        return Ok(None);
    };
    // Mixtral's own key, whose experts have the width of an MLP.
    let width = match known {
        Some("num_local_experts") => "intermediate_size",
        _ => "moe_intermediate_size",
    };
    let width = keys.number(width, 1..=MAX_WIDTH)?;
    let shared = keys.find("n_shared_experts", 0..=MAX_EXPERTS)?.unwrap_or(0);
    let gated = keys.find("shared_expert_intermediate_size", 0..=MAX_WIDTH)?;
    Ok(Some(Experts {
        count,
        width,
        shared: shared * width + gated.unwrap_or(0),
        gated: gated.is_some_and(|width| width > 0),
        from: keys.find("first_k_dense_replace", 0..=blocks)?.unwrap_or(0),
    }))
}

/// A model like Llama.
fn llama(keys: &Keys, found: Option<&Type>, model: &mut Model) -> Result<(), UsageError> {
    let hidden = keys.number("hidden_size", 1..=MAX_WIDTH)?;
    let blocks = keys.number("num_hidden_layers", 1..=MAX_BLOCKS)?;
    let heads = keys.number("num_attention_heads", 1..=MAX_HEADS)?;
    let kv_heads = match keys.find("num_key_value_heads", 1..=MAX_HEADS)? {
        Some(kv_heads) => kv_heads,
        // As many as heads, where transformers says so.
        None if found.is_some_and(|found| found.defaults.is_some()) => {
            keys.assume("num_key_value_heads", heads);
            heads
        }
        None => return Err(keys.missing("num_key_value_heads")),
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(keys.error(format!(
            "num_key_value_heads is {kv_heads} and does not divide num_attention_heads, {heads}"
        )));
    }
    let head = match keys.find("head_dim", 1..=MAX_WIDTH)? {
        Some(head) => head,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(keys.error(format!(
                "hidden_size is {hidden}, which {heads} num_attention_heads do not divide; add head_dim"
            )));
        }
    };
    let vocabulary = keys.number("vocab_size", 1..=MAX_VOCABULARY)?;
    let known = found.and_then(|found| found.experts);
    let experts = experts(keys, known, blocks)?;
    let dense = match experts {
        Some(experts) if experts.from == 0 => 0,
        _ => keys.number("intermediate_size", 1..=MAX_WIDTH)?,
    };
    let [attention_bias, qkv_bias, mlp_bias] =
        ["attention_bias", "qkv_bias", "mlp_bias"].map(|key| keys.flag(key));
    let [attention_bias, qkv_bias, mlp_bias] =
        [attention_bias?, qkv_bias?, mlp_bias?].map(|bias| bias.unwrap_or(false));
    for (key, bias) in [
        ("attention_bias", attention_bias),
        ("qkv_bias", qkv_bias),
        ("mlp_bias", mlp_bias),
    ] {
        if bias && keys.get(key).is_none() {
            keys.assume(key, bias);
        }
    }
    let qkv_bias = qkv_bias || found.is_some_and(|found| found.qkv_bias);
    let tied = tied(keys)?;
    let each = 7 + 3 * experts.map_or(0, |experts| experts.count);
    if blocks * each > MAX_LAYERS {
        return Err(keys.error(format!(
            "num_hidden_layers is {blocks}, and each block has up to {each} linear layers; at most {MAX_LAYERS} in all are planned"
        )));
    }
    let (queries, values) = (heads * head, kv_heads * head);
    model.blocks = blocks;
    model.matrix(vocabulary, hidden);
    for block in 0..blocks {
        let at = format!("model.layers.{block}");
        for (name, rows, cols) in [
            ("q", queries, hidden),
            ("k", values, hidden),
            ("v", values, hidden),
            ("o", hidden, queries),
        ] {
            model.linear(block, format!("{at}.self_attn.{name}_proj"), rows, cols);
            if attention_bias || (qkv_bias && name != "o") {
                model.vector(rows);
            }
        }
        if found.is_some_and(|found| found.qk_norm) {
            model.vector(head);
            model.vector(head);
        }
        // In front of attention and of the MLP.
        model.vector(hidden);
        model.vector(hidden);
        let mut mlp = |name: &str, width: usize| {
            for (part, rows, cols) in [
                ("gate", width, hidden),
                ("up", width, hidden),
                ("down", hidden, width),
            ] {
                model.linear(block, format!("{at}.{name}.{part}_proj"), rows, cols);
            }
        };
        match experts.filter(|experts| block >= experts.from) {
            None => {
                mlp("mlp", dense);
                if mlp_bias {
                    for len in [dense, dense, hidden] {
                        model.vector(len);
                    }
                }
            }
            Some(experts) => {
                for expert in 0..experts.count {
                    mlp(&format!("mlp.experts.{expert}"), experts.width);
                }
                if experts.shared > 0 {
                    mlp("mlp.shared_experts", experts.shared);
                }
                if experts.gated {
                    model.vector(hidden);
                }
                // The router.
                model.matrix(experts.count, hidden);
            }
        }
    }
    model.vector(hidden);
    if !tied {
        model.matrix(vocabulary, hidden);
    }
    if experts.is_some() {
        model.notes.push(
            "experts are sharded over all ranks like other layers, and every one is gathered in every pass: \
             no expert parallelism"
                .to_owned(),
        );
    }
    Ok(())
}

/// Whether the head is the embedding; said where the file does not say it.
fn tied(keys: &Keys) -> Result<bool, UsageError> {
    let tied = keys.flag(TIED)?.ok_or_else(|| keys.missing(TIED))?;
    if keys.get(TIED).is_none() {
        keys.assume(TIED, tied);
    }
    Ok(tied)
}

/// GPT-2: fused query-key-value, biases everywhere, learned positions.
fn gpt2(keys: &Keys, model: &mut Model) -> Result<(), UsageError> {
    let width = keys.number("n_embd", 1..=MAX_WIDTH)?;
    let blocks = keys.number("n_layer", 1..=MAX_BLOCKS)?;
    let heads = keys.number("n_head", 1..=MAX_HEADS)?;
    if !width.is_multiple_of(heads) {
        return Err(keys.error(format!(
            "n_head is {heads} and does not divide n_embd, {width}"
        )));
    }
    let positions = keys.number("n_positions", 1..=MAX_VOCABULARY)?;
    let vocabulary = keys.number("vocab_size", 1..=MAX_VOCABULARY)?;
    let inner = keys.find("n_inner", 1..=MAX_WIDTH)?.unwrap_or(4 * width);
    model.blocks = blocks;
    for rows in [vocabulary, positions] {
        model.matrix(rows, width);
    }
    for block in 0..blocks {
        for (name, rows, cols) in [
            ("attn.c_attn", 3 * width, width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", inner, width),
            ("mlp.c_proj", width, inner),
        ] {
            model.linear(block, format!("transformer.h.{block}.{name}"), rows, cols);
            model.vector(rows);
        }
        // Two norms of two vectors.
        (0..4).for_each(|_| model.vector(width));
    }
    model.vector(width);
    model.vector(width);
    if !tied(keys)? {
        model.matrix(vocabulary, width);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn planned(config: Value) -> Result<Model, String> {
        let keys = Keys::new("config.json", config).expect("an object");
        model("config.json", keys).map_err(|error| error.to_string())
    }

    fn parameters(config: Value) -> u128 {
        planned(config)
            .expect("a model")
            .shapes
            .parameters()
            .iter()
            .sum()
    }

    /// As their authors count them.
    #[test]
    fn known_models_have_their_parameters() {
        let llama = json!({
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": false,
        });
        let mixtral = json!({
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000, "num_local_experts": 8,
        });
        let qwen2 = json!({
            "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
        });
        let qwen3 = json!({
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
            "num_experts": 128, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
        });
        let qwen2_moe = json!({
            "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
            "num_attention_heads": 16, "vocab_size": 151_936, "num_experts": 60, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        });
        let deepseek = json!({
            "model_type": "deepseek", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102_400, "n_routed_experts": 64, "n_shared_experts": 2,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1, "tie_word_embeddings": false,
        });
        let gpt2 = json!({
            "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": null,
            "vocab_size": 50_257,
        });
        for (config, expected) in [
            (llama, 8_030_261_248),
            (mixtral, 46_702_792_704),
            (qwen2, 7_615_616_512),
            (qwen3, 30_532_122_624),
            (qwen2_moe, 14_315_784_192),
            (deepseek, 16_375_728_128),
            (gpt2, 124_439_808),
        ] {
            assert_eq!(parameters(config.clone()), expected, "{config}");
        }
    }

    /// What transformers makes of a configuration that says nothing but its type: the parameters of its model on the meta device.
    #[test]
    fn a_type_alone_is_what_transformers_makes_of_it() {
        for (model_type, expected) in [
            ("llama", 6_738_415_616),
            ("mistral", 7_241_732_096),
            ("mixtral", 46_702_792_704),
            ("qwen2", 12_049_846_272),
            ("qwen2_moe", 14_315_784_192),
            ("qwen3", 12_049_461_248),
            ("qwen3_moe", 15_350_731_776),
            ("gpt2", 124_439_808),
        ] {
            let config = json!({"model_type": model_type});
            assert_eq!(parameters(config.clone()), expected, "{model_type}");
            let notes = planned(config).expect("a model").notes;
            let said = format!("as in transformers' configuration of {model_type}");
            assert!(notes.iter().any(|note| note.contains(&said)), "{notes:?}");
        }
    }

    /// A key that a file lacks has its type's value, whatever the others say, and is named beside the plan.
    #[test]
    fn a_key_that_is_missing_has_the_value_of_its_type() {
        for known in TYPES {
            let Some(defaults) = known.defaults else {
                continue;
            };
            let mut config: Value = serde_json::from_str(defaults).expect("JSON");
            config["model_type"] = json!(known.name);
            // Other sizes than the defaults, in some of the keys.
            for (key, value) in [
                ("vocab_size", 1000),
                ("num_hidden_layers", 3),
                ("n_layer", 3),
            ] {
                if config.get(key).is_some() {
                    config[key] = json!(value);
                }
            }
            let whole = parameters(config.clone());
            let keys: Vec<String> = config.as_object().expect("keys").keys().cloned().collect();
            for key in keys.iter().filter(|key| *key != "model_type") {
                let mut lacks = config.clone();
                lacks.as_object_mut().expect("keys").remove(key);
                let changed = ["vocab_size", "num_hidden_layers", "n_layer"].contains(&&**key);
                let found = planned(lacks).expect(key);
                let sum: u128 = found.shapes.parameters().iter().sum();
                assert_eq!(sum == whole, !changed, "{}: {key}", known.name);
                let named = found
                    .notes
                    .iter()
                    .any(|note| note.contains(&format!("{key} ")));
                // Not what no layer of the model has. The experts of Mixtral have the width of an MLP.
                let no_dense = known.experts.is_some() && known.name != "mixtral";
                let used = !(no_dense && key == "intermediate_size");
                // Nor what adds nothing, or follows from others by definition.
                let said = match &config[key] {
                    Value::Null => key == "num_key_value_heads",
                    Value::Bool(flag) => *flag || key == TIED,
                    _ => used,
                };
                assert_eq!(named, said, "{}: {key}", known.name);
            }
        }
    }

    /// Also what adds layers without a key of the file is named.
    #[test]
    fn what_adds_layers_is_named() {
        let llama = json!({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4});
        for (config, named) in [
            (llama, "num_key_value_heads 4,"),
            (json!({"model_type": "gpt2"}), "tie_word_embeddings true,"),
            (json!({"model_type": "qwen2_moe"}), "qkv_bias true,"),
        ] {
            let notes = planned(config).expect("a model").notes;
            assert!(notes.iter().any(|note| note.contains(named)), "{notes:?}");
        }
    }

    /// A name that another type has for a key is none.
    #[test]
    fn synonyms_belong_to_their_types() {
        for (model_type, key) in [
            ("llama", "n_embd"),
            ("llama", "n_layer"),
            ("mistral", "n_head"),
        ] {
            let plain = parameters(json!({"model_type": model_type}));
            let with = parameters(json!({"model_type": model_type, key: 8}));
            assert_eq!(plain, with, "{model_type}: {key}");
        }
    }

    /// Qwen2 has a bias in queries, keys and values, and no key that says so.
    #[test]
    fn a_bias_of_the_type_is_there_whatever_the_file_says() {
        let plain = parameters(json!({"model_type": "qwen2"}));
        for said in [true, false] {
            let config = json!({"model_type": "qwen2", "qkv_bias": said, "attention_bias": said});
            assert_eq!(parameters(config), plain);
        }
        let sparse = |said: bool| parameters(json!({"model_type": "qwen2_moe", "qkv_bias": said}));
        assert_eq!(sparse(true) - sparse(false), 24 * 3 * 2048);
    }

    /// Where the type is not known, keys that models differ in must be there.
    #[test]
    fn nothing_is_assumed_of_an_unknown_type() {
        let sizes = json!({
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
            "num_key_value_heads": 2, "tie_word_embeddings": false,
        });
        let mut sparse = sizes.clone();
        sparse["num_local_experts"] = json!(4);
        sparse["moe_intermediate_size"] = json!(96);
        let mut deepseek = sparse.clone();
        deepseek["model_type"] = json!("deepseek");
        for (config, keys) in [
            (
                &sizes,
                &[
                    "num_key_value_heads",
                    "tie_word_embeddings",
                    "intermediate_size",
                ][..],
            ),
            (&sparse, &["moe_intermediate_size"]),
            (&deepseek, &["num_local_experts", "num_key_value_heads"]),
        ] {
            assert!(planned(config.clone()).is_ok());
            for key in keys {
                let mut lacks = config.clone();
                lacks.as_object_mut().expect("keys").remove(*key);
                let error = planned(lacks).expect_err(key);
                let key = match *key {
                    "num_local_experts" => "n_routed_experts",
                    key => key,
                };
                assert!(
                    error.contains(&format!("the key {key} is missing")),
                    "{error}"
                );
            }
        }
        let mut dense = sparse;
        dense["model_type"] = json!("llama");
        let error = planned(dense).expect_err("experts");
        assert!(error.contains("num_local_experts is set"), "{error}");
    }

    /// transformers reads two names of some keys.
    #[test]
    fn a_key_has_synonyms() {
        for (model_type, one, other, value) in [
            ("mixtral", "num_local_experts", "num_experts", 4),
            ("qwen3_moe", "num_experts", "num_local_experts", 4),
            ("gpt2", "n_embd", "hidden_size", 96),
            ("gpt2", "n_layer", "num_hidden_layers", 2),
        ] {
            let of = |key: &str| parameters(json!({"model_type": model_type, key: value}));
            assert_eq!(of(one), of(other), "{one}");
            assert_ne!(of(one), parameters(json!({"model_type": model_type})));
            let both = json!({"model_type": model_type, one: value, other: 2 * value});
            assert!(planned(both).is_err_and(|error| error.contains("leave one of them out")));
        }
    }

    #[test]
    fn keys_add_biases_and_take_the_head() {
        let sizes = json!({
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
            "num_key_value_heads": 4, "tie_word_embeddings": false,
        });
        let with = |key: &str| {
            let mut config = sizes.clone();
            config[key] = json!(true);
            parameters(config)
        };
        let plain = parameters(sizes.clone());
        assert_eq!(with("attention_bias"), plain + 2 * 4 * 64);
        assert_eq!(with("mlp_bias"), plain + 2 * (2 * 96 + 64));
        assert_eq!(with("tie_word_embeddings"), plain - 100 * 64);
    }
}

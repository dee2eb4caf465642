//! The models that a config.json of Hugging Face describes: those like Llama, with experts or without, and GPT-2.

use super::keys::Keys;
use super::layers::Model;
use crate::output::shown;
use crate::usage::UsageError;
use lowp_format::Shape;

/// Largest width of anything.
const MAX_WIDTH: usize = 1 << 24;
/// Most heads, blocks, and experts of a block.
const MAX_HEADS: usize = 1 << 14;
const MAX_BLOCKS: usize = 1 << 12;
const MAX_EXPERTS: usize = 1 << 12;
const MAX_VOCABULARY: usize = 1 << 26;
/// Most linear layers in all.
const MAX_LAYERS: usize = 1 << 20;

/// What models of a type have beside what their keys say.
#[derive(Clone, Copy, Debug, Default)]
struct Habits {
    /// Biases of queries, keys and values without a key that says so.
    qkv_bias: bool,
    /// A norm of queries and one of keys.
    qk_norm: bool,
}

/// The types whose layers are known here.
const TYPES: &[(&str, Habits)] = &[
    ("llama", Habits::of(false, false)),
    ("mistral", Habits::of(false, false)),
    ("mixtral", Habits::of(false, false)),
    ("qwen2", Habits::of(true, false)),
    ("qwen2_moe", Habits::of(true, false)),
    ("qwen3", Habits::of(false, true)),
    ("qwen3_moe", Habits::of(false, true)),
    ("deepseek", Habits::of(false, false)),
];
const GPT2: &str = "gpt2";

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

impl Habits {
    const fn of(qkv_bias: bool, qk_norm: bool) -> Self {
        Self { qkv_bias, qk_norm }
    }
}

/// The model that `keys` describe.
///
/// # Errors
/// A key that is missing, has a number that no model has, or speaks of layers that are not known here; each is named.
pub(super) fn model(name: &str, keys: &Keys) -> Result<Model, UsageError> {
    for (key, what) in UNKNOWN {
        if keys.is_set(key) {
            return Err(keys.error(format!(
                "{key} is set: {what}; lowp plans models like Llama, with experts or without, and GPT-2"
            )));
        }
    }
    // Every block, or every block behind the first ones.
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
    match keys.text("model_type")? {
        Some(GPT2) => gpt2(keys, &mut model)?,
        None if keys.get("n_embd").is_some() => gpt2(keys, &mut model)?,
        None => llama(keys, Habits::default(), &mut model)?,
        Some(found) => match TYPES.iter().find(|(known, _)| *known == found) {
            Some((_, habits)) => llama(keys, *habits, &mut model)?,
            None => {
                let known = TYPES.iter().map(|(known, _)| *known).chain([GPT2]);
                return Err(keys.error(format!(
                    "model_type is {}, and lowp plans {}; leave the key out if the model has the layers of Llama",
                    shown(found),
                    known.collect::<Vec<_>>().join(", ")
                )));
            }
        },
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

/// What a config says of experts.
fn experts(keys: &Keys, blocks: usize) -> Result<Option<Experts>, UsageError> {
    let mut found: Option<(&str, usize)> = None;
    for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
        let Some(count) = keys.find(key, 1..=MAX_EXPERTS)? else {
            continue;
        };
        if let Some((other, number)) = found
            && number != count
        {
            return Err(keys.error(format!(
                "{other} is {number} and {key} is {count}; leave one of them out"
            )));
        }
        found = Some((key, count));
    }
    let Some((key, count)) = found else {
        return Ok(None);
    };
    let width = match keys.find("moe_intermediate_size", 1..=MAX_WIDTH)? {
        Some(width) => width,
        None if key == "num_local_experts" => keys.number("intermediate_size", 1..=MAX_WIDTH)?,
        None => keys.number("moe_intermediate_size", 1..=MAX_WIDTH)?,
    };
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
fn llama(keys: &Keys, habits: Habits, model: &mut Model) -> Result<(), UsageError> {
    let hidden = keys.number("hidden_size", 1..=MAX_WIDTH)?;
    let blocks = keys.number("num_hidden_layers", 1..=MAX_BLOCKS)?;
    let heads = keys.number("num_attention_heads", 1..=MAX_HEADS)?;
    let kv_heads = keys
        .find("num_key_value_heads", 1..=MAX_HEADS)?
        .unwrap_or(heads);
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
    let experts = experts(keys, blocks)?;
    let dense = match experts {
        Some(experts) if experts.from == 0 => 0,
        _ => keys.number("intermediate_size", 1..=MAX_WIDTH)?,
    };
    let [attention_bias, mlp_bias] =
        ["attention_bias", "mlp_bias"].map(|key| keys.flag(key, false));
    let (attention_bias, mlp_bias) = (attention_bias?, mlp_bias?);
    let each = 7 + 3 * experts.map_or(0, |experts| experts.count);
    if blocks * each > MAX_LAYERS {
        return Err(keys.error(format!(
            "num_hidden_layers is {blocks}, and each block has up to {each} linear layers; at most {MAX_LAYERS} in all are planned"
        )));
    }
    let (queries, values) = (heads * head, kv_heads * head);
    model.blocks = blocks;
    model.vars.push(Shape::new(vocabulary, hidden));
    for block in 0..blocks {
        let at = format!("model.layers.{block}");
        for (name, rows, cols) in [
            ("q", queries, hidden),
            ("k", values, hidden),
            ("v", values, hidden),
            ("o", hidden, queries),
        ] {
            model.linear(block, format!("{at}.self_attn.{name}_proj"), rows, cols);
            if attention_bias || (habits.qkv_bias && name != "o") {
                model.vector(rows);
            }
        }
        if habits.qk_norm {
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
                model.vars.push(Shape::new(experts.count, hidden));
            }
        }
    }
    model.vector(hidden);
    if !keys.flag("tie_word_embeddings", false)? {
        model.vars.push(Shape::new(vocabulary, hidden));
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
        model.vars.push(Shape::new(rows, width));
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
    if !keys.flag("tie_word_embeddings", true)? {
        model.vars.push(Shape::new(vocabulary, width));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn parameters(config: Value) -> u128 {
        let keys = Keys::new("config.json", config).expect("an object");
        let model = model("config.json", &keys).expect("a model");
        model.parameters().iter().sum()
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
            "num_attention_heads": 16, "vocab_size": 102_400, "n_routed_experts": 64, "n_shared_experts": 2,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1,
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

    #[test]
    fn keys_add_biases_and_take_the_head() {
        let sizes = json!({
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
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

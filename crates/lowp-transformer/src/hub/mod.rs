//! [`HubModel`]: the models that a config.json of Hugging Face describes: those like Llama, with experts or without, and GPT-2.

mod keys;
mod network;
#[cfg(test)]
mod tests;
mod types;

use lowp_file::text::shown;
use lowp_fsdp::VarUse;
use lowp_fsdp::cost::{CostError, ModelShapes};
use serde_json::Value;
use thiserror::Error;

use keys::{Keys, names};
use types::{GPT2, TYPES, Type};

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

/// A config.json that describes no model that is known here: the file, the key and what is wrong with it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct HubError(String);

/// The parameters of a model that a config.json describes.
#[derive(Clone, Debug, Default)]
pub struct HubModel {
    /// The name of the file that describes it, for errors.
    pub name: String,
    /// Transformer blocks.
    pub blocks: usize,
    /// The linear layers in the order of forward, and what stays in f32.
    pub shapes: ModelShapes,
    /// What was taken for granted, in words.
    pub notes: Vec<String>,
}

impl HubModel {
    /// The model that `config`, the contents of the file `name`, describes.
    ///
    /// # Errors
    /// A key that is missing, has a number that no model has, or speaks of layers that are not known here; each is named.
    pub fn new(name: &str, config: Value) -> Result<Self, HubError> {
        model(name, Keys::new(name, config)?)
    }

    fn linear(&mut self, block: usize, name: String, rows: usize, cols: usize) {
        self.shapes.linear(block, name, rows, cols);
    }

    /// Adds a vector that stays in f32.
    fn vector(&mut self, len: usize) {
        self.shapes.vector(len);
    }

    /// Adds the embedding, which may be the head.
    fn embedding(&mut self, vocabulary: usize, width: usize, tied: bool) {
        let used = match tied {
            true => VarUse::FirstAndLast,
            false => VarUse::First,
        };
        self.matrix(vocabulary, width, used);
    }

    /// Adds a matrix that stays in f32.
    fn matrix(&mut self, rows: usize, cols: usize, used: VarUse) {
        self.shapes.matrix(rows, cols, used);
    }

    /// Checks that bytes can be counted.
    fn check(&self) -> Result<(), HubError> {
        self.shapes.check().map_err(|error| {
            let name = shown(&self.name);
            HubError(match error {
                CostError::Parameters { .. } => format!("{name} has {error}"),
                _ => format!("{name}: {error}"),
            })
        })
    }
}

fn model(name: &str, keys: Keys) -> Result<HubModel, HubError> {
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
    let mut model = HubModel {
        name: name.to_owned(),
        ..HubModel::default()
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
fn experts(keys: &Keys, known: Option<&str>, blocks: usize) -> Result<Option<Experts>, HubError> {
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

/// The sizes of a model like Llama.
#[derive(Clone, Copy, Debug)]
struct LlamaShape {
    hidden: usize,
    blocks: usize,
    /// Values of a head.
    head: usize,
    /// Values of all heads of queries.
    queries: usize,
    /// Values of all heads of keys, and of values.
    values: usize,
    vocabulary: usize,
    /// Width of the MLP of blocks without experts; 0 where all have some.
    dense: usize,
    experts: Option<Experts>,
    attention_bias: bool,
    qkv_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
    tied: bool,
}

impl LlamaShape {
    fn read(keys: &Keys, found: Option<&Type>) -> Result<Self, HubError> {
        let hidden = keys.number("hidden_size", 1..=MAX_WIDTH)?;
        let blocks = keys.number("num_hidden_layers", 1..=MAX_BLOCKS)?;
        let heads = keys.number("num_attention_heads", 1..=MAX_HEADS)?;
        let kv_heads = kv_heads(keys, found, heads)?;
        let head = head_width(keys, hidden, heads)?;
        let vocabulary = keys.number("vocab_size", 1..=MAX_VOCABULARY)?;
        let known = found.and_then(|found| found.experts);
        let experts = experts(keys, known, blocks)?;
        let dense = match experts {
            Some(experts) if experts.from == 0 => 0,
            _ => keys.number("intermediate_size", 1..=MAX_WIDTH)?,
        };
        let [attention_bias, qkv_bias, mlp_bias] = biases(keys)?;
        let tied = tied(keys)?;
        let each = 7 + 3 * experts.map_or(0, |experts| experts.count);
        if blocks * each > MAX_LAYERS {
            return Err(keys.error(format!(
                "num_hidden_layers is {blocks}, and each block has up to {each} linear layers; at most {MAX_LAYERS} in all are planned"
            )));
        }
        Ok(Self {
            hidden,
            blocks,
            head,
            queries: heads * head,
            values: kv_heads * head,
            vocabulary,
            dense,
            experts,
            attention_bias,
            qkv_bias: qkv_bias || found.is_some_and(|found| found.qkv_bias),
            mlp_bias,
            qk_norm: found.is_some_and(|found| found.qk_norm),
            tied,
        })
    }

    /// Adds the parameters of a block.
    fn add_block(&self, model: &mut HubModel, block: usize) {
        let hidden = self.hidden;
        for (name, rows, cols) in [
            ("q", self.queries, hidden),
            ("k", self.values, hidden),
            ("v", self.values, hidden),
            ("o", hidden, self.queries),
        ] {
            let name_of_layer = format!("model.layers.{block}.self_attn.{name}_proj");
            model.linear(block, name_of_layer, rows, cols);
            if self.attention_bias || (self.qkv_bias && name != "o") {
                model.vector(rows);
            }
        }
        if self.qk_norm {
            model.vector(self.head);
            model.vector(self.head);
        }
        // In front of attention and of the MLP.
        model.vector(hidden);
        model.vector(hidden);
        match self.experts.filter(|experts| block >= experts.from) {
            None => {
                self.add_mlp(model, block, "mlp", self.dense);
                if self.mlp_bias {
                    for len in [self.dense, self.dense, hidden] {
                        model.vector(len);
                    }
                }
            }
            Some(experts) => self.add_experts(model, block, experts),
        }
    }

    /// Adds the layers of an MLP, or of an expert.
    fn add_mlp(&self, model: &mut HubModel, block: usize, name: &str, width: usize) {
        for (part, rows, cols) in [
            ("gate", width, self.hidden),
            ("up", width, self.hidden),
            ("down", self.hidden, width),
        ] {
            let name = format!("model.layers.{block}.{name}.{part}_proj");
            model.linear(block, name, rows, cols);
        }
    }

    /// Adds what a sparse block has in the place of an MLP.
    fn add_experts(&self, model: &mut HubModel, block: usize, experts: Experts) {
        for expert in 0..experts.count {
            self.add_mlp(
                model,
                block,
                &format!("mlp.experts.{expert}"),
                experts.width,
            );
        }
        if experts.shared > 0 {
            self.add_mlp(model, block, "mlp.shared_experts", experts.shared);
        }
        if experts.gated {
            model.vector(self.hidden);
        }
        // The router.
        model.matrix(experts.count, self.hidden, VarUse::Throughout);
    }
}

/// A model like Llama.
fn llama(keys: &Keys, found: Option<&Type>, model: &mut HubModel) -> Result<(), HubError> {
    let shape = LlamaShape::read(keys, found)?;
    model.blocks = shape.blocks;
    model.embedding(shape.vocabulary, shape.hidden, shape.tied);
    for block in 0..shape.blocks {
        shape.add_block(model, block);
    }
    model.vector(shape.hidden);
    if !shape.tied {
        model.matrix(shape.vocabulary, shape.hidden, VarUse::Last);
    }
    if shape.experts.is_some() {
        model.notes.push(
            "experts are sharded over all ranks like other layers, and every one is gathered in every pass: \
             no expert parallelism"
                .to_owned(),
        );
    }
    Ok(())
}

/// Heads of keys and values.
fn kv_heads(keys: &Keys, found: Option<&Type>, heads: usize) -> Result<usize, HubError> {
    let kv_heads = match keys.find("num_key_value_heads", 1..=MAX_HEADS)? {
        Some(kv_heads) => kv_heads,
        // As many as heads, where transformers or the file says so.
        None if found.is_some_and(|found| found.defaults.is_some())
            || keys.is_null("num_key_value_heads") =>
        {
            keys.assume("num_key_value_heads", heads);
            heads
        }
        None => return Err(keys.missing("num_key_value_heads")),
    };
    match heads.is_multiple_of(kv_heads) {
        true => Ok(kv_heads),
        false => Err(keys.error(format!(
            "num_key_value_heads is {kv_heads} and does not divide num_attention_heads, {heads}"
        ))),
    }
}

/// Values of a head.
fn head_width(keys: &Keys, hidden: usize, heads: usize) -> Result<usize, HubError> {
    match keys.find("head_dim", 1..=MAX_WIDTH)? {
        Some(head) => Ok(head),
        None if hidden.is_multiple_of(heads) => Ok(hidden / heads),
        None => Err(keys.error(format!(
            "hidden_size is {hidden}, which {heads} num_attention_heads do not divide; add head_dim"
        ))),
    }
}

/// Whether attention has biases, its inputs alone, and the MLP; said where the file does not say that there are some.
fn biases(keys: &Keys) -> Result<[bool; 3], HubError> {
    const KEYS: [&str; 3] = ["attention_bias", "qkv_bias", "mlp_bias"];
    let [attention, qkv, mlp] = KEYS.map(|key| keys.flag(key));
    let biases = [attention?, qkv?, mlp?].map(|bias| bias.unwrap_or(false));
    for (key, bias) in KEYS.into_iter().zip(biases) {
        if bias && keys.get(key).is_none() {
            keys.assume(key, bias);
        }
    }
    Ok(biases)
}

/// Whether the head is the embedding; said where the file does not say it.
fn tied(keys: &Keys) -> Result<bool, HubError> {
    let tied = keys.flag(TIED)?.ok_or_else(|| keys.missing(TIED))?;
    if keys.get(TIED).is_none() {
        keys.assume(TIED, tied);
    }
    Ok(tied)
}

/// GPT-2: fused query-key-value, biases everywhere, learned positions.
fn gpt2(keys: &Keys, model: &mut HubModel) -> Result<(), HubError> {
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
    let tied = tied(keys)?;
    model.embedding(vocabulary, width, tied);
    model.matrix(positions, width, VarUse::Throughout);
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
    if !tied {
        model.matrix(vocabulary, width, VarUse::Last);
    }
    Ok(())
}

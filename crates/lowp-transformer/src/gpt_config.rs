//! [`GptConfig`]: a decoder-only byte-level transformer with pre-norm blocks and an untied head, and the parameters that follow.

use lowp_fsdp::{LinearSpec, VarSpec};
use lowp_shard::Init;
use lowp_train::Model;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{Block, Sizes};

/// Bytes are the tokens: a vocabulary has at least as many.
pub(crate) const BYTES: usize = 256;

/// Standard deviation of the initial weights of a model of width `dim`: about half of `1 / sqrt(dim)`, at most 0.05. The customary
/// 0.02 is that of width 800; at width 128 it cost 2% of validation loss after 200 steps.
fn init_std(dim: usize) -> f32 {
    0.05 * (128.0 / dim.max(128) as f32).sqrt()
}

/// The sizes of a transformer, as they are configured; [`Sizes`] are those that follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Record", try_from = "Record")]
pub struct GptConfig {
    /// Width of the residual stream; a multiple of `heads`.
    pub dim: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads per block.
    pub heads: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Tokens that there are: 256 bytes at least.
    pub vocab: usize,
    /// What its blocks are.
    pub arch: Arch,
}

/// What the blocks of a model are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arch {
    /// As in GPT-2: layer norms, learned positions, a fused projection of queries, keys and values, GELU.
    #[default]
    Gpt,
    /// As in Llama: norms by the root mean square, rotary positions, a gated MLP.
    Llama {
        /// Heads of keys and values, each of which serves as many heads of queries.
        kv_heads: usize,
    },
}

impl Arch {
    /// The name, as `--arch` has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpt => "gpt",
            Self::Llama { .. } => "llama",
        }
    }

    /// Heads of keys and values, where they may be fewer than those of queries.
    pub fn kv_heads(self) -> Option<usize> {
        match self {
            Self::Gpt => None,
            Self::Llama { kv_heads } => Some(kv_heads),
        }
    }
}

impl Default for GptConfig {
    /// A model that two cores train in a minute.
    fn default() -> Self {
        Self {
            dim: 128,
            layers: 4,
            heads: 4,
            seq: 128,
            vocab: BYTES,
            arch: Arch::Gpt,
        }
    }
}

impl GptConfig {
    /// Width of the gated MLP: 8/3 of the model's, rounded up to a multiple of 128.
    pub fn gated(&self) -> usize {
        (8 * self.dim).div_ceil(3).next_multiple_of(128)
    }

    /// The same with what follows: the width of the gated MLP and the base of rotary positions.
    pub fn sizes(&self) -> Sizes {
        let Self {
            dim,
            layers,
            heads,
            seq,
            vocab,
            arch,
        } = *self;
        Sizes {
            dim,
            layers,
            heads,
            seq,
            vocab,
            block: match arch {
                Arch::Gpt => Block::Gpt,
                Arch::Llama { kv_heads } => Block::Llama {
                    kv_heads,
                    gated: self.gated(),
                    theta: 10_000.0,
                },
            },
        }
    }
}

impl Model for GptConfig {
    /// The linear layers of all blocks, in the order in which they run. Those of Llama have the names that transformers gives
    /// their weights.
    fn linears(&self) -> Vec<LinearSpec> {
        let d = self.dim;
        // Residual branches add up over 2 * layers outputs; their last weight starts smaller by that root.
        let residual = Init::Normal(init_std(d) / (2.0 * self.layers as f32).sqrt());
        let plain = Init::Normal(init_std(d));
        let kinds = match self.arch {
            Arch::Gpt => vec![
                ("qkv", 3 * d, d, plain),
                ("proj", d, d, residual),
                ("fc", 4 * d, d, plain),
                ("out", d, 4 * d, residual),
            ],
            Arch::Llama { kv_heads } => {
                let (kv, gated) = (d / self.heads * kv_heads, self.gated());
                vec![
                    ("self_attn.q_proj", d, d, plain),
                    ("self_attn.k_proj", kv, d, plain),
                    ("self_attn.v_proj", kv, d, plain),
                    ("self_attn.o_proj", d, d, residual),
                    ("mlp.gate_proj", gated, d, plain),
                    ("mlp.up_proj", gated, d, plain),
                    ("mlp.down_proj", d, gated, residual),
                ]
            }
        };
        let name = |block: usize, kind: &str| match self.arch {
            Arch::Gpt => format!("block{block}.{kind}"),
            Arch::Llama { .. } => format!("model.layers.{block}.{kind}.weight"),
        };
        let of_block = |block: usize| {
            let spec = move |&(kind, rows, cols, init): &(&str, usize, usize, Init)| LinearSpec {
                name: name(block, kind),
                block,
                rows,
                cols,
                init,
                amax_group: None,
            };
            kinds.iter().map(spec).collect::<Vec<_>>()
        };
        (0..self.layers).flat_map(of_block).collect()
    }

    /// The parameters that stay in f32: embeddings, norms and the head.
    fn vars(&self) -> Vec<VarSpec> {
        let matrix = |name: &str, rows: usize| VarSpec {
            name: name.to_owned(),
            shape: vec![rows, self.dim],
            init: Init::Normal(init_std(self.dim)),
            decay: true,
        };
        let scale = |name: String, value: f32| VarSpec {
            name,
            shape: vec![self.dim],
            init: Init::Constant(value),
            decay: false,
        };
        if let Arch::Llama { .. } = self.arch {
            let norms = ["input_layernorm", "post_attention_layernorm"];
            let of_block = |b: usize| norms.map(|norm| format!("model.layers.{b}.{norm}.weight"));
            let last = "model.norm.weight".to_owned();
            let norms = (0..self.layers).flat_map(of_block).chain([last]);
            let mut specs = vec![matrix("model.embed_tokens.weight", self.vocab)];
            specs.extend(norms.map(|name| scale(name, 1.0)));
            specs.push(matrix("lm_head.weight", self.vocab));
            return specs;
        }
        let mut specs = vec![matrix("tokens", self.vocab), matrix("positions", self.seq)];
        let blocks = (0..self.layers).flat_map(|b| [1, 2].map(|i| format!("block{b}.norm{i}")));
        for norm in blocks.chain(["norm".to_owned()]) {
            for (part, value) in [("gamma", 1.0), ("beta", 0.0)] {
                specs.push(scale(format!("{norm}.{part}"), value));
            }
        }
        specs.push(matrix("head", self.vocab));
        specs
    }

    /// The model as transformers configures it (`config.json`), where it has it.
    fn transformers(&self) -> Option<Value> {
        let kv_heads = self.arch.kv_heads()?;
        Some(json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.dim,
            "intermediate_size": self.gated(),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.seq,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "attention_bias": false,
            "mlp_bias": false,
            "tie_word_embeddings": false,
            "bos_token_id": null,
            "eos_token_id": null,
        }))
    }

    /// Floating-point operations of one token in forward and backward: two per weight of a product forward and four backward, and the
    /// same of attention's two products, of which causal masks leave half. What is computed again in backward does not count.
    fn flops_per_token(&self) -> f64 {
        let linears: usize = self.linears().iter().map(|l| l.rows * l.cols).sum();
        let head = self.vocab * self.dim;
        let attention = self.layers * self.seq * self.dim;
        6.0 * (linears + head + attention) as f64
    }
}

/// The sizes as JSON has them.
#[derive(Serialize, Deserialize)]
struct Record {
    dim: usize,
    layers: usize,
    heads: usize,
    seq: usize,
    vocab: usize,
    arch: String,
    kv_heads: Option<usize>,
}

impl From<GptConfig> for Record {
    fn from(config: GptConfig) -> Self {
        Self {
            dim: config.dim,
            layers: config.layers,
            heads: config.heads,
            seq: config.seq,
            vocab: config.vocab,
            arch: config.arch.name().to_owned(),
            kv_heads: config.arch.kv_heads(),
        }
    }
}

impl TryFrom<Record> for GptConfig {
    type Error = String;

    fn try_from(record: Record) -> Result<Self, String> {
        let arch = match (record.arch.as_str(), record.kv_heads) {
            ("gpt", None) => Arch::Gpt,
            ("llama", Some(kv_heads)) => Arch::Llama { kv_heads },
            (arch, kv_heads) => {
                return Err(format!(
                    "arch {arch:?} with kv_heads {kv_heads:?}: there are gpt, without, and llama, with a number"
                ));
            }
        };
        Ok(Self {
            dim: record.dim,
            layers: record.layers,
            heads: record.heads,
            seq: record.seq,
            vocab: record.vocab,
            arch,
        })
    }
}

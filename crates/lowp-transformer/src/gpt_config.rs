//! [`GptConfig`]: a decoder-only transformer with pre-norm blocks, and the parameters that follow. The byte-level models of `lowp train`
//! and those that a config.json describes ([`crate::hub`]) are values of it.

use lowp_fsdp::{LinearSpec, VarSpec, VarUse};
use lowp_shard::Init;
use lowp_train::Model;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::llama::{self, Family, Llama};
use crate::{Block, LlamaSizes, RopeScaling, Sizes};

/// Bytes are the tokens: a vocabulary has at least as many.
pub(crate) const BYTES: usize = 256;

/// Standard deviation of the initial weights of a model of width `dim`: about half of `1 / sqrt(dim)`, at most 0.05. The customary
/// 0.02 is that of width 800; at width 128 it cost 2% of validation loss after 200 steps.
fn init_std(dim: usize) -> f32 {
    0.05 * (128.0 / dim.max(128) as f32).sqrt()
}

/// The sizes of a transformer, as they are configured; [`Sizes`] are those that follow.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "Record", try_from = "Record")]
pub struct GptConfig {
    /// Width of the residual stream; a multiple of `heads`, unless heads have a width of their own.
    pub dim: usize,
    /// Number of transformer blocks.
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
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Arch {
    /// As in GPT-2: layer norms, learned positions, a fused projection of queries, keys and values, GELU.
    #[default]
    Gpt,
    /// As in Llama: norms by the root mean square, rotary positions, a gated MLP.
    Llama(Llama),
}

impl Arch {
    /// The name, as `--arch` has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpt => "gpt",
            Self::Llama(_) => "llama",
        }
    }

    /// Heads of keys and values, where they may be fewer than those of queries.
    pub fn kv_heads(self) -> Option<usize> {
        match self {
            Self::Gpt => None,
            Self::Llama(Llama { kv_heads, .. }) => Some(kv_heads),
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
    /// Width of the gated MLP: 8/3 of the model's, rounded up to a multiple of 128, unless it is given.
    pub fn gated(&self) -> usize {
        match self.arch {
            Arch::Llama(Llama {
                gated: Some(gated), ..
            }) => gated,
            _ => (8 * self.dim).div_ceil(3).next_multiple_of(128),
        }
    }

    /// Values of one head.
    pub fn head_dim(&self) -> usize {
        match self.arch {
            Arch::Llama(Llama {
                head_dim: Some(head_dim),
                ..
            }) => head_dim,
            _ => self.dim / self.heads.max(1),
        }
    }

    /// The same with what follows: the width of heads and of the gated MLP.
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
                Arch::Llama(llama) => Block::Llama(LlamaSizes {
                    kv_heads: llama.kv_heads,
                    head_dim: self.head_dim(),
                    gated: self.gated(),
                    rope: llama.rope,
                    eps: llama.eps,
                    qk_norm: llama.qk_norm(),
                    window: llama.window,
                    tied: llama.tied,
                }),
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
            Arch::Llama(Llama { kv_heads, .. }) => {
                let (head_dim, gated) = (self.head_dim(), self.gated());
                let (q, kv) = (self.heads * head_dim, kv_heads * head_dim);
                vec![
                    ("self_attn.q_proj", q, d, plain),
                    ("self_attn.k_proj", kv, d, plain),
                    ("self_attn.v_proj", kv, d, plain),
                    ("self_attn.o_proj", d, q, residual),
                    ("mlp.gate_proj", gated, d, plain),
                    ("mlp.up_proj", gated, d, plain),
                    ("mlp.down_proj", d, gated, residual),
                ]
            }
        };
        let name = |block: usize, kind: &str| match self.arch {
            Arch::Gpt => format!("block{block}.{kind}"),
            Arch::Llama(_) => format!("model.layers.{block}.{kind}.weight"),
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
        let matrix = |name: &str, rows: usize, used: VarUse| VarSpec {
            name: name.to_owned(),
            shape: vec![rows, self.dim],
            init: Init::Normal(init_std(self.dim)),
            decay: true,
            used,
        };
        let vector = |name: String, len: usize, value: f32| VarSpec {
            name,
            shape: vec![len],
            init: Init::Constant(value),
            decay: false,
            used: VarUse::Throughout,
        };
        let scale = |name: String, value: f32| vector(name, self.dim, value);
        if let Arch::Llama(llama) = self.arch {
            let used = match llama.tied {
                true => VarUse::FirstAndLast,
                false => VarUse::First,
            };
            let mut specs = vec![matrix("model.embed_tokens.weight", self.vocab, used)];
            for block in 0..self.layers {
                let of = |norm: &str| format!("model.layers.{block}.{norm}.weight");
                specs.push(scale(of("input_layernorm"), 1.0));
                if llama.qk_norm() {
                    let norms = ["self_attn.q_norm", "self_attn.k_norm"];
                    specs.extend(norms.map(|norm| vector(of(norm), self.head_dim(), 1.0)));
                }
                specs.push(scale(of("post_attention_layernorm"), 1.0));
            }
            specs.push(scale("model.norm.weight".to_owned(), 1.0));
            if !llama.tied {
                specs.push(matrix("lm_head.weight", self.vocab, VarUse::Last));
            }
            return specs;
        }
        let mut specs = vec![
            matrix("tokens", self.vocab, VarUse::First),
            matrix("positions", self.seq, VarUse::Throughout),
        ];
        let blocks = (0..self.layers).flat_map(|b| [1, 2].map(|i| format!("block{b}.norm{i}")));
        for norm in blocks.chain(["norm".to_owned()]) {
            for (part, value) in [("gamma", 1.0), ("beta", 0.0)] {
                specs.push(scale(format!("{norm}.{part}"), value));
            }
        }
        specs.push(matrix("head", self.vocab, VarUse::Last));
        specs
    }

    /// The model as transformers configures it (`config.json`), where it has it.
    fn transformers(&self) -> Option<Value> {
        let Arch::Llama(llama) = self.arch else {
            return None;
        };
        let mut config = json!({
            "architectures": [llama.family.class()],
            "model_type": llama.family.model_type(),
            "hidden_size": self.dim,
            "intermediate_size": self.gated(),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": llama.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.seq,
            "hidden_act": "silu",
            "rms_norm_eps": shortest(llama.eps),
            "rope_theta": llama.rope.theta,
            "attention_bias": false,
            "mlp_bias": false,
            "tie_word_embeddings": llama.tied,
            "bos_token_id": null,
            "eos_token_id": null,
        });
        if llama.rope.scaling != RopeScaling::Default {
            config["rope_scaling"] = json!(llama.rope.scaling);
        }
        // Qwen3 has heads of 128 where the key is missing.
        if llama.head_dim.is_some() || llama.family == Family::Qwen3 {
            config["head_dim"] = json!(self.head_dim());
        }
        if llama.family == Family::Mistral {
            config["sliding_window"] = json!(llama.window);
        }
        Some(config)
    }

    /// Floating-point operations of one token in forward and backward: two per weight of a product forward and four backward, and the
    /// same of attention's two products, of which causal masks leave half. What is computed again in backward does not count.
    fn flops_per_token(&self) -> f64 {
        let linears: usize = self.linears().iter().map(|l| l.rows * l.cols).sum();
        let head = self.vocab * self.dim;
        let attention = self.layers * self.seq * self.heads * self.head_dim();
        6.0 * (linears + head + attention) as f64
    }
}

/// A number of f32 as JSON writes it in f64: as short as it is.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
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
    #[serde(flatten)]
    llama: Option<llama::Record>,
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
            llama: match config.arch {
                Arch::Gpt => None,
                Arch::Llama(llama) => Some(llama.into()),
            },
        }
    }
}

impl TryFrom<Record> for GptConfig {
    type Error = String;

    fn try_from(record: Record) -> Result<Self, String> {
        let arch = match (record.arch.as_str(), record.kv_heads) {
            ("gpt", None) => Arch::Gpt,
            ("llama", Some(kv_heads)) => Arch::Llama(record.llama.unwrap_or_default().of(kv_heads)),
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

//! [`Llama`]: what blocks like Llama's are made of, in the families of models that have them.

use serde::{Deserialize, Serialize};

use crate::Rope;

/// What norms of Llama add to the mean of squares unless a model says otherwise.
const EPS: f32 = 1e-5;

/// A family of models whose blocks are like Llama's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 2 and 3.
    #[default]
    Llama,
    /// Mistral: attention may see a window.
    Mistral,
    /// Qwen3: queries and keys have norms.
    Qwen3,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Llama, Self::Mistral, Self::Qwen3];

    /// Its `model_type` in a config.json.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The class of transformers.
    pub fn class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// Blocks as in Llama: norms by the root mean square, rotary positions, a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama {
    /// The family that its blocks are like.
    pub family: Family,
    /// Heads of keys and values, each of which serves as many heads of queries.
    pub kv_heads: usize,
    /// Values of one head; the width over the heads, unless it is given.
    pub head_dim: Option<usize>,
    /// Width of the gated MLP; 8/3 of the model's, rounded up to a multiple of 128, unless it is given.
    pub gated: Option<usize>,
    /// How queries and keys are turned by their positions.
    pub rope: Rope,
    /// What norms add to the mean of squares.
    pub eps: f32,
    /// Positions that a token sees, itself included; all before it where there is none.
    pub window: Option<usize>,
    /// Whether the head is the embedding.
    pub tied: bool,
}

impl Llama {
    /// Blocks of Llama 2 with so many heads of keys and values, and an untied head.
    pub fn new(kv_heads: usize) -> Self {
        Self {
            family: Family::Llama,
            kv_heads,
            head_dim: None,
            gated: None,
            rope: Rope::default(),
            eps: EPS,
            window: None,
            tied: false,
        }
    }

    /// Whether queries and keys have a norm each, over the values of a head.
    pub fn qk_norm(&self) -> bool {
        self.family == Family::Qwen3
    }
}

/// What JSON has of it: what is not as in [`Llama::new`].
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Record {
    #[serde(skip_serializing_if = "Option::is_none")]
    family: Option<Family>,
    #[serde(skip_serializing_if = "Option::is_none")]
    head_dim: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gated: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rope: Option<Rope>,
    #[serde(skip_serializing_if = "Option::is_none")]
    eps: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    window: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tied: Option<bool>,
}

impl From<Llama> for Record {
    fn from(llama: Llama) -> Self {
        let usual = Llama::new(llama.kv_heads);
        Self {
            family: Some(llama.family).filter(|family| *family != usual.family),
            head_dim: llama.head_dim,
            gated: llama.gated,
            rope: Some(llama.rope).filter(|rope| *rope != usual.rope),
            eps: Some(llama.eps).filter(|eps| *eps != usual.eps),
            window: llama.window,
            tied: Some(llama.tied).filter(|tied| *tied),
        }
    }
}

impl Record {
    pub(crate) fn of(self, kv_heads: usize) -> Llama {
        let usual = Llama::new(kv_heads);
        Llama {
            family: self.family.unwrap_or(usual.family),
            kv_heads,
            head_dim: self.head_dim,
            gated: self.gated,
            rope: self.rope.unwrap_or(usual.rope),
            eps: self.eps.unwrap_or(usual.eps),
            window: self.window,
            tied: self.tied.unwrap_or(usual.tied),
        }
    }
}

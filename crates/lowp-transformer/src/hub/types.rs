//! [`Type`]: the models that are planned, by `model_type`, and what transformers takes for keys that a config.json of one lacks.

/// Models of one `model_type`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Type {
    pub(super) name: &'static str,
    /// The key that counts experts, where its blocks have any.
    pub(super) experts: Option<&'static str>,
    /// Whether queries and keys have a norm each.
    pub(super) qk_norm: bool,
    /// Whether queries, keys and values have a bias, whatever a file says.
    pub(super) qkv_bias: bool,
    /// The keys that its configuration has in transformers (5.23), with the values of those that a file lacks; null follows from other
    /// keys. Nothing of a type that transformers does not have.
    pub(super) defaults: Option<&'static str>,
}

pub(super) const GPT2: &str = "gpt2";

/// The types whose layers are known here.
pub(super) static TYPES: &[Type] = &[
    Type::dense(
        "llama",
        r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": null, "head_dim": null, "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": false}"#,
    ),
    Type::dense(
        "mistral",
        r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": null, "tie_word_embeddings": false}"#,
    ),
    Type {
        experts: Some("num_local_experts"),
        ..Type::dense(
            "mixtral",
            r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": null, "num_local_experts": 8, "tie_word_embeddings": false}"#,
        )
    },
    Type {
        qkv_bias: true,
        ..Type::dense(
            "qwen2",
            r#"{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "head_dim": null, "tie_word_embeddings": false}"#,
        )
    },
    Type {
        experts: Some("num_experts"),
        ..Type::dense(
            "qwen2_moe",
            r#"{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
            "num_key_value_heads": 16, "head_dim": null, "qkv_bias": true, "num_experts": 60, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "tie_word_embeddings": false}"#,
        )
    },
    Type {
        qk_norm: true,
        ..Type::dense(
            "qwen3",
            r#"{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "head_dim": 128, "attention_bias": false, "tie_word_embeddings": false}"#,
        )
    },
    Type {
        qk_norm: true,
        experts: Some("num_experts"),
        ..Type::dense(
            "qwen3_moe",
            r#"{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": null, "attention_bias": false, "num_experts": 128, "moe_intermediate_size": 768,
            "tie_word_embeddings": false}"#,
        )
    },
    Type {
        name: "deepseek",
        experts: Some("n_routed_experts"),
        qk_norm: false,
        qkv_bias: false,
        defaults: None,
    },
    Type::dense(
        GPT2,
        r#"{"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": null,
        "tie_word_embeddings": true}"#,
    ),
];

/// Other names of a key, which transformers reads in its place. A key of GPT-2 alone has them; that of Llama is none of GPT-2's.
pub(super) static SYNONYMS: &[(&str, &[&str])] = &[
    ("num_experts", &["num_local_experts", "n_routed_experts"]),
    ("num_local_experts", &["num_experts", "n_routed_experts"]),
    ("n_routed_experts", &["num_local_experts", "num_experts"]),
    ("n_embd", &["hidden_size"]),
    ("n_layer", &["num_hidden_layers"]),
    ("n_head", &["num_attention_heads"]),
    ("n_positions", &["max_position_embeddings"]),
];

impl Type {
    const fn dense(name: &'static str, defaults: &'static str) -> Self {
        Self {
            name,
            experts: None,
            qk_norm: false,
            qkv_bias: false,
            defaults: Some(defaults),
        }
    }
}

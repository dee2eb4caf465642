//! Parameters as the authors of models count them, keys that files lack, and what is said of both.

use super::types::TYPES;
use super::{HubModel, TIED};
use serde_json::{Value, json};

fn planned(config: Value) -> Result<HubModel, String> {
    HubModel::new("config.json", config).map_err(|error| error.to_string())
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

/// As transformers reads them: the first dictionary that says something, and the model's own length before that of the dictionary.
#[test]
fn rotary_positions_are_those_of_transformers() {
    let rope = |change: Value| -> Result<crate::RopeScaling, String> {
        let mut config = json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 512,
        });
        for (key, value) in change.as_object().expect("keys") {
            config[key] = value.clone();
        }
        match crate::GptConfig::of_hub("config.json", &config, None) {
            Ok(model) => match model.arch {
                crate::Arch::Llama(llama) => Ok(llama.rope.scaling),
                other => panic!("{other:?}"),
            },
            Err(error) => Err(error.to_string()),
        }
    };
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    let original = |of: Value| match rope(of) {
        Ok(crate::RopeScaling::Llama3 {
            original_max_position_embeddings,
            ..
        }) => original_max_position_embeddings,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        original(json!({"rope_scaling": llama3, "rope_parameters": {}})),
        512
    );
    assert_eq!(
        original(json!({"rope_parameters": llama3, "original_max_position_embeddings": 64})),
        64
    );
    let linear = json!({"rope_type": "linear", "factor": 2.0});
    assert_eq!(
        original(json!({"rope_scaling": llama3, "rope_parameters": linear})),
        512
    );
    for (of, named) in [
        (
            json!({"partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
        ),
        (json!({"rms_norm_eps": -1.0}), "rms_norm_eps"),
        (json!({"rms_norm_eps": 1e308}), "rms_norm_eps"),
        (json!({"hidden_act": 3}), "hidden_act"),
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (
            json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            "full_attention",
        ),
    ] {
        let error = rope(of).expect_err("not computed");
        assert!(error.contains(named), "{error}");
    }
}

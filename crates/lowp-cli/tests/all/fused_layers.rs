//! Layers that engines run as one have one amax unless it is asked otherwise, and `lowp export` names those that do not.

use crate::support::{self, Bench, Tensor, f32s, values};
use serde_json::Value;
use std::fs;

/// Recipes with a scale that follows from the amax of the tensor.
const RECIPES: [&str; 5] = [
    "nvfp4-1d",
    "nvfp4-2d",
    "nvfp4-mxfp8",
    "fp8-current",
    "fp8-delayed",
];

/// Layers that engines run as one, each group with its module.
const GROUPS: [(&str, &[&str]); 4] = [
    ("model.layers.0.self_attn", &["q_proj", "k_proj", "v_proj"]),
    ("model.layers.0.mlp", &["gate_proj", "up_proj"]),
    ("model.layers.1.mlp.experts.0", &["gate_proj", "up_proj"]),
    ("model.layers.1.block_sparse_moe.experts.1", &["w1", "w3"]),
];

/// What they are as patterns.
const PATTERNS: &str = "*.{q,k,v}_proj,*.{gate,up}_proj.weight,*.{w1,w3}";

fn name(module: &str, layer: &str) -> String {
    format!("{module}.{layer}.weight")
}

/// A model of layers with amaxes of their own.
fn model() -> Vec<Tensor> {
    let others = [
        ("model.layers.0.self_attn", "o_proj"),
        ("model.layers.0.mlp", "down_proj"),
        ("model.layers.1.block_sparse_moe.experts.1", "w2"),
    ];
    let fused = GROUPS
        .iter()
        .flat_map(|(module, layers)| layers.iter().map(|layer| (*module, *layer)));
    let all = (1u32..).zip(fused.chain(others));
    all.map(|(at, (module, layer))| {
        let values: Vec<f32> = values(32 * 32, at).iter().map(|x| x * at as f32).collect();
        f32s(&name(module, layer), &[32, 32], &values)
    })
    .collect()
}

fn stderr(bench: &Bench, args: &str) -> (Option<i32>, String) {
    let output = bench.lowp(args);
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// `quantize` and `shard` give the layers of each group the same amax, say so in the metadata, and `verify` makes it again.
#[test]
fn groups_are_known_by_their_names() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    for recipe in RECIPES {
        let quantize = format!("quantize in.safetensors --recipe {recipe}");
        bench.done(&format!("{quantize} -o auto.safetensors"));
        bench.done("verify auto.safetensors --source in.safetensors");
        for option in ["auto", PATTERNS] {
            bench.done(&format!(
                "{quantize} -o q.safetensors --amax-group {option}"
            ));
            bench.done("verify auto.safetensors q.safetensors");
        }
        bench.done(&format!(
            "shard in.safetensors -o ranks --recipe {recipe} --world-size 2"
        ));
        bench.done("unshard ranks -o u.safetensors");
        bench.done("verify auto.safetensors u.safetensors");
        fs::remove_dir_all(bench.path("ranks")).expect("a folder");
        bench.done(&format!("{quantize} -o none.safetensors --amax-group none"));
        bench.done("verify none.safetensors --source in.safetensors");
        let [auto, none] = ["auto", "none"].map(|name| bench.read(&format!("{name}.safetensors")));
        for (module, layers) in GROUPS {
            let amaxes = |file: &support::Contents| -> Vec<Vec<u8>> {
                let amax = |layer: &&str| file.bytes(&format!("{}.amax", name(module, layer)));
                layers.iter().map(|layer| amax(layer).to_vec()).collect()
            };
            let (one, own) = (amaxes(&auto), amaxes(&none));
            assert!(one.iter().all(|amax| *amax == one[0]), "{recipe} {module}");
            assert!(own.iter().any(|amax| *amax != own[0]), "{recipe} {module}");
            assert!(own.contains(&one[0]), "{recipe} {module}");
        }
        let amax = |file: &support::Contents| {
            let name = name("model.layers.0.self_attn", "o_proj");
            file.bytes(&format!("{name}.amax")).to_vec()
        };
        assert_eq!(amax(&auto), amax(&none), "{recipe}");
    }
}

/// Recipes without a scale of the tensor, and a scale that is given, leave nothing to share.
#[test]
fn what_has_no_amax_of_the_tensor_has_no_groups() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    for recipe in [
        "mxfp8",
        "fp8-rowwise",
        "fp8-block",
        "fp8-delayed --delayed-scale 2",
    ] {
        let quantize = format!("quantize in.safetensors --recipe {recipe}");
        bench.done(&format!("{quantize} -o auto.safetensors"));
        bench.done(&format!("{quantize} -o none.safetensors --amax-group none"));
        let [auto, none] = ["auto", "none"]
            .map(|name| fs::read(bench.path(&format!("{name}.safetensors"))).expect("a file"));
        assert!(auto == none, "{recipe}");
    }
}

/// Where one scale of the tensor is stored, layers with scales of their own are named; nothing else is.
#[test]
fn export_names_layers_with_scales_of_their_own() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    // What is stored: the encode scale of NVFP4, its amax share, and the decode scale of FP8.
    let warned = [
        ("nvfp4-1d", "compressed-tensors"),
        ("nvfp4-2d", "modelopt"),
        ("fp8-current", "compressed-tensors"),
    ];
    for recipe in RECIPES.into_iter().chain(["mxfp8"]) {
        bench.done(&format!(
            "quantize in.safetensors -o one.safetensors --recipe {recipe}"
        ));
        bench.done(&format!(
            "quantize in.safetensors -o own.safetensors --recipe {recipe} --amax-group none"
        ));
        for target in ["compressed-tensors", "modelopt", "te", "bf16"] {
            let of_rows = recipe.starts_with("fp8") && target == "modelopt";
            let stored = recipe != "mxfp8" && !["te", "bf16"].contains(&target) && !of_rows;
            assert!(stored || !warned.contains(&(recipe, target)));
            for (file, option, warns) in [
                ("one", "", false),
                ("one", "--fused error", false),
                ("own", "--fused ignore", false),
                ("own", "", stored),
                ("own", "--fused warn", stored),
            ] {
                let export = format!("export {file}.safetensors -o hub --to {target} {option}");
                let (code, message) = stderr(&bench, &export);
                assert_eq!(code, Some(0), "{recipe} {export}: {message}");
                let found = message.contains("engines run these layers as one");
                assert_eq!(found, warns, "{recipe} {export}: {message}");
                if warns {
                    assert!(message.starts_with("warning: "), "{message}");
                    let named = "'model.layers.0.self_attn.k_proj.weight'";
                    assert!(message.contains(named), "{message}");
                    // Of four groups three are named.
                    assert!(message.contains("and 1 more group"), "{message}");
                    for remedy in ["--amax-group auto", "--fused ignore"] {
                        assert!(message.contains(remedy), "{message}");
                    }
                    assert!(
                        !message.contains("o_proj") && !message.contains("w2"),
                        "{message}"
                    );
                }
                fs::remove_dir_all(bench.path("hub")).expect("a folder");
            }
            let export = format!("export own.safetensors -o hub --to {target} --fused error");
            if stored {
                let message = bench.rejected(2, &export);
                assert!(
                    message.contains("engines run these layers as one"),
                    "{message}"
                );
            } else {
                bench.done(&export);
                fs::remove_dir_all(bench.path("hub")).expect("a folder");
            }
        }
    }
}

/// The scales that the message has are those that the file has.
#[test]
fn scales_are_those_of_the_file() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    for (recipe, target, tensor) in [
        ("nvfp4-2d", "compressed-tensors", "weight_global_scale"),
        ("nvfp4-2d", "modelopt", "weight_scale_2"),
        ("fp8-current", "compressed-tensors", "weight_scale"),
    ] {
        bench.done(&format!(
            "quantize in.safetensors -o own.safetensors --recipe {recipe} --amax-group none"
        ));
        let (_, message) = stderr(
            &bench,
            &format!("export own.safetensors -o hub --to {target}"),
        );
        let hub = bench.read("hub/model.safetensors");
        for layer in GROUPS[0].1 {
            let name = format!("{}.{layer}", GROUPS[0].0);
            let bytes = hub.bytes(&format!("{name}.{tensor}"));
            let scale = f32::from_le_bytes(bytes.try_into().expect("four bytes"));
            let said = format!("'{name}.weight' {scale:e}");
            assert!(message.contains(&said), "{said}: {message}");
        }
        fs::remove_dir_all(bench.path("hub")).expect("a folder");
    }
}

/// A Llama trains with groups unless it is asked otherwise, and goes on where its recipe has none of their amaxes.
#[test]
fn trained_models_have_groups() {
    let bench = Bench::new();
    let train = "train --arch llama --dim 32 --layers 1 --heads 2 --kv-heads 2 --seq 16 --batch 2 --eval-batches 1 --steps 2 \
                 --world-size 1 --no-baseline";
    let config = |options: &str| -> Value {
        bench.done(&format!("{train} --json run.json {options}"));
        let text = fs::read_to_string(bench.path("run.json")).expect("a file");
        let document: Value = serde_json::from_str(&text).expect("JSON");
        document["config"]["amax_groups"].clone()
    };
    let module = |layers: &[&str], of: &str| -> Vec<String> {
        let name = |layer: &&str| format!("model.layers.0.{of}.{layer}_proj.weight");
        layers.iter().map(name).collect()
    };
    let expected = serde_json::json!([
        module(&["q", "k", "v"], "self_attn"),
        module(&["gate", "up"], "mlp")
    ]);
    assert_eq!(config("--recipe nvfp4-2d"), expected);
    assert_eq!(
        config("--recipe nvfp4-2d --amax-group none"),
        serde_json::json!([])
    );
    let kept = serde_json::json!([
        module(&["k", "v"], "self_attn"),
        module(&["gate", "up"], "mlp")
    ]);
    // With `.weight` or without.
    for pattern in ["*.q_proj", "*.q_proj.weight"] {
        assert_eq!(
            config(&format!("--recipe nvfp4-2d --keep-bf16 {pattern}")),
            kept
        );
    }
    bench.done(&format!("{train} --recipe nvfp4-2d --save runs"));
    let export = "export runs/nvfp4-2d-seed0 -o hub --to compressed-tensors --fused error";
    bench.done(export);
    bench.done(&format!(
        "{train} --recipe nvfp4-2d --save own --amax-group none"
    ));
    let (code, message) = stderr(
        &bench,
        "export own/nvfp4-2d-seed0 -o own-hub --to compressed-tensors",
    );
    assert_eq!(code, Some(0), "{message}");
    assert!(
        message.contains("model.layers.0.self_attn.v_proj.weight"),
        "{message}"
    );
    // Without amaxes, groups are no difference between two runs.
    bench.done(&format!(
        "{train} --recipe mxfp8 --save plain --stop-after 1 --amax-group none"
    ));
    bench.done(&format!("{train} --recipe mxfp8 --resume plain"));
}

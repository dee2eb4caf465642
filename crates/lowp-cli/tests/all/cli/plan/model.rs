//! `lowp plan --model`: the numbers of `lowp train`, tables, JSON and errors.

use crate::cli::{command, path, stdout, train_json};
use crate::support::exhaustive;
use serde_json::{Value, json};
use std::fs;
use std::process::Command;
use tempfile::TempDir;

/// Sizes of a model of two blocks, some of whose rows are no whole blocks of every recipe.
const SIZES: &str = "--dim 96 --layers 2 --heads 2 --seq 32";

pub(super) fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

pub(super) fn plan_json(args: &str) -> Value {
    let args = [&["plan", "--json"], &words(args)[..]].concat();
    serde_json::from_str(&stdout(&args)).expect("JSON")
}

/// Trains every recipe of `compare` with `options`, which a plan takes, too, and holds the numbers of both against each other.
#[track_caller]
pub(super) fn trains_as_planned(compare: &str, options: &str) {
    let args =
        format!("--steps 1 --eval-batches 1 --batch 8 --compare {compare} {SIZES} {options}");
    let document = train_json(&words(&args));
    let runs = document["runs"].as_array().expect("runs");
    assert!(runs.len() > 1);
    for run in runs {
        let recipe = run["recipe"].as_str().expect("a recipe");
        // The baseline keeps its states in f32.
        let own = match (recipe, options.split_once("--optimizer-state")) {
            ("fp32", Some((others, _))) => others,
            _ => options,
        };
        let plan = plan_json(&format!("--model 10m {SIZES} --recipe {recipe} {own}"));
        for key in [
            "resident_weight_bytes",
            "master_weight_bytes",
            "wire_bytes_per_step",
            "parameter_bytes_per_rank",
        ] {
            assert_eq!(plan[key], run[key], "{key} of {recipe}, {options}");
        }
        assert_eq!(plan["model"]["linear_parameters"], run["parameters"]);
        check_sums(&plan);
    }
}

/// Totals are sums of their parts, and the reference is a plan in bf16.
#[track_caller]
pub(super) fn check_sums(plan: &Value) {
    let number = |value: &Value| value.as_u64().expect("a number");
    let memory = plan["memory"].as_object().expect("memory");
    let parts = memory
        .iter()
        .filter(|(key, _)| !["rank", "total"].contains(&key.as_str()));
    let parts: u64 = parts.map(|(_, bytes)| number(bytes)).sum();
    assert_eq!(parts, number(&plan["memory"]["total"]));
    assert_eq!(plan["memory"]["total"], plan["parameter_bytes_per_rank"]);
    let operations = plan["operations"].as_array().expect("operations");
    for of in ["rank", "world"] {
        for link in ["within_node", "between_nodes"] {
            let sum: u64 = operations.iter().map(|op| number(&op[of][link])).sum();
            assert_eq!(sum, number(&plan["total"][of][link]), "{of} {link}");
        }
    }
    let weights = ["forward", "forward_again", "backward", "full_weights"];
    let weights = operations
        .iter()
        .filter(|op| weights.contains(&op["what"].as_str().expect("a name")));
    let sent: u64 = weights.map(|op| number(&op["sent_bytes"])).sum();
    assert_eq!(sent, number(&plan["wire_bytes_per_step"]));
    // What arrives at a replica's ranks is what all but one of them send to each.
    let shards = number(&plan["config"]["mesh"][1]);
    let replicas = number(&plan["config"]["mesh"][0]);
    for op in operations {
        let arrives = number(&op["world"]["within_node"]) + number(&op["world"]["between_nodes"]);
        let sent = number(&op["sent_bytes"]);
        match op["what"].as_str() {
            Some("replicas") => assert_eq!(arrives, 2 * (replicas - 1) * sent, "{op}"),
            // What each rank has is added in equal parts, which all get.
            Some("gradients_on_all") => {
                assert_eq!(shards * arrives, 2 * replicas * (shards - 1) * sent, "{op}");
            }
            Some("gradients_passed_on" | "matrices") => {
                assert_eq!(arrives, replicas * sent, "{op}");
            }
            // Groups of fewer ranks gather what they keep.
            Some("backward") if plan["config"]["reshard_after_forward"].is_u64() => {}
            _ => assert_eq!(arrives, replicas * (shards - 1) * sent, "{op}"),
        }
    }
    let ratio = |key: &str| plan["ratio"][key].as_f64().expect("a ratio");
    let [bf16, here] = [&plan["bf16"], plan].map(|of| number(&of["wire_bytes_per_step"]));
    // Reading digits may round.
    assert!((ratio("wire") / (bf16 as f64 / here as f64) - 1.0).abs() < 1e-12);
}

/// Every recipe, or one with each kind of scale where `all` of a similar run were tested and long tests do not run whole.
fn recipes(all: bool) -> &'static str {
    match all || exhaustive() {
        true => "all,bf16",
        false => "fp8-delayed,mxfp8,nvfp4-1d,bf16",
    }
}

#[test]
fn every_recipe_on_one_to_four_ranks() {
    for ranks in 1..=4 {
        let compared = recipes(ranks == 1 || ranks == 4);
        trains_as_planned(compared, &format!("--world-size {ranks}"));
    }
}

#[test]
fn every_recipe_that_keeps_its_weights() {
    trains_as_planned("all,bf16", "--world-size 3 --reshard-after-forward false");
    trains_as_planned(
        "mxfp8",
        "--world-size 1 --reshard-after-forward false --recompute",
    );
}

#[test]
fn every_recipe_that_keeps_parts() {
    trains_as_planned("all,bf16", "--world-size 4 --reshard-after-forward 2");
    // Groups of one rank, and of all.
    for ranks in [1, 3] {
        let options = format!("--world-size 3 --reshard-after-forward {ranks} --recompute");
        trains_as_planned("mxfp8,nvfp4-2d", &options);
    }
}

#[test]
fn every_recipe_with_full_weights() {
    for mesh in ["1x1", "1x3", "2x2"] {
        let options = format!("--mesh {mesh} --sharding zero1");
        trains_as_planned(recipes(mesh == "1x3"), &options);
    }
    trains_as_planned(
        "nvfp4-1d",
        "--world-size 4 --sharding zero1 --accumulate 2 --recompute",
    );
}

#[test]
fn every_recipe_on_a_mesh_in_several_passes() {
    trains_as_planned("all,bf16", "--mesh 2x2 --accumulate 2 --recompute");
    trains_as_planned("mxfp8", "--mesh 2x1 --grad-wire bf16 --accumulate 3");
    let options = "--mesh 1x4 --reshard-after-forward 2 --accumulate 2 --recompute";
    trains_as_planned("mxfp8,nvfp4-1d", options);
    trains_as_planned(
        "mxfp8",
        "--mesh 2x2 --reshard-after-forward false --accumulate 2",
    );
}

#[test]
fn modified_recipes_and_layers_in_bf16() {
    let recipes = "nvfp4-1d+bf16-ends,mxfp8+bf16-forward,mxfp8+exact-weights-forward";
    trains_as_planned(recipes, "--world-size 3");
    trains_as_planned(
        "nvfp4-2d,mxfp4-mxfp8",
        "--world-size 2 --keep-bf16 block0.*,*.out",
    );
    trains_as_planned("mxfp8", "--world-size 2 --sharding zero1 --keep-bf16 *.fc");
}

/// Options of recipes are flags here and modifiers there.
#[test]
fn flags_of_recipes_are_modifiers() {
    let of = |recipe: &str| {
        let mut plan = plan_json(&format!("--model 10m --world-size 8 --recipe {recipe}"));
        plan["config"]["recipe"] = Value::Null;
        for operation in plan["operations"].as_array_mut().expect("operations") {
            operation["code"] = Value::Null;
        }
        plan
    };
    assert_eq!(of("nvfp4-1d --row-scaled"), of("nvfp4-1d+row-scaled"));
    assert_ne!(of("nvfp4-1d"), of("nvfp4-1d+row-scaled"));
}

/// A file `name` with this value in a folder of its own.
pub(super) fn file(name: &str, value: &Value) -> (TempDir, String) {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join(name);
    fs::write(&file, value.to_string()).expect("a file");
    (dir, path(&file))
}

pub(super) fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": false,
    })
}

pub(super) fn experts() -> Value {
    json!({
        "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 6144, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
        "num_experts": 128, "moe_intermediate_size": 1536,
    })
}

fn measured() -> Value {
    let row = |bytes: u64, rate: f64| json!({"operation": "one all-gather of the same bytes", "bytes": bytes, "gb_per_s": rate});
    json!({"device": "a device", "ranks": 8, "rows": [row(1_000_000_000, 350.0), row(10_000_000, 150.0)]})
}

/// The same with gathers of single weights and the rate of copies.
fn measured_with_copies() -> Value {
    let mut report = measured();
    let one = json!({"operation": "gather of one weight", "bytes": 10_000_000, "gb_per_s": 100.0});
    report["rows"].as_array_mut().expect("rows").push(one);
    report["copy_gb_per_s"] = json!(4000.0);
    report
}

/// `lowp plan` in a folder.
fn shown(dir: &TempDir, args: &str) -> String {
    let mut command = command();
    let output = command
        .current_dir(dir.path())
        .arg("plan")
        .args(words(args))
        .output();
    let output = output.expect("lowp starts");
    let text = match output.status.code() {
        Some(0) => output.stdout,
        _ => output.stderr,
    };
    let text = String::from_utf8(text).expect("UTF-8");
    format!("$ lowp plan {args}\n{text}")
}

#[test]
fn tables() {
    let (dir, _) = file("llama.json", &llama());
    for (name, value) in [("moe.json", experts()), ("ranks.json", measured())] {
        fs::write(dir.path().join(name), value.to_string()).expect("a file");
    }
    let plans = [
        "--model 10m --world-size 8",
        "--model llama.json --mesh 16x64 --accumulate 4 --recompute --bandwidth 350,40",
        "--model llama.json --world-size 8 --recipe nvfp4-2d --bandwidth ranks.json",
        "--model llama.json --world-size 64 --recipe mxfp8 --reshard-after-forward 8 --grad-wire bf16",
        "--model llama.json --world-size 12 --ranks-per-node 4 --sharding zero1 --keep-bf16 *.down_proj",
        "--model moe.json --mesh 2x512 --recipe fp8-current",
        "--model llama.json --mesh 2x12 --optimizer muon",
    ];
    insta::assert_snapshot!(plans.map(|args| shown(&dir, args)).join("\n"));
}

/// Patterns of layers are those of their weights, with `.weight` or without, wherever the layers come from.
#[test]
fn patterns_may_leave_out_what_names_of_weights_end_in() {
    let (_dir, file) = file("llama.json", &llama());
    for model in [file.as_str(), "10m", "10m --arch llama --dim 128 --heads 4"] {
        let layer = if model == "10m" { "out" } else { "down_proj" };
        let kept = |pattern: &str| {
            let plan = plan_json(&format!(
                "--model {model} --world-size 2 --keep-bf16 {pattern}"
            ));
            plan["config"]["kept_in_bf16"].clone()
        };
        let expected = kept(&format!("*.{layer}"));
        assert!(expected.as_array().is_some_and(|kept| kept.len() > 1));
        assert_eq!(kept(&format!("*.{layer}.weight")), expected, "{model}");
    }
}

/// What a rank transposes and copies takes time where its rate is known, whichever way weights come.
#[test]
fn copies_take_time() {
    let (dir, _) = file("llama.json", &llama());
    for (name, value) in [
        ("plain.json", measured()),
        ("all.json", measured_with_copies()),
    ] {
        fs::write(dir.path().join(name), value.to_string()).expect("a file");
    }
    let seconds = |options: &str, operation: &str| {
        let model = dir.path().join("llama.json");
        let plan = plan_json(&format!("--model {} {options}", model.display()));
        let operations = plan["operations"].as_array().expect("operations").clone();
        let found = operations.iter().find(|o| o["what"] == operation);
        found.and_then(|o| o["seconds"].as_f64())
    };
    let (plain, all) = (dir.path().join("plain.json"), dir.path().join("all.json"));
    let with = |file: &std::path::Path, options: &str, operation: &str| {
        seconds(
            &format!("--bandwidth {} {options}", file.display()),
            operation,
        )
    };
    for (options, operation) in [
        ("--world-size 8 --recipe fp8-current", "backward"),
        (
            "--world-size 8 --recipe fp8-current --reshard-after-forward false",
            "backward",
        ),
        (
            "--world-size 8 --recipe fp8-current --reshard-after-forward 2",
            "forward",
        ),
        (
            "--world-size 8 --recipe fp8-current --sharding zero1",
            "full_weights",
        ),
        ("--world-size 1 --recipe mxfp8", "forward"),
    ] {
        let (before, now) = (
            with(&plain, options, operation),
            with(&all, options, operation),
        );
        assert!(
            now.expect("a time") > before.unwrap_or(0.0),
            "{options}: {now:?} {before:?}"
        );
    }
    // Twice as many bytes as arrive are read and written, 40 times as fast.
    let forward = with(&all, "--world-size 8 --recipe bf16", "forward").expect("a time");
    let own = format!("350,{}", all.display());
    let given = seconds(
        &format!("--world-size 8 --recipe bf16 --bandwidth {own}"),
        "forward",
    );
    assert!((given.expect("a time") / forward - 100.0 / 350.0).abs() < 1e-6);
}

#[test]
fn json() {
    let (dir, _) = file("llama.json", &llama());
    let args = "--model llama.json --mesh 2x16 --recompute --bandwidth 350,40 --json";
    insta::assert_snapshot!(shown(&dir, args));
}

#[test]
fn tables_of_gpus() {
    let (dir, _) = file("llama.json", &llama());
    fs::write(dir.path().join("experts.json"), experts().to_string()).expect("a file");
    let plans = [
        "--model 1b --vocab 32768 --world-size 8 --device cuda --batch 128",
        "--model 350m --arch llama --world-size 2 --device cuda --recipe fp8-current --recompute --accumulate 2",
        "--model 125m --world-size 4 --device cuda --sharding zero1 --no-cudnn --recipe nvfp4-2d",
        "--model llama.json --world-size 8 --device cuda --seq 256",
        "--model experts.json --world-size 8 --device cuda",
        "--model experts.json --world-size 8 --device cuda --seq 256",
        "--model 125m --world-size 2 --device cuda --recipe fp8-current --json",
        "--model 10m --world-size 5 --device cuda",
        "--model 10m --world-size 2 --device cuda --batch 0",
        "--model 10m --world-size 8 --device cuda --batch 18446744073709551608",
        "--model 10m --world-size 2 --device cuda --vocab 257",
        "--model 10m --world-size 2 --device cuda --seq 24 --batch 2",
        "--model 10m --world-size 2 --device gpu",
        "--model 10m --world-size 2 --batch 8",
        "--model 10m --world-size 2 --no-cudnn",
        "--model 10m --world-size 2 --offload-optimizer",
        "--shape 64x64 --world-size 2 --device cuda",
    ];
    insta::assert_snapshot!(plans.map(|args| shown(&dir, args)).join("\n"));
}

/// What is alike is counted once. Time follows the ranks and the weights of a block: each weight has cuts of its own.
#[cfg(unix)]
#[test]
fn plans_of_many_ranks_are_ready_at_once() {
    let (_dir, config) = file("moe.json", &experts());
    for options in [
        "--world-size 10000",
        "--mesh 50000x2 --reshard-after-forward false",
        "--mesh 3x33333 --ranks-per-node 7 --sharding zero1",
    ] {
        // Of the processor, which others may use, too: a shell ends what takes longer. It is a second.
        let lowp = command();
        let mut limited = Command::new("sh");
        limited.args(["-c", "ulimit -t 5 && exec \"$@\"", "sh"]);
        limited.arg(lowp.get_program()).args(["plan", "--json"]);
        let args = format!("--model {config} --recompute --accumulate 65536 {options}");
        let output = limited.args(words(&args)).output().expect("a shell");
        assert!(output.status.success(), "{options}: {output:?}");
        let plan: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert!(
            plan["wire_bytes_per_step"].as_f64() > Some(1e11),
            "{options}"
        );
    }
}

#[test]
fn more_shards_send_as_much_and_hold_less() {
    let (_dir, config) = file("llama.json", &llama());
    let mut before: Option<Value> = None;
    for ranks in [1, 2, 8, 64] {
        let plan = plan_json(&format!("--model {config} --world-size {ranks}"));
        check_sums(&plan);
        if let Some(before) = &before {
            // Messages of unequal pieces are padded by at most an eighth.
            let sent = |plan: &Value| plan["wire_bytes_per_step"].as_u64();
            assert!(sent(&plan).map(|now| 8 * now) <= sent(before).map(|before| 9 * before));
            let of = |plan: &Value| plan["memory"]["masters"].as_u64();
            assert!(of(&plan) < of(before), "{ranks}");
        }
        before = Some(plan);
    }
}

#[test]
fn errors_of_models() {
    let (dir, _) = file("llama.json", &llama());
    let mut configs: Vec<(&str, String)> = Vec::new();
    let changed = |key: &str, value: Value| {
        let mut config = llama();
        config[key] = value;
        config.to_string()
    };
    // Of no type, whose values would stand for it.
    let without = |key: &str| {
        let mut config = llama();
        for key in [key, "model_type"] {
            config.as_object_mut().expect("an object").remove(key);
        }
        config.to_string()
    };
    configs.push(("latent.json", changed("kv_lora_rank", json!(512))));
    configs.push(("within.json", json!({"text_config": llama()}).to_string()));
    configs.push(("encoder.json", changed("model_type", json!("bert"))));
    configs.push(("no-width.json", without("hidden_size")));
    configs.push(("no-mlp.json", without("intermediate_size")));
    configs.push(("no-groups.json", without("num_key_value_heads")));
    configs.push(("no-head.json", without("tie_word_embeddings")));
    configs.push(("half.json", changed("hidden_size", json!(4096.5))));
    configs.push(("negative.json", changed("num_hidden_layers", json!(-1))));
    configs.push(("text.json", changed("vocab_size", json!("32000"))));
    configs.push(("deep.json", changed("num_hidden_layers", json!(u64::MAX))));
    configs.push(("heads.json", changed("num_attention_heads", json!(31))));
    configs.push(("groups.json", changed("num_key_value_heads", json!(7))));
    configs.push(("tied.json", changed("tie_word_embeddings", json!(1))));
    configs.push(("odd.json", changed("intermediate_size", json!(14337))));
    configs.push(("experts.json", changed("num_experts", json!(8))));
    configs.push(("freq.json", changed("moe_layer_freq", json!(2))));
    let mut huge = llama();
    for key in ["hidden_size", "intermediate_size", "head_dim"] {
        huge[key] = json!(1 << 24);
    }
    configs.push(("huge.json", huge.to_string()));
    huge["num_attention_heads"] = json!(1);
    huge["num_key_value_heads"] = json!(1);
    configs.push(("many.json", huge.to_string()));
    let mut wide = experts();
    (wide["num_experts"], wide["num_hidden_layers"]) = (json!(4096), json!(4096));
    configs.push(("wide.json", wide.to_string()));
    configs.push(("list.json", "[1, 2]".to_owned()));
    configs.push(("cut.json", "{\"hidden_size\": 40".to_owned()));
    configs.push(("nested.json", "[".repeat(100_000)));
    for (name, text) in &configs {
        fs::write(dir.path().join(name), text).expect("a file");
    }
    let mut text = String::new();
    for (name, _) in &configs {
        text += &shown(&dir, &format!("--model {name} --world-size 8"));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn errors_of_options() {
    let (dir, _) = file("llama.json", &llama());
    for (name, value) in [
        ("one-device.json", json!({"device": "a device", "rows": []})),
        (
            "no-rows.json",
            json!({"device": "a device", "ranks": 2, "rows": []}),
        ),
        (
            "one-rank.json",
            json!({"device": "a device", "ranks": 1, "copy_gb_per_s": 4000.0, "small_copy_microseconds": 0.0, "rows": [
                {"operation": "gather of one weight", "bytes": 5, "milliseconds": 1},
            ]}),
        ),
        (
            "old-rank.json",
            json!({"device": "a device", "ranks": 1, "copy_gb_per_s": 4000.0, "rows": []}),
        ),
        (
            "bad-row.json",
            json!({"ranks": 2, "rows": [{"operation": "one all-gather of the same bytes", "bytes": 5, "gb_per_s": 0}]}),
        ),
        (
            "bad-time.json",
            json!({"ranks": 2, "rows": [
                {"operation": "gather of one weight", "bytes": 5, "gb_per_s": 1},
                {"operation": "gather of one weight with scales", "bytes": 5, "milliseconds": 1e300},
            ]}),
        ),
        (
            "bad-copy.json",
            json!({"ranks": 1, "copy_gb_per_s": 4000.0, "rows": [{"operation": "gather of one weight", "bytes": 5, "milliseconds": "x"}]}),
        ),
    ] {
        fs::write(dir.path().join(name), value.to_string()).expect("a file");
    }
    let mut text = String::new();
    for args in [
        "--world-size 8",
        "--model 10m",
        "--model 10m --shape 64x64 --world-size 8",
        "--model 10m --usage rowwise --world-size 8",
        "--shape 64x64 --world-size 8 --recompute",
        "--shape 64x64 --mesh 2x4",
        "--shape 64x64 --world-size 8 --dim 64",
        "--model 7b --world-size 8",
        "--model llama.json --world-size 8 --dim 64",
        "--model 10m --world-size 8 --dim 100 --heads 3",
        "--model 10m --world-size 8 --dim 128 --heads 5",
        "--model 10m --world-size 8 --dim 16384 --heads 16383",
        "--model 10m --world-size 8 --vocab 100",
        "--model 10m --world-size 8 --dim 104 --heads 2",
        "--model 10m --world-size 8 --keep-bf16 *.nope",
        "--model 10m --world-size 8 --keep-bf16 [",
        "--model 10m --world-size 0",
        "--model 10m --world-size 1000000",
        "--model 10m --mesh 4096x4096",
        "--model 10m --mesh 2x4 --world-size 9",
        "--model 10m --mesh 0x4",
        "--model 10m --world-size 8 --reshard-after-forward 3",
        "--model 10m --world-size 8 --sharding zero1 --reshard-after-forward false",
        "--model 10m --world-size 8 --sharding zero1 --recipe nvfp4-1d+mse",
        "--model 10m --world-size 8 --accumulate 0",
        "--model 10m --world-size 8 --ranks-per-node 0",
        "--model 10m --world-size 8 --recipe fp8-current --format e5m2",
        "--model 10m --world-size 16 --bandwidth 350",
        "--model 10m --world-size 8 --bandwidth 350,40,5",
        "--model 10m --world-size 8 --bandwidth -1",
        "--model 10m --world-size 8 --bandwidth 1e-320",
        "--model 10m --world-size 8 --bandwidth 1e300",
        "--model 10m --world-size 8 --bandwidth nope.json",
        "--model 10m --world-size 8 --bandwidth one-device.json",
        "--model 10m --world-size 8 --bandwidth one-rank.json",
        "--model 10m --world-size 1 --bandwidth old-rank.json",
        "--model 10m --world-size 8 --bandwidth no-rows.json",
        "--model 10m --arch llama --dim 32 --heads 2 --kv-heads 1 --seq 16 --world-size 2",
        "--model 10m --arch llama --dim 36 --heads 2 --world-size 2",
        "--model 10m --world-size 8 --bandwidth bad-row.json",
        "--model 10m --world-size 8 --bandwidth bad-time.json",
        "--model 10m --world-size 1 --bandwidth bad-copy.json",
    ] {
        let shown = shown(&dir, args);
        assert!(shown.contains("error: "), "{shown}");
        text += &shown;
    }
    insta::assert_snapshot!(text);
}

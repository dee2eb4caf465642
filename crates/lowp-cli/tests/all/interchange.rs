//! `lowp export` and `lowp import`: what is exported and imported is what it was, to the byte, for every recipe and target.

use crate::support::{Bench, Contents, Tensor, bf16s, f16s, f32s, matrix, recipes, tensor, values};
use proptest::prelude::*;
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The targets that have forms of their own.
const TARGETS: [&str; 3] = ["compressed-tensors", "modelopt", "deepseek"];

/// The recipes that each of [`TARGETS`] takes.
const TAKEN: [&[&str]; 3] = [
    &[
        "fp8-delayed",
        "fp8-current",
        "fp8-rowwise",
        "fp8-block",
        "mxfp8",
        "mxfp8-2d",
        "mxfp4",
        "nvfp4-1d",
        "nvfp4-2d",
        "nvfp4-mxfp8",
        "mxfp4-mxfp8",
        "bf16",
        "fp32",
    ],
    &[
        "fp8-delayed",
        "fp8-current",
        "fp8-rowwise",
        "fp8-block",
        "mxfp8",
        "mxfp8-2d",
        "nvfp4-1d",
        "nvfp4-2d",
        "nvfp4-mxfp8",
        "bf16",
        "fp32",
    ],
    &["fp8-delayed", "fp8-current", "fp8-block", "bf16", "fp32"],
];

/// Recipes whose columnwise operand is made of the rowwise one.
const DERIVED: [&str; 5] = [
    "fp8-delayed",
    "fp8-current",
    "fp8-block",
    "mxfp8-2d",
    "nvfp4-2d",
];

/// Runs `lowp export` and `lowp import` and compares the result with `q.safetensors`, or with `expected`.
fn there_and_back(
    bench: &Bench,
    to: &str,
    size: &str,
    expected: &str,
) -> Result<(), TestCaseError> {
    for name in ["hub", "back"] {
        let _ = fs::remove_dir_all(bench.path(name));
    }
    bench.done(&[
        "export",
        "q.safetensors",
        "-o",
        "hub",
        "--to",
        to,
        "--max-shard-size",
        size,
    ]);
    bench.done("import hub -o back.safetensors");
    let verified = bench.lowp(&["verify", expected, "back.safetensors"]);
    let message = String::from_utf8_lossy(&verified.stderr).into_owned();
    prop_assert!(verified.status.success(), "{}: {}", to, message);
    Ok(())
}

/// A recipe with options that change its bytes.
fn options_of_recipes() -> impl Strategy<Value = Vec<&'static str>> {
    let options: Vec<Vec<&'static str>> = recipes()
        .iter()
        .chain(&["bf16", "fp32"])
        .map(|name| vec![*name])
        .chain([
            vec!["fp8-current", "--pow2"],
            vec!["fp8-delayed", "--delayed-scale", "3.7"],
            vec!["fp8-block", "--pow2", "false"],
            vec!["mxfp8", "--scale-mode", "ocp-floor"],
            vec!["mxfp4", "--scale-mode", "even"],
            vec!["nvfp4-1d", "--four-over-six", "mae"],
            vec!["nvfp4-2d", "--four-over-six", "mse-448"],
            vec!["nvfp4-2d", "--source-rounding", "via-bf16"],
        ])
        .collect();
    proptest::sample::select(options)
}

/// Values with zeros, subnormals and outliers among them.
fn weights(rows: usize, cols: usize, seed: u32, scale: f32) -> Vec<f32> {
    let mut values = values(rows * cols, seed);
    for (at, value) in values.iter_mut().enumerate() {
        match at % 97 {
            3 => *value = -0.0,
            5 => *value = 1e-40,
            11 => *value *= 1000.0,
            _ => {}
        }
        *value *= scale;
    }
    values
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn export_and_import_give_the_same_file(
        recipe in options_of_recipes(),
        rows in 0usize..200,
        blocks in 0usize..9,
        (seed, scale) in (0u32..1 << 20, proptest::sample::select(vec![0.0, 1.0, 1e-30, 3e30])),
        form in proptest::sample::select(vec!["padded", "compact"]),
        both in proptest::bool::ANY,
        size in proptest::sample::select(vec!["1B", "20KB", "5GB"]),
    ) {
        let bench = Bench::new();
        let cols = 32 * blocks;
        let usage = if both && DERIVED.contains(&recipe[0]) { "both" } else { "rowwise" };
        bench.write_with(
            "in.safetensors",
            &[
                f32s("a.weight", &[rows, cols], &weights(rows, cols, seed, scale)),
                bf16s("b.weight", &[33, 64], &weights(33, 64, seed + 1, 1.0)),
                f16s("model.norm.weight", &[7], &values(7, seed)),
                tensor("ids", Dtype::I64, &[2, 3], vec![1; 48]),
            ],
            &[("author", "somebody")],
        );
        let quantize = ["quantize", "in.safetensors", "-o", "q.safetensors", "--usage", usage];
        let quantize = [&quantize[..], &["--recipe"], &recipe].concat();
        bench.done(&[&quantize[..], &["--scales", "padded"]].concat());
        fs::rename(bench.path("q.safetensors"), bench.path("padded.safetensors")).expect("a file");
        bench.done(&[&quantize[..], &["--scales", form]].concat());
        for (target, taken) in TARGETS.iter().zip(TAKEN) {
            if taken.contains(&recipe[0]) {
                there_and_back(&bench, target, size, "q.safetensors")?;
            } else {
                let message = bench.rejected(2, &format!("export q.safetensors -o hub2 --to {target}"));
                prop_assert!(message.contains("which") && message.contains("has no form for; give --to fp32"), "{}", message);
            }
        }
        // The form of scales of this target is the padded one.
        there_and_back(&bench, "te", size, "padded.safetensors")?;
    }
}

#[test]
fn decoded_targets_hold_what_dequantize_makes() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[matrix("a.weight", &[40, 96], 1), matrix("norm", &[7], 2)],
    );
    for recipe in recipes() {
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors --recipe {recipe}"
        ));
        for (to, dtype) in [("fp32", "f32"), ("bf16", "bf16")] {
            bench.done(&format!(
                "dequantize q.safetensors -o d.safetensors --dtype {dtype}"
            ));
            for name in ["hub", "back"] {
                let _ = fs::remove_dir_all(bench.path(name));
            }
            bench.done(&format!("export q.safetensors -o hub --to {to}"));
            bench.done("verify d.safetensors hub/model.safetensors");
            if TAKEN[0].contains(&recipe) {
                fs::remove_dir_all(bench.path("hub")).expect("a folder");
                bench.done("export q.safetensors -o hub --to compressed-tensors");
                bench.done(&format!("import hub -o back --to {to}"));
                bench.done("verify d.safetensors back/model.safetensors");
            }
        }
    }
}

/// The tensors of a folder, one line each, and its documents.
fn listing(folder: &Path) -> String {
    let found = Contents::read(&folder.join("model.safetensors"));
    let mut lines: Vec<String> = found
        .names()
        .into_iter()
        .map(|name| {
            let (dtype, shape, _) = &found.tensors[name];
            format!("{name} {dtype} {shape:?}")
        })
        .collect();
    let mut keys: Vec<&String> = found.metadata.keys().collect();
    keys.sort();
    lines.extend(
        keys.into_iter()
            .map(|key| format!("metadata {key}: {}", found.metadata[key])),
    );
    for name in ["config.json", "hf_quant_config.json"] {
        if let Ok(text) = fs::read_to_string(folder.join(name)) {
            lines.push(format!("{name}: {}", text.trim_end()));
        }
    }
    lines.join("\n") + "\n"
}

/// What engines read is not quantized once more.
#[test]
fn exported_models_are_not_quantized_again() {
    let bench = Bench::new();
    hub(&bench, "mxfp4");
    bench.done("export q.safetensors -o e --to compressed-tensors");
    let message = bench.rejected(2, "quantize e -o again --recipe fp8-current");
    assert!(
        message.contains("convert it first (lowp import)"),
        "{message}"
    );
}

#[test]
fn what_each_target_has() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[
            matrix("layer.0.weight", &[160, 192], 1),
            bf16s("lm_head.weight", &[16, 32], &values(512, 2)),
            matrix("norm.weight", &[32], 3),
        ],
    );
    for (target, taken) in TARGETS
        .iter()
        .zip(TAKEN)
        .chain([(&"te", &["nvfp4-2d"][..])])
    {
        for recipe in taken {
            bench.done(&format!(
                "quantize in.safetensors -o q.safetensors --recipe {recipe} --ignore lm_head*"
            ));
            let _ = fs::remove_dir_all(bench.path("hub"));
            bench.done(&format!("export q.safetensors -o hub --to {target}"));
            insta::assert_snapshot!(format!("{target}_{recipe}"), listing(&bench.path("hub")));
        }
    }
}

/// A folder as Hugging Face keeps models, in shards, quantized with `recipe`.
fn hub(bench: &Bench, recipe: &str) {
    bench.write(
        "in.safetensors",
        &[
            matrix("model.a.weight", &[64, 64], 1),
            matrix("model.b.weight", &[64, 64], 2),
            matrix("model.norm.weight", &[64], 3),
        ],
    );
    bench.done(&format!(
        "quantize in.safetensors -o q.safetensors --recipe {recipe} --usage rowwise"
    ));
    bench.done("export q.safetensors -o sharded --to te --max-shard-size 4500B");
    fs::write(
        bench.path("sharded/config.json"),
        r#"{"model_type": "llama", "dtype": "float16"}"#,
    )
    .expect("a file");
    fs::write(bench.path("sharded/tokenizer.json"), "{}").expect("a file");
    fs::write(bench.path("sharded/pytorch_model.bin"), "old weights").expect("a file");
    fs::create_dir(bench.path("sharded/original")).expect("a folder");
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> = entries
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}

#[test]
fn folders_are_sharded_and_carry_their_files_along() {
    let bench = Bench::new();
    hub(&bench, "mxfp8");
    bench.done("export sharded -o hub --to compressed-tensors --max-shard-size 4500B");
    assert_eq!(
        names(&bench.path("hub")),
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ]
    );
    let json = |path: &str| -> Value {
        serde_json::from_slice(&fs::read(bench.path(path)).expect("a file")).expect("JSON")
    };
    let index = json("hub/model.safetensors.index.json");
    assert_eq!(index["metadata"]["total_size"], 2 * (4096 + 128) + 256);
    assert_eq!(
        index["weight_map"]["model.b.weight_scale"],
        "model-00002-of-00002.safetensors"
    );
    let config = json("hub/config.json");
    assert_eq!(
        (
            &config["model_type"],
            &config["quantization_config"]["format"]
        ),
        (&"llama".into(), &"mxfp8-quantized".into())
    );
    for file in 1..=2 {
        let part =
            Contents::read(&bench.path(&format!("hub/model-0000{file}-of-00002.safetensors")));
        assert_eq!(part.metadata["format"], "pt");
    }
    bench.done("import hub -o back --max-shard-size 4500B");
    assert!(
        json("back/config.json")
            .get("quantization_config")
            .is_none()
    );
    assert!(bench.path("back/tokenizer.json").is_file());
    bench.done("verify q.safetensors back/model.safetensors.index.json");
    // What was imported is exported again.
    bench.done("export back -o again --to compressed-tensors --max-shard-size 4500B");
    for name in names(&bench.path("hub")) {
        let [a, b] = ["hub", "again"]
            .map(|folder| fs::read(bench.path(folder).join(&name)).expect("a file"));
        assert!(a == b, "{name}");
    }
}

#[test]
fn equal_inputs_give_equal_folders_and_what_is_left_out_is_named() {
    let bench = Bench::new();
    hub(&bench, "nvfp4-2d");
    let export = |output: &str| {
        let done = bench.lowp(&format!(
            "export sharded -o {output} --to modelopt --verbose"
        ));
        String::from_utf8_lossy(&done.stderr).into_owned()
    };
    let message = export("one");
    assert!(
        message.contains("2 files or folders are left out: 'original', 'pytorch_model.bin'"),
        "{message}"
    );
    export("two");
    for name in names(&bench.path("one")) {
        let [a, b] =
            ["one", "two"].map(|folder| fs::read(bench.path(folder).join(&name)).expect("a file"));
        assert!(a == b, "{name}");
    }
}

/// `found` without what lowp says of its weights, as another program would write it.
fn foreign(
    found: &Contents,
    change: impl Fn(&str, Dtype, Vec<u8>) -> (Dtype, Vec<u8>),
) -> Vec<Tensor> {
    found
        .names()
        .into_iter()
        .map(|name| {
            let (dtype, shape, bytes) = found.tensors[name].clone();
            let (dtype, bytes) = change(name, dtype, bytes);
            tensor(name, dtype, &shape, bytes)
        })
        .collect()
}

#[test]
fn files_that_say_nothing_are_read_by_their_tensors() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[bf16s("a.weight", &[160, 192], &values(160 * 192, 7))],
    );
    for (target, taken) in TARGETS.iter().zip(TAKEN) {
        for recipe in taken
            .iter()
            .filter(|recipe| !["bf16", "fp32"].contains(recipe))
        {
            bench.done(&format!(
                "quantize in.safetensors -o q.safetensors --recipe {recipe} --usage rowwise"
            ));
            bench.done("dequantize q.safetensors -o d.safetensors");
            let _ = fs::remove_dir_all(bench.path("hub"));
            bench.done(&format!("export q.safetensors -o hub --to {target}"));
            let found = Contents::read(&bench.path("hub/model.safetensors"));
            bench.write(
                "foreign.safetensors",
                &foreign(&found, |_, dtype, bytes| (dtype, bytes)),
            );
            bench.done("import foreign.safetensors -o f.safetensors");
            let said: Value =
                serde_json::from_str(&bench.read("f.safetensors").metadata["lowp.tensor.a.weight"])
                    .expect("JSON");
            assert_eq!(
                (&said["dtype"], &said["usage"]),
                (&"BF16".into(), &"rowwise".into()),
                "{said}"
            );
            bench.done("import foreign.safetensors -o v.safetensors --to fp32");
            let [ours, theirs] = ["d.safetensors", "v.safetensors"]
                .map(|name| bench.read(name).bytes("a.weight").to_vec());
            let far = ours.chunks(4).zip(theirs.chunks(4)).filter(|(x, y)| {
                let word = |b: &[u8]| f32::from_le_bytes(b.try_into().expect("4 bytes"));
                let (x, y) = (word(x), word(y));
                // An amax that is found again may be a neighbor of the one it was.
                (x - y).abs() > x.abs() * 3e-7
            });
            assert_eq!(far.count(), 0, "{target} {recipe}");
            if !recipe.starts_with("nvfp4") {
                assert!(ours == theirs, "{target} {recipe}");
            }
        }
    }
}

#[test]
fn scales_of_16_bits_are_widened() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[bf16s("a.weight", &[64, 64], &values(4096, 7))],
    );
    bench.done(
        "quantize in.safetensors -o q.safetensors --recipe fp8-rowwise --pow2 --usage rowwise",
    );
    bench.done("export q.safetensors -o hub --to compressed-tensors");
    let found = Contents::read(&bench.path("hub/model.safetensors"));
    // Powers of two are exact in both.
    for (dtype, narrow) in [
        (
            Dtype::BF16,
            (|x: f32| half::bf16::from_f32(x).to_le_bytes()) as fn(f32) -> [u8; 2],
        ),
        (Dtype::F16, |x| half::f16::from_f32(x).to_le_bytes()),
    ] {
        let narrowed = foreign(&found, |name, was, bytes| match name {
            "a.weight_scale" => {
                let words = bytes
                    .chunks(4)
                    .map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")));
                (dtype, words.flat_map(narrow).collect())
            }
            _ => (was, bytes),
        });
        bench.write("foreign.safetensors", &narrowed);
        bench.done("import foreign.safetensors -o f.safetensors");
        for field in ["a.weight.rowwise_data", "a.weight.rowwise_scale_inv"] {
            assert!(
                bench.read("f.safetensors").bytes(field)
                    == bench.read("q.safetensors").bytes(field),
                "{field}"
            );
        }
    }
}

#[test]
fn embeddings_are_warned_of() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[matrix("model.embed_tokens.weight", &[32, 64], 1)],
    );
    bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8 --usage rowwise");
    let done = bench.lowp("export q.safetensors -o hub --to compressed-tensors");
    let message = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(
        done.status.success() && message.starts_with("warning: 'model.embed_tokens' is quantized"),
        "{message}"
    );
}

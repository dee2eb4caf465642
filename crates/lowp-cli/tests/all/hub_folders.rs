//! Folders as Hugging Face keeps models: every file command reads them, and those that write a model write them.

use crate::support::{Bench, bf16s, matrix, tensor, values};
use std::fs;

const CONFIG: &str = "{\"model_type\": \"x\", \"rope_theta\": 1e4}\n";

/// A folder `hub` of two files with an index, a configuration and a tokenizer; `in.safetensors` has the same tensors.
fn bench() -> Bench {
    let bench = Bench::new();
    let tensors = || {
        [
            matrix("a.weight", &[64, 96], 1),
            bf16s("b.weight", &[33, 32], &values(33 * 32, 2)),
            matrix("norm", &[7], 3),
            tensor(
                "table",
                safetensors::tensor::Dtype::I64,
                &[2, 1],
                vec![1; 16],
            ),
        ]
    };
    bench.write_with("in.safetensors", &tensors(), &[("format", "pt")]);
    fs::create_dir(bench.path("hub")).expect("a folder");
    let [a, b, norm, table] = tensors();
    let parts = [
        ("model-1.safetensors", [a, norm]),
        ("model-2.safetensors", [b, table]),
    ];
    let mut places = Vec::new();
    for (file, part) in parts {
        bench.write_with(&format!("hub/{file}"), &part, &[("format", "pt")]);
        places.extend(part.map(|tensor| format!("{:?}: {file:?}", tensor.name)));
    }
    let index = format!("{{\"weight_map\": {{{}}}}}", places.join(", "));
    for (name, text) in [
        ("model.safetensors.index.json", index.as_str()),
        ("config.json", CONFIG),
        ("tokenizer.json", "{}"),
        ("pytorch_model.bin", "other weights"),
        (".hidden", "x"),
    ] {
        fs::write(bench.path("hub").join(name), text).expect("a file");
    }
    fs::create_dir(bench.path("hub/sub")).expect("a folder");
    bench
}

/// The names in folder `name`.
fn names(bench: &Bench, name: &str) -> Vec<String> {
    let entries = fs::read_dir(bench.path(name)).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<String> = entries
        .map(|entry| name(entry).into_string().expect("Unicode"))
        .collect();
    names.sort();
    names
}

const BESIDE: [&str; 2] = ["config.json", "tokenizer.json"];

#[test]
fn folders_go_in_and_out_of_every_command() {
    let bench = bench();
    for recipe in ["mxfp8", "nvfp4-2d", "fp8-delayed"] {
        let recipe = format!("--recipe {recipe}");
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors {recipe}"
        ));
        bench.done(&format!("quantize hub -o q {recipe}"));
        bench.done("verify q q.safetensors");
        bench.done("verify q --source hub");
        bench.done("verify q.safetensors --source hub");
        assert_eq!(
            names(&bench, "q"),
            [&BESIDE[..1], &["model.safetensors"], &BESIDE[1..]].concat()
        );
        let config = fs::read_to_string(bench.path("q/config.json")).expect("a file");
        assert_eq!(config, CONFIG);
        // The parts of a weight and what says what they are stay in one file.
        bench.done(&format!(
            "quantize hub -o small --max-shard-size 1B {recipe}"
        ));
        let files = names(&bench, "small");
        let weights: Vec<&String> = files
            .iter()
            .filter(|name| name.ends_with(".safetensors"))
            .collect();
        assert_eq!(weights.len(), 4, "{files:?}");
        let a = bench.read(&format!("small/{}", weights[0]));
        assert!(a.names().iter().all(|name| name.starts_with("a.weight.")));
        assert!(a.metadata.contains_key("lowp.tensor.a.weight"));
        assert!(!a.metadata.contains_key("lowp.tensor.b.weight"));
        bench.done("verify small q");
        bench.done("verify small --source in.safetensors");

        bench.done("dequantize q.safetensors -o d.safetensors");
        bench.done("dequantize small -o d --max-shard-size 20KB");
        bench.done("verify d d.safetensors");
        assert_eq!(names(&bench, "d").len(), 2 + 3);
        assert!(
            BESIDE
                .iter()
                .all(|name| names(&bench, "d").contains(&(*name).to_owned()))
        );

        bench.done(&format!("shard hub -o ranks --world-size 3 {recipe}"));
        bench.done("unshard ranks -o u.safetensors");
        bench.done("unshard ranks -o u");
        bench.done("verify u q");
        bench.done("verify u.safetensors q");
        assert_eq!(names(&bench, "u"), names(&bench, "q"));
        let listed = bench.done("inspect small");
        assert!(
            listed.contains("a.weight") && listed.contains("b.weight"),
            "{listed}"
        );
        let errors = bench.done("inspect q --reference hub");
        assert_eq!(errors, bench.done("inspect q --reference in.safetensors"));
        for folder in ["q", "small", "d", "ranks", "u"] {
            fs::remove_dir_all(bench.path(folder)).expect("a folder");
        }
    }
}

#[test]
fn other_folders_are_not_taken_for_them() {
    let bench = bench();
    bench.done("shard hub -o ranks --world-size 2 --recipe mxfp8");
    for (line, expected) in [
        (
            "quantize ranks -o x --recipe mxfp8",
            "gather the folder with `lowp unshard` first",
        ),
        (
            "dequantize ranks -o x",
            "gather the folder with `lowp unshard` first",
        ),
        (
            "verify hub ranks",
            "one is a folder of rank files and the other is not",
        ),
        ("unshard hub -o x", "no rank files"),
        (
            "quantize hub -o hub --recipe mxfp8",
            "it is the folder of the input",
        ),
        (
            "quantize hub/model.safetensors.index.json -o hub --recipe mxfp8",
            "it is the folder of the input",
        ),
        (
            "shard hub -o hub --world-size 2 --recipe mxfp8",
            "it is the folder of the input",
        ),
        (
            "quantize hub -o ranks --recipe mxfp8",
            "the folder is not empty",
        ),
        (
            "quantize hub -o x.safetensors --recipe mxfp8 --max-shard-size 1GB",
            "-o x.safetensors is one file, which cannot be split; give the name of a folder, or leave --max-shard-size out",
        ),
        (
            "quantize hub -o hub/model-1.safetensors --recipe mxfp8",
            "it is the input",
        ),
        (
            "quantize hub/sub -o x --recipe mxfp8",
            "it holds no .safetensors file",
        ),
    ] {
        let message = bench.rejected(2, line);
        assert!(message.contains(expected), "{line}: {message}");
    }
    fs::write(bench.path("hub/config.json"), "{").expect("a file");
    let message = bench.rejected(2, "quantize hub -o x --recipe mxfp8");
    assert!(message.contains("config.json: it is no JSON"), "{message}");
}

/// As Python writes it: words for numbers that JSON does not have, and numbers that other programs spell in other ways.
const FOREIGN: &str = "{
  \"rms_norm_eps\": 1e-05,
  \"model_type\": \"mamba2\",
  \"time_step_limit\": [0.0, Infinity],
  \"dtype\": \"float16\",
  \"initializer_range\": 0.020,
  \"big\": 1234567890123456789012345678901234567890,
  \"bounds\": {\"low\": -Infinity, \"none\": NaN, \"name\": \"NaN, Infinity\"}
}
";

/// A configuration is carried as it is, but for what it says of quantization.
#[test]
fn configurations_are_not_rewritten() {
    let bench = bench();
    fs::write(bench.path("hub/config.json"), FOREIGN).expect("a file");
    let config =
        |folder: &str| fs::read_to_string(bench.path(folder).join("config.json")).expect("a file");
    bench.done("quantize hub -o q --recipe mxfp8 --usage rowwise --tensors *.weight");
    assert_eq!(config("q"), FOREIGN);
    bench.done("shard hub -o ranks --world-size 2 --recipe mxfp8");
    bench.done("unshard ranks -o u");
    bench.done("dequantize q -o d");
    for folder in ["ranks", "u", "d"] {
        assert_eq!(config(folder), FOREIGN, "{folder}");
    }
    for to in ["compressed-tensors", "modelopt"] {
        bench.done(&format!("export q -o {to} --to {to}"));
        let begin = FOREIGN.strip_suffix("\n}\n").expect("an object");
        let written = config(to);
        let added = written.strip_prefix(begin).expect("what was there");
        let begin = ",\n  \"quantization_config\": {\n    \"";
        assert!(
            added.starts_with(begin) && added.ends_with("\n  }\n}\n"),
            "{added}"
        );
        bench.done(&format!("import {to} -o back-{to}"));
        assert_eq!(config(&format!("back-{to}")), FOREIGN);
        bench.done(&format!("verify back-{to} q"));
    }
    bench.done("export q -o te --to te");
    assert_eq!(config("te"), FOREIGN);
}

/// A folder that is written may lie in the one that is read: what is read was listed before.
#[test]
fn outputs_inside_of_inputs() {
    let bench = bench();
    let before = names(&bench, "hub");
    for command in [
        "quantize hub -o hub/q --recipe mxfp8",
        "shard hub -o hub/ranks --world-size 2 --recipe mxfp8",
        "unshard hub/ranks -o hub/ranks/u",
        "export hub/q -o hub/q/te --to te",
        "import hub/q/te -o hub/q/te/back",
        "dequantize hub/q -o hub/q/d",
    ] {
        bench.done(command);
    }
    bench.done("verify hub/q --source hub");
    for other in ["hub/ranks/u", "hub/q/te/back"] {
        bench.done(&format!("verify hub/q {other}"));
        assert_eq!(names(&bench, other).len(), 3, "{other}");
    }
    // An empty folder that is there is no file of the input either.
    fs::create_dir(bench.path("hub/empty")).expect("a folder");
    bench.done("quantize hub -o hub/empty --recipe mxfp8");
    bench.done("verify hub/empty hub/q");
    let after: Vec<String> = names(&bench, "hub")
        .into_iter()
        .filter(|name| !["q", "ranks", "empty"].contains(&name.as_str()))
        .collect();
    assert_eq!(after, before);
}

/// What is left out of a folder is named to people.
#[test]
fn what_is_left_out_is_named() {
    let bench = bench();
    let verbose = bench.lowp("quantize hub -o q --recipe mxfp8 -v");
    let text = String::from_utf8_lossy(&verbose.stderr).into_owned();
    let expected = "3 files or folders are left out: '.hidden', 'pytorch_model.bin', 'sub'";
    assert!(text.contains(expected), "{text}");
}

/// A checkpoint is no model, and a part of one is not either; what makes one of it is named.
#[test]
fn checkpoints_are_not_taken_for_models() {
    let bench = bench();
    let model = "--dim 64 --layers 1 --heads 2 --seq 32 --batch 4 --eval-batches 1 --steps 1";
    bench.done(&format!(
        "train {model} --no-baseline --recipe mxfp8 --save runs"
    ));
    let run = "runs/mxfp8-seed0";
    let part = format!("{run}/step-00000001/rank-00000.safetensors");
    let export = "`lowp export FOLDER -o DIR --to bf16` makes a model of";
    for command in [
        "quantize {} -o x --recipe mxfp8",
        "shard {} -o x --recipe mxfp8 --world-size 2",
        "dequantize {} -o x",
        "import {} -o x",
        "unshard {} -o x",
        "verify in.safetensors --source {}",
    ] {
        let message = bench.rejected(2, &command.replace("{}", run));
        assert!(message.contains(export), "{command}: {message}");
    }
    for command in [
        "quantize {} -o x --recipe mxfp8",
        "dequantize {} -o x",
        "inspect {}",
        "verify {} in.safetensors",
        "export {} -o x --to te",
        "import {} -o x",
    ] {
        let message = bench.rejected(2, &command.replace("{}", &part));
        assert!(
            message.contains("the part that rank 0 has of a checkpoint"),
            "{message}"
        );
        assert!(message.contains(export), "{command}: {message}");
    }
}

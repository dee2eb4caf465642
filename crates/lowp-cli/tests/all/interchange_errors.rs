//! `lowp export` and `lowp import` of files that are wrong, or mean something that has no place in the output: one message,
//! exit code 2, and nothing is left.

use crate::support::{Bench, Contents, Tensor, f32s, matrix, tensor};
use safetensors::tensor::Dtype;
use std::fs;

/// A folder `hub` with one weight of 64x64 of a recipe, exported to `to`.
fn exported(recipe: &str, to: &str) -> Bench {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[matrix("a.weight", &[64, 64], 1), matrix("norm", &[8], 2)],
    );
    bench.done(&format!(
        "quantize in.safetensors -o q.safetensors --recipe {recipe} --usage rowwise"
    ));
    bench.done(&format!("export q.safetensors -o hub --to {to}"));
    bench
}

/// Writes `hub/model.safetensors` again with changed tensors and metadata.
fn change(
    bench: &Bench,
    tensors: impl Fn(&str, (Dtype, Vec<usize>, Vec<u8>)) -> Option<(Dtype, Vec<usize>, Vec<u8>)>,
    metadata: impl Fn(&str, String) -> Option<String>,
) {
    let found = Contents::read(&bench.path("hub/model.safetensors"));
    let tensors: Vec<Tensor> = found
        .names()
        .into_iter()
        .filter_map(|name| {
            let (dtype, shape, bytes) = tensors(name, found.tensors[name].clone())?;
            Some(tensor(name, dtype, &shape, bytes))
        })
        .collect();
    let kept: Vec<(String, String)> = found
        .metadata
        .into_iter()
        .filter_map(|(key, value)| Some((key.clone(), metadata(&key, value)?)))
        .collect();
    let kept: Vec<(&str, &str)> = kept
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    bench.write_with("hub/model.safetensors", &tensors, &kept);
}

/// `lowp import hub` must fail and say `expected`.
fn rejected(bench: &Bench, expected: &[&str]) {
    let message = bench.rejected(2, "import hub -o back.safetensors");
    for expected in expected {
        assert!(message.contains(expected), "{expected}: {message}");
    }
    bench.rejected(2, "import hub -o back");
}

#[test]
fn weights_that_a_target_has_no_place_for() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[
            matrix("a.weight", &[32, 64], 1),
            matrix("experts", &[32, 64], 2),
            matrix("three.weight", &[2, 32, 64], 3),
        ],
    );
    for (options, to, expected) in [
        (
            "--recipe mxfp8",
            "deepseek",
            "'a.weight' is mxfp8 with E4M3 codes, which deepseek has no form for; give --to fp32, bf16, compressed-tensors, modelopt, te",
        ),
        (
            "--recipe mxfp8 --format e5m2",
            "compressed-tensors",
            "is mxfp8 with E5M2 codes, which compressed-tensors has no form for; give --to fp32, bf16, te",
        ),
        (
            "--recipe nvfp4-1d --row-scaled",
            "modelopt",
            "which modelopt has no form for; give --to fp32, bf16, te",
        ),
        (
            "--recipe fp8-block-1d",
            "deepseek",
            "which deepseek has no form for; give --to fp32, bf16, te",
        ),
        (
            "--recipe mxfp8 --usage columnwise",
            "modelopt",
            "was quantized for columnwise, and modelopt stores the rowwise operand; quantize it for both",
        ),
        (
            "--recipe mxfp8 --ignore *.weight",
            "modelopt",
            "'experts' does not end in .weight",
        ),
        (
            "--recipe mxfp8 --ignore experts --ignore a.*",
            "modelopt",
            "'three.weight' has 3 axes",
        ),
    ] {
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors {options}"
        ));
        let message = bench.rejected(2, &format!("export q.safetensors -o hub --to {to}"));
        assert!(message.contains(expected), "{options}: {message}");
        fs::remove_file(bench.path("q.safetensors")).expect("a file");
    }
}

#[test]
fn inputs_that_are_something_else() {
    let bench = exported("mxfp8", "compressed-tensors");
    let says = |args: &str, expected: &str| {
        let message = bench.rejected(2, args);
        assert!(message.contains(expected), "{args}: {message}");
    };
    says(
        "export in.safetensors -o out --to modelopt",
        "it holds no tensor that lowp quantized; quantize the model first",
    );
    says(
        "export hub -o out --to modelopt",
        "it holds no tensor that lowp quantized",
    );
    says(
        "import in.safetensors -o out",
        "it holds no quantized weight in a form that lowp reads",
    );
    says("export absent -o out --to te", "cannot read absent");
    says(
        "export q.safetensors -o hub --to te",
        "the folder is not empty",
    );
    says(
        "export q.safetensors -o q.safetensors --to te",
        "it exists and is no folder",
    );
    says(
        "import hub -o hub/model.safetensors",
        "it is the input; give another name",
    );
    for (args, expected) in [
        (
            "import hub -o out --max-shard-size 5TB",
            "give a whole number above 0 and B, KB, MB, GB",
        ),
        ("export q.safetensors -o out --to gguf", "'gguf'"),
    ] {
        let output = bench.lowp(args);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(expected), "{message}");
    }
    fs::create_dir(bench.path("empty")).expect("a folder");
    says("import empty -o out", "it holds no .safetensors file");
    fs::create_dir(bench.path("several")).expect("a folder");
    for name in ["x.safetensors", "y.safetensors"] {
        fs::copy(
            bench.path("in.safetensors"),
            bench.path("several").join(name),
        )
        .expect("a file");
    }
    says(
        "import several -o out",
        "it holds 2 .safetensors files and 0 indices",
    );
    fs::copy(
        bench.path("in.safetensors"),
        bench.path("several/model.safetensors"),
    )
    .expect("a file");
    fs::write(bench.path("several/model.safetensors.index.json"), "{}").expect("a file");
    says("import several -o out", "which are two models");
    bench.done("shard in.safetensors -o ranks --world-size 1 --recipe mxfp8 --tensors a.weight");
    says(
        "export ranks -o out --to te",
        "a folder of rank files; gather the folder with `lowp unshard` first",
    );
}

#[test]
fn an_index_that_leads_elsewhere() {
    let bench = exported("mxfp8", "compressed-tensors");
    fs::rename(
        bench.path("hub/model.safetensors"),
        bench.path("hub/m.safetensors"),
    )
    .expect("a file");
    for (file, expected) in [
        (
            "../in.safetensors",
            "which is no file name beside the index",
        ),
        ("/etc/passwd", "which is no file name beside the index"),
        (
            "sub/m.safetensors",
            "which is no file name beside the index",
        ),
        ("..", "which is no file name beside the index"),
        (
            "gone.safetensors",
            "which is missing; put that file beside the index",
        ),
    ] {
        let index = format!(r#"{{"weight_map": {{"a.weight": "{file}"}}}}"#);
        fs::write(bench.path("hub/model.safetensors.index.json"), index).expect("a file");
        rejected(&bench, &[expected, "'a.weight'"]);
    }
    for (text, expected) in [
        (
            r#"{"weight_map": {"a.weight": "m.safetensors", "a.weight": "m.safetensors"}}"#,
            "'a.weight' is there twice",
        ),
        (
            r#"{"weight_map": {"a.weight": "m.safetensors"}}"#,
            "which the index does not name",
        ),
        (
            r#"{"weight_map": {"b.weight": "m.safetensors"}}"#,
            "which does not hold it",
        ),
        (r#"{"weight_map": 7}"#, "no index of a sharded model"),
    ] {
        fs::write(bench.path("hub/model.safetensors.index.json"), text).expect("a file");
        rejected(&bench, &[expected]);
    }
}

#[test]
fn configurations_that_are_not_read() {
    let bench = exported("mxfp8", "compressed-tensors");
    for (text, expected) in [
        ("[]", "config.json: it is not a JSON object"),
        ("{", "config.json: it is no JSON"),
        (
            r#"{"quantization_config": {"quant_method": "gptq"}}"#,
            "its quant_method is 'gptq'; lowp reads",
        ),
        (r#"{"quantization_config": {}}"#, "its quant_method is ''"),
        (
            r#"{"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}"#,
            "its weights have the format 'pack-quantized'",
        ),
        (
            r#"{"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": {"a": {"format": "marlin-24"}}}}"#,
            "its weights have the format 'marlin-24'",
        ),
        (
            r#"{"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "transform_config": {"config_groups": {}}}}"#,
            "were rotated before they were quantized",
        ),
        (
            r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}}"#,
            "its weight_block_size is [1,128]",
        ),
    ] {
        fs::write(bench.path("hub/config.json"), text).expect("a file");
        rejected(&bench, &[expected]);
    }
    let deep = "[".repeat(100_000);
    fs::write(bench.path("hub/config.json"), deep).expect("a file");
    rejected(&bench, &["config.json: it is no JSON"]);
}

#[test]
fn parts_that_are_missing_or_something_else() {
    let record = |key: &str, value: String| (!key.starts_with("lowp-export.")).then_some(value);
    for (recipe, to, gone, left) in [
        (
            "nvfp4-1d",
            "compressed-tensors",
            "a.weight_global_scale",
            "'a.weight_packed' is U8 [64, 32]",
        ),
        (
            "nvfp4-1d",
            "compressed-tensors",
            "a.weight_packed",
            "'a.weight_global_scale' is F32 [1]",
        ),
        (
            "nvfp4-1d",
            "modelopt",
            "a.weight",
            "'a.weight_scale' is F8_E4M3 [64, 4]",
        ),
        (
            "mxfp8",
            "modelopt",
            "a.weight_scale",
            "'a.weight' is F8_E4M3 [64, 64]",
        ),
        (
            "fp8-block",
            "deepseek",
            "a.weight_scale_inv",
            "'a.weight' is F8_E4M3 [64, 64]",
        ),
    ] {
        let bench = exported(recipe, to);
        change(
            &bench,
            |name, tensor| (name != gone).then_some(tensor),
            |_, value| Some(value),
        );
        rejected(
            &bench,
            &[
                "it says that it has 'a.weight' as",
                "shape [64, 64]",
                "export the model again",
            ],
        );
        change(&bench, |_, tensor| Some(tensor), record);
        rejected(&bench, &[left, "whose other parts are missing"]);
    }
    let bench = exported("mxfp8", "modelopt");
    let wider = |name: &str, (dtype, shape, bytes): (Dtype, Vec<usize>, Vec<u8>)| match name {
        "a.weight_scale" => Some((dtype, vec![32, 4], bytes)),
        _ => Some((dtype, shape, bytes)),
    };
    change(&bench, wider, record);
    rejected(
        &bench,
        &["'a.weight' is F8_E4M3 [64, 64], a part of a quantized weight"],
    );
}

#[test]
fn what_files_say_of_their_weights_is_checked() {
    let says = |recipe: &str, from: &str, to: &str, expected: &[&str]| {
        let bench = exported(recipe, "compressed-tensors");
        let replaced = |_: &str, value: String| {
            let changed = value.replace(from, to);
            Some(changed)
        };
        change(&bench, |_, tensor| Some(tensor), replaced);
        rejected(&bench, expected);
    };
    says(
        "mxfp8",
        "\"mxfp8\"",
        "\"mxfp9\"",
        &["its metadata 'lowp-export.a.weight' make no sense"],
    );
    says("mxfp8", "\"mxfp8\"", "\"nvfp4-1d\"", &["make no sense"]);
    says(
        "mxfp8",
        "[64,64]",
        "[64,128]",
        &["as mxfp8 of shape [64, 128]"],
    );
    says(
        "mxfp8",
        "[64,64]",
        "[140737488355328,64]",
        &["make no sense"],
    );
    says("mxfp8", "[64,64]", "[-1,64]", &["make no sense"]);
    says(
        "mxfp8",
        "rowwise",
        "columnwise",
        &["the columnwise operand of that is in no form"],
    );
    says(
        "mxfp8",
        "rowwise",
        "both",
        &["the columnwise operand of that is in no form"],
    );
    says(
        "nvfp4-1d",
        "\"amax\":\"",
        "\"amax\":\"+",
        &["is no number of eight hexadecimal digits"],
    );
    says(
        "nvfp4-1d",
        "\"amax\":\"4",
        "\"amax\":\"3",
        &[
            "'a.weight_global_scale' is",
            "its metadata say that the amax is",
        ],
    );
    says(
        "fp8-current",
        "\"scale\":\"3",
        "\"scale\":\"4",
        &["'a.weight_scale' is not the one scale"],
    );
    says(
        "mxfp8",
        "{\"tensor\"",
        "{\"more\":1,\"tensor\"",
        &["make no sense"],
    );
}

#[test]
fn scales_that_should_be_equal_are_checked() {
    let bench = exported("nvfp4-2d", "compressed-tensors");
    let one = |name: &str, (dtype, shape, mut bytes): (Dtype, Vec<usize>, Vec<u8>)| {
        if name == "a.weight_scale" {
            bytes[4 * 17 + 2] ^= 1;
        }
        Some((dtype, shape, bytes))
    };
    change(&bench, one, |_, value| Some(value));
    rejected(
        &bench,
        &["'a.weight_scale' has another scale at row 17, column 2"],
    );
}

#[test]
fn two_tensors_of_one_name() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[
            matrix("a.weight", &[32, 64], 1),
            f32s("a.weight_scale", &[1], &[1.0]),
        ],
    );
    bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
    let message = bench.rejected(2, "export q.safetensors -o hub --to modelopt");
    assert!(
        message.contains("two output tensors would be called 'a.weight_scale'"),
        "{message}"
    );
}

#[test]
fn a_tensor_without_elements_is_not_walked() {
    let bench = Bench::new();
    for (shape, recipe, to) in [
        ([1usize << 40, 0], "mxfp8", "compressed-tensors"),
        ([1 << 40, 0], "nvfp4-2d", "compressed-tensors"),
        ([1 << 40, 0], "fp8-block", "deepseek"),
        ([0, 1 << 40], "mxfp8-2d", "modelopt"),
        ([0, 1 << 40], "fp8-current", "compressed-tensors"),
    ] {
        bench.write("in.safetensors", &[f32s("a.weight", &shape, &[])]);
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors --recipe {recipe} --usage rowwise"
        ));
        bench.done(&format!("export q.safetensors -o hub --to {to}"));
        bench.done("import hub -o back.safetensors");
        bench.done("verify q.safetensors back.safetensors");
        fs::remove_dir_all(bench.path("hub")).expect("a folder");
    }
    bench.write("in.safetensors", &[f32s("a.weight", &[1 << 40, 0], &[])]);
    bench.done("quantize in.safetensors -o q.safetensors --recipe fp8-current --usage rowwise");
    fs::remove_file(bench.path("back.safetensors")).expect("a file");
    let message = bench.rejected(2, "export q.safetensors -o hub --to modelopt");
    assert!(
        message
            .contains("has no elements, and modelopt keeps a scale of each line; at most 1048576"),
        "{message}"
    );
}

#[test]
fn files_that_are_cut_off() {
    let bench = exported("nvfp4-1d", "compressed-tensors");
    let whole = fs::read(bench.path("hub/model.safetensors")).expect("a file");
    for end in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(bench.path("hub/model.safetensors"), &whole[..end]).expect("a file");
        rejected(&bench, &["model.safetensors: "]);
    }
    let mut long = whole.clone();
    long.push(0);
    fs::write(bench.path("hub/model.safetensors"), &long).expect("a file");
    rejected(&bench, &["belong to nothing"]);
}

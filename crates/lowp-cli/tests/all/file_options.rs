//! Options of the file commands: what is left out, which floats are written, JSON.

use crate::support::{Bench, f32s, matrix, recipes, tensor, values};
use safetensors::Dtype;
use serde_json::Value;

fn model() -> Bench {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[
            matrix("a.weight", &[32, 64], 1),
            matrix("b.weight", &[32, 64], 2),
            matrix("lm_head", &[32, 64], 3),
            matrix("norm", &[64], 4),
            tensor("ids", Dtype::I64, &[2, 32], vec![7; 512]),
        ],
    );
    bench
}

/// The tensors that were quantized.
fn quantized(bench: &Bench, options: &str) -> Vec<String> {
    bench.done(&format!(
        "quantize in.safetensors -o q.safetensors --recipe mxfp8 {options}"
    ));
    let found = bench.read("q.safetensors");
    let names = found.names().into_iter();
    names
        .filter_map(|name| name.strip_suffix(".rowwise_data"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn ignored_tensors_pass_through_whatever_else_matches_them() {
    let bench = model();
    for (options, expected) in [
        ("", &["a.weight", "b.weight", "lm_head"][..]),
        ("--ignore lm_head", &["a.weight", "b.weight"]),
        ("--ignore lm_* --ignore a.*", &["b.weight"]),
        ("--tensors *.weight --ignore b*", &["a.weight"]),
        ("--tensors a.weight --ignore *", &[]),
        ("--ignore norm", &["a.weight", "b.weight", "lm_head"]),
        ("--ignore ids", &["a.weight", "b.weight", "lm_head"]),
    ] {
        assert_eq!(quantized(&bench, options), expected, "{options}");
        let (input, output) = (bench.read("in.safetensors"), bench.read("q.safetensors"));
        for name in input.names() {
            if !expected.contains(&name) {
                assert_eq!(output.tensors[name], input.tensors[name], "{options}");
            }
        }
        bench.done("verify q.safetensors --source in.safetensors");
    }
}

#[test]
fn rank_files_ignore_the_same_tensors() {
    let bench = model();
    let options = "--recipe nvfp4-2d --tensors *.weight --tensors lm_head --ignore b.*";
    bench.done(&format!(
        "quantize in.safetensors -o q.safetensors {options}"
    ));
    bench.done(&format!(
        "shard in.safetensors -o ranks --world-size 3 {options}"
    ));
    bench.done("unshard ranks -o gathered.safetensors");
    bench.done("verify q.safetensors gathered.safetensors");
}

#[test]
fn ignoring_what_is_not_there_is_an_error() {
    let bench = model();
    for command in ["quantize", "shard --world-size 2"] {
        let line =
            |options: &str| format!("{command} in.safetensors -o out --recipe mxfp8 {options}");
        let message = bench.rejected(2, &line("--ignore x*"));
        assert!(
            message.contains("--ignore 'x*' matches no tensor of"),
            "{message}"
        );
        let message = bench.rejected(2, &line("--ignore [a"));
        assert!(message.contains("--ignore: "), "{message}");
    }
}

/// A tensor that the recipe cannot take stops the command unless it is ignored.
#[test]
fn an_unfit_tensor_can_be_ignored() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[matrix("a", &[32, 64], 1), matrix("unfit", &[32, 33], 2)],
    );
    let line = "quantize in.safetensors -o q.safetensors --recipe mxfp8";
    let message = bench.rejected(2, line);
    assert!(
        message.contains("'unfit'") && message.contains("--ignore"),
        "{message}"
    );
    assert_eq!(quantized(&bench, "--ignore unfit"), ["a"]);
}

#[test]
fn dequantized_tensors_have_the_dtype_asked_for() {
    let bench = model();
    for recipe in recipes() {
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors --recipe {recipe}"
        ));
        bench.done("dequantize q.safetensors -o f32.safetensors");
        bench.done("dequantize q.safetensors -o same.safetensors --dtype f32");
        bench.done("verify f32.safetensors same.safetensors");
        let exact = bench.read("f32.safetensors");
        for (option, dtype) in [("bf16", Dtype::BF16), ("f16", Dtype::F16)] {
            bench.done(&format!(
                "dequantize q.safetensors -o d.safetensors --dtype {option}"
            ));
            let found = bench.read("d.safetensors");
            assert_eq!(found.names(), exact.names());
            for name in ["a.weight", "b.weight", "lm_head"] {
                let exact = exact.bytes(name).chunks_exact(4);
                let exact = exact.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                let expected: Vec<u8> = match dtype {
                    Dtype::BF16 => exact
                        .flat_map(|v| half::bf16::from_f32(v).to_le_bytes())
                        .collect(),
                    _ => exact
                        .flat_map(|v| half::f16::from_f32(v).to_le_bytes())
                        .collect(),
                };
                assert_eq!(
                    found.tensors[name],
                    (dtype, vec![32, 64], expected),
                    "{recipe}"
                );
            }
            // What passed through keeps its dtype.
            for name in ["norm", "ids"] {
                assert_eq!(found.tensors[name], exact_of(&bench, name));
            }
        }
    }
}

fn exact_of(bench: &Bench, name: &str) -> (Dtype, Vec<usize>, Vec<u8>) {
    bench.read("in.safetensors").tensors[name].clone()
}

#[test]
fn values_beyond_the_dtype_are_counted() {
    let bench = Bench::new();
    let mut large = values(32 * 64, 1);
    large[..3].copy_from_slice(&[1e6, -1e6, 65_504.0]);
    bench.write(
        "in.safetensors",
        &[f32s("a", &[32, 64], &large), matrix("b", &[32, 64], 2)],
    );
    bench.done("quantize in.safetensors -o q.safetensors --recipe fp32");
    let output = bench.lowp("dequantize q.safetensors -o d.safetensors --dtype f16");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success());
    assert_eq!(
        message,
        "warning: 2 values exceed the range of F16 and became infinite, the first in 'a'; --dtype f32 keeps them\n"
    );
    for dtype in ["f32", "bf16"] {
        let output = bench.lowp(&format!(
            "dequantize q.safetensors -o d.safetensors --dtype {dtype}"
        ));
        assert!(output.status.success() && output.stderr.is_empty());
    }
    let message = bench.rejected(2, "inspect none.safetensors --json");
    assert!(message.contains("none.safetensors"), "{message}");
}

#[test]
fn inspect_as_json() {
    let bench = Bench::new();
    let mut outlier = values(32 * 64, 1);
    outlier[0] = 100.0;
    bench.write(
        "in.safetensors",
        &[f32s("w", &[32, 64], &outlier), matrix("norm", &[64], 3)],
    );
    bench.done("quantize in.safetensors -o q.safetensors --recipe nvfp4-1d");
    let text = bench.done("inspect q.safetensors --reference in.safetensors --json");
    insta::assert_snapshot!("inspect_json", text);
    bench.done("shard in.safetensors -o ranks --world-size 2 --recipe mxfp8-2d");
    insta::assert_snapshot!("inspect_json_ranks", bench.done("inspect ranks --json"));
}

/// Numbers of the tables and of the JSON are the same numbers.
#[test]
fn inspect_says_the_same_in_both_forms() {
    let bench = model();
    for recipe in recipes() {
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors --recipe {recipe}"
        ));
        let line = "inspect q.safetensors --reference in.safetensors";
        let (text, json) = (bench.done(line), bench.done(&format!("{line} --json")));
        let json: Value = serde_json::from_str(&json).expect("JSON");
        let file = &json["files"][0];
        let first = format!(
            "q.safetensors: {} tensors, 3 quantized, {} bytes, {:.3} bits per element",
            file["tensors"].as_array().expect("tensors").len(),
            file["bytes"],
            file["bits_per_element"].as_f64().expect("bits"),
        );
        assert_eq!(text.lines().next(), Some(first.as_str()));
        let mut rows = text.lines().skip(2);
        let row_of = |cells: Vec<String>, row: Option<&str>| {
            let row: Vec<&str> = row.expect("a row").split_whitespace().collect();
            assert_eq!(row, cells, "{recipe}");
        };
        rows.next();
        let tensors = file["tensors"].as_array().expect("tensors");
        for tensor in tensors {
            let row: Vec<&str> = rows.next().expect("a row").split_whitespace().collect();
            assert_eq!(row[0], tensor["name"]);
            assert_eq!(row[row.len() - 2], tensor["bytes"].to_string());
        }
        assert_eq!((rows.next(), rows.next().is_some()), (Some(""), true));
        for tensor in tensors {
            let sides = tensor["quantized"]["orientations"].as_array();
            for side in sides.into_iter().flatten() {
                let float = |key: &str| {
                    side[key]
                        .as_f64()
                        .map_or("-".to_owned(), |v| format!("{v:.4e}"))
                };
                let word = |value: &Value| value.as_str().expect("a word").to_owned();
                let cells = vec![
                    word(&tensor["name"]),
                    word(&side["orientation"]),
                    side["scales"].to_string(),
                    float("min"),
                    float("max"),
                    side["zeros"].to_string(),
                    side["saturated"].to_string(),
                    float("rel_error"),
                    float("max_error"),
                    side["non_finite"].to_string(),
                ];
                row_of(cells, rows.next());
            }
        }
        assert_eq!(rows.next(), None);
    }
}

/// Elements that have no error, as they are not finite, are counted, in both forms, by each rank for its rows.
#[test]
fn inspect_counts_what_is_not_finite() {
    let bench = Bench::new();
    let mut reference = values(32 * 64, 1);
    for (at, value) in [
        (0, f32::NAN),
        (65, f32::INFINITY),
        (2047, f32::NEG_INFINITY),
    ] {
        reference[at] = value;
    }
    bench.write(
        "in.safetensors",
        &[f32s("w", &[32, 64], &values(32 * 64, 1))],
    );
    bench.write("other.safetensors", &[f32s("w", &[32, 64], &reference)]);
    bench.done("quantize in.safetensors -o q.safetensors --recipe fp8-current");
    bench.done("shard in.safetensors -o ranks --world-size 2 --recipe fp8-current");
    for (file, counts) in [("q.safetensors", &[3][..]), ("ranks", &[2, 1])] {
        let line = format!("inspect {file} --reference other.safetensors");
        let text = bench.done(&line);
        let json: Value =
            serde_json::from_str(&bench.done(&format!("{line} --json"))).expect("JSON");
        let rows = text
            .lines()
            .filter(|line| line.starts_with("w  ") && line.contains('e'));
        let last: Vec<&str> = rows
            .filter_map(|row| row.split_whitespace().last())
            .collect();
        for (i, count) in counts.iter().enumerate() {
            let file = &json["files"][i];
            let side = &file["tensors"][0]["quantized"]["orientations"][0];
            assert_eq!(side["non_finite"], *count, "{file}");
            assert!(side["max_error"].is_number(), "{file}");
            assert!(last.contains(&&*count.to_string()), "{text}");
        }
        assert!(text.contains("  non-finite\n"), "{text}");
    }
}

/// Block scales have the form that is asked for, or there is an error; scales of tensors and lines are the same in every form.
#[test]
fn scales_that_are_not_swizzled() {
    let bench = model();
    for command in ["quantize", "shard --world-size 2"] {
        for (recipe, code) in [("fp8-block", "F32"), ("fp8-block-1d", "F32")] {
            let message = bench.rejected(
                2,
                &format!("{command} in.safetensors -o out --scales swizzled --recipe {recipe}"),
            );
            let expected = format!(
                "--scales swizzled: {recipe} has {code} block scales, which do not have this form \
                 (docs/scale-layouts.md); give --scales compact or padded"
            );
            assert!(message.contains(&expected), "{message}");
        }
    }
    for recipe in ["fp8-rowwise", "fp8-current", "fp8-delayed"] {
        let found = ["padded", "compact", "swizzled"].map(|form| {
            bench.done(&format!(
                "quantize in.safetensors -o q.safetensors --scales {form} --recipe {recipe}"
            ));
            let found = bench.read("q.safetensors").tensors;
            found["a.weight.rowwise_scale_inv"].clone()
        });
        assert!(found.iter().all(|scale| *scale == found[0]), "{recipe}");
    }
}

//! Options of recipes on the command line and in the metadata of files.

use crate::support::{Bench, Contents, Tensor, matrix, tensor};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// A switch of a recipe takes a value, or none, and then the word that follows is an argument.
#[test]
fn switches_take_values_and_leave_arguments() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[16, 128], 1)]);
    let options = |line: &str| {
        bench.done(line);
        let text = &bench.read("q.safetensors").metadata["lowp.tensor.w"];
        let text: serde_json::Value = serde_json::from_str(text).expect("JSON");
        text["options"].clone()
    };
    let line = "-o q.safetensors --recipe fp8-block";
    for (flags, pow2) in [
        ("in.safetensors", true),
        ("--pow2 in.safetensors", true),
        ("--pow2 false in.safetensors", false),
        ("--pow2=false in.safetensors", false),
        ("--pow2 true in.safetensors", true),
        ("in.safetensors --pow2 --format hybrid", true),
    ] {
        let found = options(&format!("quantize {line} {flags}"));
        assert_eq!(found["pow2"], pow2, "{flags}");
    }
    assert_eq!(
        options(&format!(
            "quantize in.safetensors {line} --format hybrid --epsilon 1e-12"
        )),
        serde_json::json!({
            "format": "hybrid", "pow2": true, "epsilon": 1e-12, "source_rounding": "f32"
        })
    );
}

/// A value that a recipe does not have is an error that names the recipe, and those that take the value.
#[test]
fn an_error_of_an_option_names_the_recipes_that_take_it() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[32, 128], 1)]);
    for (recipe, option, expected) in [
        (
            "fp8-current",
            "--scale-mode even",
            "fp8-current has no option --scale-mode; leave it out, or choose a recipe that takes --scale-mode even: mxfp4\n",
        ),
        (
            "mxfp8",
            "--scale-mode even",
            "--scale-mode even is out of range of mxfp8: te or ocp-floor; even is an option of mxfp4\n",
        ),
        (
            "nvfp4-2d",
            "--row-scaled",
            "nvfp4-2d has no option --row-scaled; leave it out, or choose a recipe that takes --row-scaled true: nvfp4-1d\n",
        ),
        (
            "fp8-delayed",
            "--margin 65",
            "--margin 65 is out of range of fp8-delayed: -64 to 64 binary orders\n",
        ),
        (
            "mxfp8",
            "--margin 65",
            "mxfp8 has no option --margin; leave it out, or choose a recipe that has it: fp8-delayed\n",
        ),
    ] {
        for command in [
            "quantize in.safetensors -o out",
            "shard in.safetensors -o out --world-size 2",
            "plan --shape 32x128 --world-size 2",
        ] {
            let message = bench.rejected(2, &format!("{command} --recipe {recipe} {option}"));
            assert!(message.ends_with(expected), "{command}: {message}");
        }
    }
    let message = bench.rejected(2, "plan --shape 32x128 --world-size 2 --recipe mxfp8+even");
    let expected =
        "scale_mode = even is out of range of mxfp8: te or ocp-floor; even is an option of mxfp4\n";
    assert!(message.ends_with(expected), "{message}");
}

/// Flags and modifiers set the same options, by the names that files have or as flags, in every command that takes both.
#[test]
fn flags_and_modifiers_are_the_same_options() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[32, 128], 1)]);
    for (flags, modified) in [
        (
            "mxfp4 --scale-mode even",
            &["mxfp4+even", "mxfp4+scale_mode=even"][..],
        ),
        ("mxfp4 --scale_mode even", &["mxfp4+scale-mode=even"]),
        (
            "fp8-current --pow2",
            &["fp8-current+pow2", "fp8-current+e4m3+pow2"],
        ),
        (
            "fp8-block --pow2 false",
            &["fp8-block+no-pow2", "fp8-block+pow2=false"],
        ),
        ("nvfp4-1d --row_scaled true", &["nvfp4-1d+row-scaled"]),
        (
            "fp8-delayed --margin -3 --format e5m2",
            &["fp8-delayed+margin=-3+e5m2"],
        ),
    ] {
        bench.done(&format!(
            "quantize in.safetensors -o flags.safetensors --recipe {flags}"
        ));
        bench.done(&format!(
            "plan --shape 32x128 --world-size 2 --recipe {flags}"
        ));
        for recipe in modified {
            bench.done(&format!(
                "quantize in.safetensors -o q.safetensors --recipe {recipe}"
            ));
            bench.done("verify flags.safetensors q.safetensors");
            bench.done(&format!(
                "shard in.safetensors -o {recipe} --world-size 2 --recipe {recipe}"
            ));
            bench.done(&format!("unshard {recipe} -o q.safetensors"));
            bench.done("verify flags.safetensors q.safetensors");
            bench.done(&format!(
                "plan --shape 32x128 --world-size 2 --recipe {recipe}"
            ));
        }
    }
    for (recipe, expected) in [
        (
            "mxfp8+even",
            "scale_mode = even is out of range of mxfp8: te or ocp-floor; even is an option of mxfp4\n",
        ),
        (
            "mxfp8+tensor-scale",
            "+tensor-scale is an ablation of training, which no file has; leave it out\n",
        ),
        (
            "mxfp4+even --scale-mode te",
            "--scale-mode cannot be combined with modifiers; write the option as a modifier: NAME+scale-mode=VALUE\n",
        ),
        ("nope+even", "there is no recipe 'nope'"),
    ] {
        for command in [
            "quantize in.safetensors -o out",
            "shard in.safetensors -o out --world-size 2",
        ] {
            let message = bench.rejected(2, &format!("{command} --recipe {recipe}"));
            assert!(message.contains(expected), "{recipe}: {message}");
        }
    }
    // Spaces around a name mean nothing.
    let spaced = ["plan", "--shape", "32x128", "--world-size", "2", "--recipe"];
    for recipe in [" mxfp8 ", "mxfp4 + even"] {
        bench.done(&[&spaced[..], &[recipe]].concat());
        let quantize = [
            "quantize",
            "in.safetensors",
            "-o",
            "q.safetensors",
            "--recipe",
            recipe,
        ];
        bench.done(&quantize);
    }
}

/// Files of before: scale_mode had another name, and options that came later are at their defaults.
#[test]
fn older_metadata_are_read() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[32, 64], 1)]);
    for (recipe, options, older) in [
        (
            "mxfp8",
            "--scale-mode ocp-floor",
            r#"{"format":"e4m3","mx_scale":"ocp-floor","source_rounding":"f32"}"#,
        ),
        ("nvfp4-2d", "", r#"{"source_rounding":"f32"}"#),
    ] {
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors --recipe {recipe} {options}"
        ));
        let found = bench.read("q.safetensors");
        let text = &found.metadata["lowp.tensor.w"];
        let mut text: serde_json::Value = serde_json::from_str(text).expect("JSON");
        text["options"] = serde_json::from_str(older).expect("JSON");
        let text = text.to_string();
        let metadata = [("lowp.format", "1"), ("lowp.tensor.w", text.as_str())];
        let tensors: Vec<Tensor> = found
            .tensors
            .iter()
            .map(|(name, (dtype, shape, bytes))| tensor(name, *dtype, shape, bytes.clone()))
            .collect();
        bench.write_with("older.safetensors", &tensors, &metadata);
        bench.done("verify q.safetensors older.safetensors");
        bench.done("verify older.safetensors --source in.safetensors");
    }
}

/// The golden name of an option, and the command line that sets it.
const GOLDEN: [(&str, &str); 19] = [
    ("fp8_rowwise_e4m3", "fp8-rowwise"),
    ("fp8_rowwise_e5m2", "fp8-rowwise --format e5m2"),
    ("fp8_rowwise_e4m3_pow2", "fp8-rowwise --pow2"),
    ("block1d_e4m3", "fp8-block-1d"),
    ("block1d_e5m2", "fp8-block-1d --format e5m2"),
    ("block1d_e4m3_f32scale", "fp8-block-1d --pow2 false"),
    ("block2d_e4m3", "fp8-block"),
    ("block2d_e5m2", "fp8-block --format e5m2"),
    ("mxfp4", "mxfp4"),
    ("mxfp4_floor", "mxfp4 --scale-mode ocp-floor"),
    ("mxfp4_even", "mxfp4 --scale-mode even"),
    ("nvfp4_1d_rowscaled", "nvfp4-1d --row-scaled"),
    ("nvfp4_1d_fo6_mae", "nvfp4-1d --four-over-six mae"),
    ("nvfp4_1d_fo6_mse", "nvfp4-1d --four-over-six mse"),
    ("nvfp4_1d_fo6_mae_448", "nvfp4-1d --four-over-six mae-448"),
    ("nvfp4_2d_fo6_mae", "nvfp4-2d --four-over-six mae"),
    ("nvfp4_2d_fo6_mse", "nvfp4-2d --four-over-six mse"),
    ("nvfp4_2d_fo6_mse_448", "nvfp4-2d --four-over-six mse-448"),
    // The same source without its transform: of the files' columnwise buffers they have none.
    ("nvfp4_1d_rht", "nvfp4-1d --usage rowwise"),
];

/// Every golden vector of an option is what `lowp quantize` writes, under its name.
#[test]
fn golden_vectors_of_options() {
    let bench = Bench::new();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let (mut seen, mut compared) = (BTreeSet::new(), 0);
    for entry in std::fs::read_dir(folder).expect("golden files") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy();
        if !name.starts_with("ext_") {
            continue;
        }
        let golden = Contents::read(&path);
        let Some((dtype, shape, bytes)) = golden.tensors.get("x") else {
            continue;
        };
        bench.write(
            "in.safetensors",
            &[tensor("T", *dtype, shape, bytes.clone())],
        );
        for (prefix, options) in GOLDEN {
            let of = |name: &str| {
                let (found, field) = name.split_once('.')?;
                (found == prefix).then(|| field.to_owned())
            };
            let fields: Vec<String> = golden.tensors.keys().filter_map(|name| of(name)).collect();
            if fields.is_empty() {
                continue;
            }
            bench.done(&format!(
                "quantize in.safetensors -o q.safetensors --dtypes u8 --recipe {options}"
            ));
            let found = bench.read("q.safetensors");
            for field in fields {
                // Those of other forms, and of what is in no file.
                let Some(found) = found.tensors.get(&format!("T.{field}")) else {
                    continue;
                };
                let what = format!("{name} {prefix}.{field}");
                let expected = &golden.tensors[&format!("{prefix}.{field}")];
                assert_eq!((found.0, &found.1), (expected.0, &expected.1), "{what}");
                let differs = found.2.iter().zip(&expected.2).position(|(x, y)| x != y);
                assert_eq!(differs, None, "{what}: first different byte");
                compared += 1;
            }
            seen.insert(prefix);
        }
    }
    assert_eq!(seen.len(), GOLDEN.len(), "{seen:?}");
    assert!(compared > 500, "only {compared} golden tensors compared");
}

//! The file commands as a user meets them: names, options, snapshots.

use crate::support::{
    self, Bench, Tensor, bf16s, f16s, f32s, form_of, matrix, recipes, tensor, values,
};
use safetensors::tensor::Dtype;

const QUANTIZE: [&str; 4] = ["quantize", "in.safetensors", "-o", "q.safetensors"];

fn quantize(bench: &Bench, options: &[&str]) -> support::Contents {
    bench.done(&[&QUANTIZE[..], options].concat());
    bench.read("q.safetensors")
}

#[test]
fn names_dtypes_and_shapes_of_the_contract() {
    let bench = Bench::new();
    bench.write_with(
        "in.safetensors",
        &[matrix("w", &[2, 24, 64], 1)],
        &[("format", "pt")],
    );
    let fields = |options: &[&str]| -> Vec<String> {
        let found = quantize(&bench, &[options, &["--dtypes", "u8"]].concat());
        let line = |name: &&str| {
            let (dtype, shape, _) = &found.tensors[*name];
            format!("{name} {dtype} {shape:?}")
        };
        assert_eq!(found.metadata["format"], "pt");
        assert_eq!(found.metadata["lowp.format"], "1");
        found.names().iter().map(line).collect()
    };
    assert_eq!(
        fields(&["--recipe", "nvfp4-2d"]),
        [
            "w.amax F32 [1]",
            "w.columnwise_data U8 [64, 24]",
            "w.columnwise_scale_inv U8 [128, 4]",
            "w.rowwise_data U8 [48, 32]",
            "w.rowwise_scale_inv U8 [128, 4]",
        ]
    );
    assert_eq!(
        fields(&[
            "--recipe", "nvfp4-2d", "--scales", "compact", "--usage", "rowwise"
        ]),
        [
            "w.amax F32 [1]",
            "w.rowwise_data U8 [48, 32]",
            "w.rowwise_scale_inv U8 [3, 4]"
        ]
    );
    assert_eq!(
        fields(&["--recipe", "mxfp8-2d", "--scales", "compact"]),
        [
            "w.rowwise_data U8 [48, 64]",
            "w.rowwise_scale_inv U8 [2, 2]"
        ]
    );
    assert_eq!(
        fields(&[
            "--recipe",
            "mxfp8",
            "--usage",
            "columnwise",
            "--scales",
            "swizzled"
        ]),
        [
            "w.columnwise_data U8 [48, 64]",
            "w.columnwise_scale_inv U8 [512]"
        ]
    );
    assert_eq!(
        fields(&["--recipe", "fp8-current"]),
        [
            "w.amax F32 [1]",
            "w.columnwise_data U8 [64, 48]",
            "w.columnwise_scale_inv F32 [1]",
            "w.rowwise_data U8 [48, 64]",
            "w.rowwise_scale_inv F32 [1]",
        ]
    );
    assert_eq!(
        fields(&["--recipe", "fp8-rowwise"]),
        [
            "w.columnwise_data U8 [64, 48]",
            "w.columnwise_scale_inv F32 [64, 1]",
            "w.rowwise_data U8 [48, 64]",
            "w.rowwise_scale_inv F32 [48, 1]",
        ]
    );
    assert_eq!(
        fields(&[
            "--recipe",
            "nvfp4-1d",
            "--row-scaled",
            "--scales",
            "compact"
        ]),
        [
            "w.amax F32 [48]",
            "w.amax_columnwise F32 [64]",
            "w.columnwise_data U8 [64, 24]",
            "w.columnwise_scale_inv U8 [64, 3]",
            "w.rowwise_data U8 [48, 32]",
            "w.rowwise_scale_inv U8 [48, 4]",
        ]
    );
    assert_eq!(
        fields(&["--recipe", "nvfp4-mxfp8", "--scales", "compact"]),
        [
            "w.amax F32 [1]",
            "w.columnwise_data U8 [48, 64]",
            "w.columnwise_scale_inv U8 [2, 64]",
            "w.rowwise_data U8 [48, 32]",
            "w.rowwise_scale_inv U8 [48, 4]",
        ]
    );
    assert_eq!(
        fields(&["--recipe", "fp8-block", "--usage", "rowwise"]),
        [
            "w.rowwise_data U8 [48, 64]",
            "w.rowwise_scale_inv F32 [1, 4]",
        ]
    );
}

#[test]
fn metadata_name_recipe_options_shape_and_dtype() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[bf16s("w", &[2, 16, 32], &values(1024, 1))],
    );
    let found = quantize(&bench, &["--recipe", "mxfp8", "--scale-mode", "ocp-floor"]);
    let text: serde_json::Value =
        serde_json::from_str(&found.metadata["lowp.tensor.w"]).expect("JSON");
    let expected = serde_json::json!({
        "recipe": "mxfp8",
        "options": { "format": "e4m3", "scale_mode": "ocp-floor", "source_rounding": "f32" },
        "shape": [2, 16, 32],
        "dtype": "BF16",
        "usage": "both",
        "scales": "padded",
    });
    assert_eq!(text, expected);
}

#[test]
fn both_orientations_and_every_form_decode_to_the_same_shape() {
    let bench = Bench::new();
    let shape = [3, 11, 64];
    bench.write(
        "in.safetensors",
        &[matrix("w", &shape, 1), matrix("norm", &[7], 2)],
    );
    for recipe in recipes() {
        for form in ["padded", "compact", "swizzled"] {
            let form = form_of(recipe, form);
            quantize(&bench, &["--recipe", recipe, "--scales", form]);
            let mut decoded = Vec::new();
            for usage in ["rowwise", "columnwise"] {
                bench.done(&format!(
                    "dequantize q.safetensors -o d.safetensors --usage {usage}"
                ));
                let found = bench.read("d.safetensors");
                assert_eq!(found.names(), ["norm", "w"]);
                assert_eq!(found.tensors["w"].0, Dtype::F32);
                assert_eq!(found.tensors["w"].1, shape);
                decoded.push(found.bytes("w").to_vec());
            }
            // Blocks of one element row or column differ; tiles and tensors do not.
            let same = matches!(
                recipe,
                "fp8-delayed" | "fp8-current" | "fp8-block" | "mxfp8-2d" | "nvfp4-2d"
            );
            assert_eq!(decoded[0] == decoded[1], same, "{recipe} {form}");
        }
    }
}

#[test]
fn a_scale_form_changes_no_value() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[50, 96], 1)]);
    for recipe in recipes() {
        let mut decoded = Vec::new();
        for form in ["padded", "compact", "swizzled"] {
            let form = form_of(recipe, form);
            quantize(
                &bench,
                &[
                    "--recipe",
                    recipe,
                    "--scales",
                    form,
                    "--usage",
                    "columnwise",
                ],
            );
            bench.done("dequantize q.safetensors -o d.safetensors");
            decoded.push(bench.read("d.safetensors").bytes("w").to_vec());
        }
        assert!(
            decoded.windows(2).all(|pair| pair[0] == pair[1]),
            "{recipe}"
        );
    }
}

#[test]
fn sixteen_bit_sources_are_widened_exactly() {
    let bench = Bench::new();
    let source = values(32 * 64, 3);
    let round = |f: fn(f32) -> f32| -> Vec<f32> { source.iter().map(|&x| f(x)).collect() };
    let bf16 = round(|x| half::bf16::from_f32(x).to_f32());
    let f16 = round(|x| half::f16::from_f32(x).to_f32());
    let pairs: [(Tensor, Vec<f32>); 2] = [
        (bf16s("w", &[32, 64], &source), bf16),
        (f16s("w", &[32, 64], &source), f16),
    ];
    for (narrow, wide) in pairs {
        let dtype = narrow.dtype;
        for recipe in recipes() {
            bench.write("in.safetensors", &[f32s("w", &[32, 64], &wide)]);
            let expected = quantize(&bench, &["--recipe", recipe]).tensors;
            let narrow = tensor("w", dtype, &[32, 64], narrow.bytes.clone());
            bench.write("in.safetensors", &[narrow]);
            assert!(
                quantize(&bench, &["--recipe", recipe]).tensors == expected,
                "{recipe} {dtype}"
            );
        }
    }
}

#[test]
fn patterns_choose_and_unfit_tensors_are_kept() {
    let bench = Bench::new();
    let ids = tensor("ids", Dtype::I64, &[2, 32], vec![7; 512]);
    bench.write(
        "in.safetensors",
        &[
            matrix("a.weight", &[32, 64], 1),
            matrix("b.weight", &[32, 40], 2),
            matrix("c", &[32, 64], 3),
            ids,
        ],
    );
    let message = bench.rejected(2, &[&QUANTIZE[..], &["--recipe", "mxfp8"]].concat());
    assert!(
        message.contains("'b.weight'") && message.contains("--skip-unsupported"),
        "{message}"
    );
    // Integers are no weights; doubles may be.
    let found = quantize(&bench, &["--recipe", "fp8-current", "--usage", "rowwise"]);
    assert!(found.tensors.contains_key("ids"), "{:?}", found.names());
    let double = tensor("double", Dtype::F64, &[2, 32], vec![0; 512]);
    bench.write("double.safetensors", &[double]);
    let message = bench.rejected(2, "quantize double.safetensors -o out --recipe fp8-current");
    assert!(
        message.contains("'double'") && message.contains("F64"),
        "{message}"
    );

    let found = quantize(
        &bench,
        &[
            "--recipe",
            "mxfp8",
            "--skip-unsupported",
            "--usage",
            "rowwise",
        ],
    );
    let expected = [
        "a.weight.rowwise_data",
        "a.weight.rowwise_scale_inv",
        "b.weight",
        "c.rowwise_data",
        "c.rowwise_scale_inv",
        "ids",
    ];
    assert_eq!(found.names(), expected);
    assert_eq!(
        found.tensors["ids"],
        (Dtype::I64, vec![2, 32], vec![7; 512])
    );

    let found = quantize(
        &bench,
        &[
            "--recipe",
            "mxfp8",
            "--tensors",
            "a.*",
            "--usage",
            "rowwise",
        ],
    );
    assert_eq!(
        found.names(),
        [
            "a.weight.rowwise_data",
            "a.weight.rowwise_scale_inv",
            "b.weight",
            "c",
            "ids"
        ]
    );

    let message = bench.rejected(
        2,
        &[&QUANTIZE[..], &["--recipe", "mxfp8", "--tensors", "x*"]].concat(),
    );
    assert!(message.contains("'x*' matches no tensor of"), "{message}");
}

#[test]
fn a_pattern_that_only_vectors_match() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[matrix("w", &[32, 32], 1), matrix("norm", &[32], 2)],
    );
    let options = ["--recipe", "mxfp8", "--tensors", "norm"];
    let message = bench.rejected(2, &[&QUANTIZE[..], &options].concat());
    assert!(
        message.contains("'norm' matches no tensor of two or more dimensions"),
        "{message}"
    );
}

#[test]
fn a_sharded_model_is_read_by_its_index() {
    let bench = Bench::new();
    bench.write("one.safetensors", &[matrix("a", &[32, 64], 1)]);
    bench.write(
        "two.safetensors",
        &[matrix("b", &[48, 64], 2), matrix("norm", &[64], 3)],
    );
    bench.write(
        "all.safetensors",
        &[
            matrix("a", &[32, 64], 1),
            matrix("b", &[48, 64], 2),
            matrix("norm", &[64], 3),
        ],
    );
    let index = r#"{"metadata": {"total_size": 1}, "weight_map":
        {"a": "one.safetensors", "b": "two.safetensors", "norm": "two.safetensors"}}"#;
    std::fs::write(bench.path("model.safetensors.index.json"), index).expect("an index");
    for recipe in recipes() {
        bench.done(&format!(
            "quantize all.safetensors -o q1.safetensors --recipe {recipe}"
        ));
        bench.done(&format!(
            "quantize model.safetensors.index.json -o q2.safetensors --recipe {recipe}"
        ));
        assert!(
            bench
                .done(&["verify", "q1.safetensors", "q2.safetensors"])
                .starts_with("equal: ")
        );
    }
    bench.done("shard model.safetensors.index.json -o ranks --world-size 3 --recipe mxfp8");
    bench.done("unshard ranks -o u.safetensors");
    bench.done("quantize all.safetensors -o q1.safetensors --recipe mxfp8");
    bench.done("verify q1.safetensors u.safetensors");
}

#[test]
fn verify_names_tensor_block_and_byte() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[64, 64], 1)]);
    bench.done("quantize in.safetensors -o a.safetensors --recipe mxfp8");
    let found = bench.read("a.safetensors");
    let changed = |field: &str, at: usize| {
        let tensors: Vec<Tensor> = found
            .names()
            .into_iter()
            .map(|name| {
                let (dtype, shape, mut bytes) = found.tensors[name].clone();
                if name == field {
                    bytes[at] ^= 1;
                }
                tensor(name, dtype, &shape, bytes)
            })
            .collect();
        let metadata: Vec<(&str, &str)> = found
            .metadata
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        bench.write_with("b.safetensors", &tensors, &metadata);
        bench.rejected(1, "verify a.safetensors b.safetensors")
    };
    let message = changed("w.rowwise_data", 5 * 64 + 40);
    assert!(
        message.contains("'w.rowwise_data' differs first at byte 360"),
        "{message}"
    );
    assert!(
        message.contains("row 5, column 40, in block 5,1 of 1x32"),
        "{message}"
    );
    let message = changed("w.columnwise_scale_inv", 128 + 3);
    assert!(
        message.contains("byte 131 (row 32, column 3, in block 1,3 of 32x1)"),
        "{message}"
    );
    let message = changed("w.rowwise_scale_inv", 3);
    assert!(message.contains("byte 3 (padding)"), "{message}");

    bench.write("short.safetensors", &[matrix("v", &[1], 1)]);
    let message = bench.rejected(1, "verify in.safetensors short.safetensors");
    assert!(
        message.contains("'v' is in short.safetensors and not in in.safetensors"),
        "{message}"
    );
    bench.rejected(2, "verify in.safetensors absent.safetensors");
}

#[test]
fn options_that_make_no_sense() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[32, 32], 1)]);
    for (options, expected) in [
        (&["--recipe", "mxfp9"][..], "there is no recipe 'mxfp9'"),
        (
            &["--recipe", "nvfp4-1d", "--format", "e5m2"],
            "no option --format",
        ),
        (
            &["--recipe", "fp8-current", "--scale-mode", "te"],
            "no option --scale-mode",
        ),
        (&["--recipe", "mxfp8", "--pow2"], "no option --pow2"),
        (
            &["--recipe", "mxfp8", "--delayed-scale", "2"],
            "no delayed scale",
        ),
        (
            &["--recipe", "fp8-delayed", "--delayed-scale", "-1"],
            "positive finite",
        ),
        (
            &["--recipe", "fp8-delayed", "--delayed-scale", "inf"],
            "--delayed-scale inf is not a valid scale; give a positive finite",
        ),
        (
            &["--recipe", "fp8-delayed", "--delayed-scale", "1e39"],
            "--delayed-scale 1e39 is not a valid scale; give a positive finite",
        ),
        (
            &["--recipe", "fp8-delayed", "--delayed-scale", "1e-60"],
            "--delayed-scale 1e-60 is not a valid scale",
        ),
        (
            &["--recipe", "fp8-delayed", "--delayed-scale", "three"],
            "--delayed-scale three is not a valid scale",
        ),
        (&["--recipe", "mxfp8", "--tensors", "[a"], "--tensors"),
    ] {
        let message = bench.rejected(2, &[&QUANTIZE[..], options].concat());
        assert!(message.contains(expected), "{options:?}: {message}");
    }
}

#[test]
fn plain_recipes_keep_their_dtype() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[3, 5], 1)]);
    let found = quantize(&bench, &["--recipe", "bf16", "--scales", "compact"]);
    assert_eq!(found.names(), ["w.rowwise_data"]);
    assert_eq!(found.tensors["w.rowwise_data"].0, Dtype::BF16);
    bench.done("dequantize q.safetensors -o d.safetensors");
}

#[test]
fn help_has_examples() {
    let bench = Bench::new();
    for command in [
        "quantize",
        "dequantize",
        "shard",
        "unshard",
        "inspect",
        "verify",
        "export",
        "import",
    ] {
        let help = bench.done(&format!("{command} --help"));
        assert!(help.contains("Examples:"), "{command}");
        insta::assert_snapshot!(format!("help_{command}"), help);
    }
}

#[test]
fn inspect_shows_tables() {
    let bench = Bench::new();
    let mut outlier = values(32 * 64, 1);
    outlier[0] = 100.0;
    bench.write(
        "in.safetensors",
        &[
            f32s("layer.weight", &[32, 64], &outlier),
            bf16s("head", &[2, 24, 32], &values(1536, 2)),
            matrix("norm", &[64], 3),
        ],
    );
    insta::assert_snapshot!("inspect_plain", bench.done("inspect in.safetensors"));
    for recipe in recipes() {
        quantize(
            &bench,
            &[
                "--recipe",
                recipe,
                "--tensors",
                "layer*",
                "--tensors",
                "head",
            ],
        );
        let text = bench.done("inspect q.safetensors --reference in.safetensors");
        insta::assert_snapshot!(format!("inspect_{recipe}"), text);
    }
    bench.done("shard in.safetensors -o ranks --world-size 2 --recipe nvfp4-2d");
    insta::assert_snapshot!("inspect_ranks", bench.done("inspect ranks"));
}

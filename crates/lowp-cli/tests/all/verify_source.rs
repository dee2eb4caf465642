//! `lowp verify --source`: a file is what `lowp quantize` makes of a model, or the first difference is named.

use crate::support::{Bench, Tensor, bf16s, f16s, f32s, form_of, matrix, recipes, tensor, values};

const VERIFY: &str = "verify q.safetensors --source in.safetensors";

/// Matrices of every dtype and names that sort into each other, beside tensors that pass through.
fn model() -> Vec<Tensor> {
    vec![
        matrix("a", &[33, 64], 1),
        bf16s("a.b", &[2, 24, 64], &values(2 * 24 * 64, 2)),
        f16s("a.c", &[16, 32], &values(16 * 32, 3)),
        matrix("empty", &[0, 64], 4),
        f32s("norm", &[33], &values(33, 5)),
    ]
}

/// The file `name` with other tensors, its metadata kept.
fn rewrite(bench: &Bench, name: &str, change: impl Fn(&mut Vec<Tensor>)) {
    rewrite_with(bench, name, change, |_, value| value.to_owned());
}

fn rewrite_with(
    bench: &Bench,
    name: &str,
    change: impl Fn(&mut Vec<Tensor>),
    metadata: impl Fn(&str, &str) -> String,
) {
    let found = bench.read(name);
    let mut tensors: Vec<Tensor> = found
        .names()
        .into_iter()
        .map(|name| {
            let (dtype, shape, bytes) = &found.tensors[name];
            tensor(name, *dtype, shape, bytes.clone())
        })
        .collect();
    change(&mut tensors);
    let metadata: Vec<(&str, String)> = found
        .metadata
        .iter()
        .map(|(key, value)| (key.as_str(), metadata(key, value)))
        .collect();
    let metadata: Vec<(&str, &str)> = metadata.iter().map(|(k, v)| (*k, v.as_str())).collect();
    bench.write_with(name, &tensors, &metadata);
}

fn of<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors
        .iter_mut()
        .find(|tensor| tensor.name == name)
        .expect("a tensor of that name")
}

#[test]
fn every_recipe_usage_and_form_is_made_again() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    let usages = ["both", "rowwise", "columnwise"];
    for (r, recipe) in recipes().into_iter().enumerate() {
        for (f, form) in ["padded", "compact", "swizzled"].into_iter().enumerate() {
            let (usage, form) = (usages[(r + f) % 3], form_of(recipe, form));
            bench.done(&format!(
                "quantize in.safetensors -o q.safetensors --recipe {recipe} --usage {usage} --scales {form}"
            ));
            let found = bench.read("q.safetensors");
            let bytes: usize = found.tensors.values().map(|(.., bytes)| bytes.len()).sum();
            assert_eq!(
                bench.done(VERIFY),
                format!(
                    "equal: {} tensors, {bytes} bytes; 4 quantized again\n",
                    found.tensors.len()
                )
            );
        }
    }
}

#[test]
fn every_option_is_read_from_the_file() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    for options in [
        "--recipe fp8-delayed --delayed-scale 3.5",
        "--recipe fp8-delayed --format e5m2",
        "--recipe fp8-current --format e5m2",
        "--recipe fp8-current --pow2",
        "--recipe mxfp8 --scale-mode ocp-floor",
        "--recipe mxfp8-2d --format e5m2",
        "--recipe nvfp4-2d --tensors a.*",
        "--recipe nvfp4-1d --row-scaled",
        "--recipe nvfp4-1d --row-scaled --four-over-six mae",
        "--recipe nvfp4-1d --row-scaled --four-over-six mse-448 --usage rowwise",
        "--recipe nvfp4-2d --four-over-six mse",
        "--recipe nvfp4-mxfp8 --four-over-six mae-448",
        "--recipe fp8-block-1d --pow2 false",
        "--recipe mxfp4 --scale-mode even",
        "--recipe bf16",
    ] {
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors {options}"
        ));
        bench.done(&format!("{VERIFY} --device cpu"));
    }
}

#[test]
fn sharded_models_and_unsharded_ranks() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    bench.write("one.safetensors", &model()[..2]);
    bench.write("two.safetensors", &model()[2..]);
    let index = r#"{"weight_map": {"a": "one.safetensors", "a.b": "one.safetensors",
        "a.c": "two.safetensors", "empty": "two.safetensors", "norm": "two.safetensors"}}"#;
    std::fs::write(bench.path("in.safetensors.index.json"), index).expect("an index");
    bench.done("shard in.safetensors -o ranks --world-size 3 --recipe nvfp4-2d");
    bench.done("unshard ranks -o q.safetensors");
    bench.done(VERIFY);
    bench.done("verify q.safetensors --source in.safetensors.index.json");

    for ranks in ["ranks", "ranks/rank-00001-of-00003.safetensors"] {
        let message = bench.rejected(2, &format!("verify {ranks} --source in.safetensors"));
        assert!(message.contains("with `lowp unshard` first"), "{message}");
    }
    let message = bench.rejected(2, "verify q.safetensors --source q.safetensors");
    assert!(message.contains("is quantized already"), "{message}");
}

#[test]
fn a_changed_byte_is_named() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    let changed = |recipe: &str, field: &str, at: usize| {
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors --recipe {recipe}"
        ));
        rewrite(&bench, "q.safetensors", |tensors| {
            of(tensors, field).bytes[at] ^= 1;
        });
        bench.rejected(1, VERIFY)
    };
    for (recipe, field, at, place) in [
        (
            "mxfp8",
            "a.b.rowwise_data",
            5 * 64 + 40,
            " (row 5, column 40, in block 5,1 of 1x32)",
        ),
        (
            "mxfp8",
            "a.columnwise_scale_inv",
            128 + 3,
            " (row 32, column 3, in block 1,3 of 32x1)",
        ),
        ("nvfp4-2d", "a.c.amax", 2, ""),
        ("fp8-current", "a.rowwise_scale_inv", 0, ""),
    ] {
        let message = changed(recipe, field, at);
        let start = format!("error: '{field}' differs first at byte {at}{place}: 0x");
        assert!(message.starts_with(&start), "{message}");
        assert!(
            message
                .trim_end()
                .ends_with(" in in.safetensors quantized again"),
            "{message}"
        );
    }
    let message = changed("mxfp8", "norm", 7);
    assert!(
        message.contains("'norm' differs first at byte 7: 0x")
            && message.trim_end().ends_with(" in in.safetensors"),
        "{message}"
    );
}

#[test]
fn another_source_is_found() {
    let bench = Bench::new();
    let against = |change: &dyn Fn(&mut Vec<Tensor>)| {
        bench.write("in.safetensors", &model());
        bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
        rewrite(&bench, "in.safetensors", change);
        bench.rejected(1, VERIFY)
    };
    let message = against(&|model| of(model, "a.b").bytes[9 * 64 * 2 + 1] ^= 0x80);
    assert!(
        message.contains("'a.b.columnwise_data' differs first at byte 576 (row 9, column 0"),
        "{message}"
    );
    let message = against(&|model| model.retain(|tensor| tensor.name != "a"));
    assert!(
        message.contains("'a' is in q.safetensors and not in in.safetensors"),
        "{message}"
    );
    let message = against(&|model| model.retain(|tensor| tensor.name != "norm"));
    assert!(
        message.contains("'norm' is in q.safetensors and not in in.safetensors"),
        "{message}"
    );
    let message = against(&|model| model.push(matrix("new", &[4], 9)));
    assert!(
        message.contains("'new' is in in.safetensors and not in q.safetensors"),
        "{message}"
    );
    let message = against(&|model| of(model, "a").shape = vec![64, 33]);
    assert!(
        message.contains("'a' was F32 [33, 64]") && message.contains("is F32 [64, 33]"),
        "{message}"
    );
    let message = against(&|model| of(model, "norm").shape = vec![3, 11]);
    assert!(
        message.contains("'norm' is F32 [33] in q.safetensors and F32 [3, 11] in"),
        "{message}"
    );
}

#[test]
fn a_tensor_that_the_file_lacks() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
    rewrite(&bench, "q.safetensors", |tensors| {
        tensors.retain(|tensor| tensor.name != "norm");
    });
    let message = bench.rejected(1, VERIFY);
    assert!(
        message.contains("'norm' is in in.safetensors and not in q.safetensors"),
        "{message}"
    );
    rewrite(&bench, "q.safetensors", |tensors| {
        tensors.retain(|tensor| tensor.name != "a.rowwise_data");
    });
    let message = bench.rejected(2, VERIFY);
    assert!(message.contains("'a.rowwise_data' is missing"), "{message}");
}

#[test]
fn a_delayed_scale_must_make_sense() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    for (recipe, scale) in [
        ("fp8-delayed", "-2.0"),
        ("fp8-delayed", "1e300"),
        ("mxfp8", "2.0"),
    ] {
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors --recipe {recipe}"
        ));
        let added = |key: &str, value: &str| {
            if key == "lowp.tensor.a" {
                value.replacen('{', &format!("{{\"delayed_scale\": {scale}, "), 1)
            } else {
                value.to_owned()
            }
        };
        rewrite_with(&bench, "q.safetensors", |_| {}, added);
        let message = bench.rejected(2, VERIFY);
        let expected = format!("has no delayed scale {}", scale.trim_end_matches(".0"));
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn arguments_that_make_no_sense() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
    let message = bench.rejected(2, "verify q.safetensors q.safetensors --device cpu");
    assert!(message.contains("add --source MODEL"), "{message}");
    let absent = bench.rejected(2, "verify q.safetensors --source absent.safetensors");
    assert!(
        absent.contains("cannot read absent.safetensors"),
        "{absent}"
    );
    for args in [
        "verify q.safetensors",
        "verify q.safetensors q.safetensors --source in.safetensors",
        "verify q.safetensors --source in.safetensors --device gpu",
    ] {
        assert_eq!(bench.lowp(args).status.code(), Some(2), "{args}");
    }
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_device_that_this_build_lacks_is_no_other() {
    let bench = Bench::new();
    bench.write("in.safetensors", &model());
    bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
    let message = bench.rejected(2, &format!("{VERIFY} --device cuda"));
    assert!(message.contains("built without CUDA"), "{message}");
}

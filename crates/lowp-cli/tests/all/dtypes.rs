//! `--dtypes`: what codes and 8-bit scales are called in a file.

use crate::support::{Bench, matrix};

/// Codes are called what they are, unless bytes are asked for, and every command takes either.
#[test]
fn dtypes_of_codes() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[matrix("w", &[2, 24, 64], 1), matrix("odd", &[32, 31], 2)],
    );
    for (recipe, expected) in [
        (
            "nvfp4-2d --usage rowwise",
            [
                "w.rowwise_data F4 [48, 64]",
                "w.rowwise_scale_inv F8_E4M3 [128, 4]",
            ],
        ),
        (
            "nvfp4-2d --usage columnwise --scales compact",
            [
                "w.columnwise_data F4 [64, 48]",
                "w.columnwise_scale_inv F8_E4M3 [4, 3]",
            ],
        ),
        (
            "mxfp8 --usage columnwise --scales swizzled",
            [
                "w.columnwise_data F8_E4M3 [48, 64]",
                "w.columnwise_scale_inv F8_E8M0 [512]",
            ],
        ),
        (
            "mxfp8 --usage rowwise --format e5m2",
            [
                "w.rowwise_data F8_E5M2 [48, 64]",
                "w.rowwise_scale_inv F8_E8M0 [128, 4]",
            ],
        ),
        (
            "fp8-block --usage rowwise",
            [
                "w.rowwise_data F8_E4M3 [48, 64]",
                "w.rowwise_scale_inv F32 [1, 4]",
            ],
        ),
    ] {
        let quantize = format!("quantize in.safetensors --skip-unsupported --recipe {recipe}");
        bench.done(&format!("{quantize} -o native.safetensors"));
        bench.done(&format!("{quantize} -o u8.safetensors --dtypes u8"));
        let [native, u8s] = ["native.safetensors", "u8.safetensors"].map(|name| bench.read(name));
        assert_eq!(native.metadata, u8s.metadata);
        let mut lines: Vec<String> = native
            .tensors
            .iter()
            .filter(|(name, _)| name.starts_with("w.") && !name.ends_with("amax"))
            .map(|(name, (dtype, shape, _))| format!("{name} {dtype} {shape:?}"))
            .collect();
        lines.sort();
        assert_eq!(lines, expected);
        for (name, (_, _, bytes)) in &native.tensors {
            assert!(u8s.tensors[name].2 == *bytes, "{name}");
        }
        let message = bench.rejected(1, "verify native.safetensors u8.safetensors");
        assert!(message.contains(" is F"), "{message}");
        let usage = if recipe.contains("columnwise") {
            "columnwise"
        } else {
            "rowwise"
        };
        for kind in ["native", "u8"] {
            bench.done(&format!(
                "verify {kind}.safetensors --source in.safetensors"
            ));
            bench.done(&format!(
                "dequantize {kind}.safetensors -o {kind}-d.safetensors --usage {usage}"
            ));
            bench.done(&format!(
                "inspect {kind}.safetensors --reference in.safetensors"
            ));
            bench.done(&format!(
                "import {kind}.safetensors -o {kind}-i.safetensors"
            ));
            bench.done(&format!(
                "import {kind}.safetensors -o {kind}-u.safetensors --dtypes u8"
            ));
            bench.done(&format!("verify {kind}-i.safetensors native.safetensors"));
            bench.done(&format!("verify {kind}-u.safetensors u8.safetensors"));
            if usage == "rowwise" {
                bench.done(&format!("export {kind}.safetensors -o {kind}-te --to te"));
            }
        }
        bench.done("verify native-d.safetensors u8-d.safetensors");
        if usage == "rowwise" {
            bench.done("verify native-te u8-te");
            std::fs::remove_dir_all(bench.path("native-te")).expect("a folder");
            std::fs::remove_dir_all(bench.path("u8-te")).expect("a folder");
        }
        bench.done(&format!(
            "shard in.safetensors -o ranks --world-size 2 --skip-unsupported --recipe {recipe}"
        ));
        bench.done("unshard ranks -o native-r.safetensors");
        bench.done("unshard ranks -o u8-r.safetensors --dtypes u8");
        bench.done("verify native-r.safetensors native.safetensors");
        bench.done("verify u8-r.safetensors u8.safetensors");
        std::fs::remove_dir_all(bench.path("ranks")).expect("a folder");
    }
}

//! Tensors of no rows or no columns through the file commands.

use crate::support::{Bench, matrix, recipes};
use safetensors::Dtype;

#[test]
fn tensors_without_elements() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[
            matrix("rows", &[0, 64], 1),
            matrix("cols", &[4, 0], 2),
            matrix("v", &[0], 3),
        ],
    );
    for recipe in recipes() {
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors --recipe {recipe}"
        ));
        bench.done("dequantize q.safetensors -o d.safetensors");
        let found = bench.read("d.safetensors");
        assert_eq!(found.tensors["rows"].1, [0, 64]);
        assert_eq!(found.tensors["cols"].1, [4, 0]);
        bench.done("inspect q.safetensors --reference in.safetensors");
    }
}

/// What each line has of its own is there for lines without elements: shapes are those of any other tensor.
#[test]
fn lines_without_elements_have_their_scales() {
    let bench = Bench::new();
    let tensors = [("rows", [0, 64]), ("cols", [4, 0])];
    bench.write(
        "in.safetensors",
        &tensors.map(|(name, shape)| matrix(name, &shape, 1)),
    );
    for (options, fields) in [
        ("fp8-rowwise", ["rowwise_scale_inv", "columnwise_scale_inv"]),
        ("nvfp4-1d --row-scaled", ["amax", "amax_columnwise"]),
    ] {
        let options = format!("--recipe {options}");
        bench.done(&format!(
            "quantize in.safetensors -o q.safetensors {options}"
        ));
        let found = bench.read("q.safetensors");
        for (name, shape) in tensors {
            for (field, lines) in fields.iter().zip(shape) {
                let name = format!("{name}.{field}");
                let (dtype, found, bytes) = &found.tensors[&name];
                let expected = match field.starts_with("amax") {
                    true => vec![lines],
                    false => vec![lines, 1],
                };
                assert_eq!((*dtype, found), (Dtype::F32, &expected), "{name}");
                // As of a line of zeros.
                let value = if field.starts_with("amax") { 0f32 } else { 1.0 };
                assert_eq!(*bytes, value.to_le_bytes().repeat(lines), "{name}");
            }
        }
        bench.done("verify q.safetensors --source in.safetensors");
        bench.done("dequantize q.safetensors -o d.safetensors");
        bench.done("verify in.safetensors d.safetensors");
        bench.done(&format!(
            "quantize in.safetensors -o flat.safetensors --flat-cuts 0 {options}"
        ));
        bench.done("verify q.safetensors flat.safetensors");
        for world in [1, 3] {
            bench.done(&format!(
                "shard in.safetensors -o ranks{world} --world-size {world} {options}"
            ));
            bench.done(&format!("unshard ranks{world} -o u.safetensors"));
            bench.done("verify q.safetensors u.safetensors");
            std::fs::remove_dir_all(bench.path(&format!("ranks{world}"))).expect("a folder");
        }
    }
    // A file states any number of lines.
    bench.write("in.safetensors", &[matrix("w", &[0, 1 << 30], 1)]);
    for command in ["quantize", "shard --world-size 2"] {
        let message = bench.rejected(
            2,
            &format!("{command} in.safetensors -o out --recipe fp8-rowwise"),
        );
        assert!(
            message.contains("0x1073741824 has no elements"),
            "{message}"
        );
        assert!(message.contains("--ignore this one"), "{message}");
    }
    bench.done("quantize in.safetensors -o out.safetensors --recipe fp8-rowwise --usage rowwise");
    bench.done("quantize in.safetensors -o out.safetensors --recipe mxfp8");
}

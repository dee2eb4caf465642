//! Every golden vector through `lowp quantize` and `lowp dequantize`.

use crate::support::{Bench, Contents, tensor};
use std::path::PathBuf;

/// The golden name of each recipe, and the options that make it.
const RECIPES: [(&str, &[&str]); 11] = [
    ("delayed_e4m3", &["--recipe", "fp8-delayed"]),
    (
        "delayed_e5m2",
        &["--recipe", "fp8-delayed", "--format", "e5m2"],
    ),
    ("current_e4m3", &["--recipe", "fp8-current"]),
    (
        "current_e5m2",
        &["--recipe", "fp8-current", "--format", "e5m2"],
    ),
    ("current_e4m3_pow2", &["--recipe", "fp8-current", "--pow2"]),
    ("mxfp8_e4m3", &["--recipe", "mxfp8"]),
    ("mxfp8_e5m2", &["--recipe", "mxfp8", "--format", "e5m2"]),
    (
        "mxfp8_e4m3_floor",
        &["--recipe", "mxfp8", "--scale-mode", "ocp-floor"],
    ),
    ("mxfp8_2d_e4m3", &["--recipe", "mxfp8-2d"]),
    ("nvfp4_1d", &["--recipe", "nvfp4-1d"]),
    ("nvfp4_2d", &["--recipe", "nvfp4-2d"]),
];

fn golden_files() -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("golden files")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| {
            let name = path.file_name().expect("a name").to_string_lossy();
            name.starts_with(|c: char| c.is_ascii_digit()) && name.ends_with(".safetensors")
        })
        .collect();
    files.sort();
    files
}

/// Compares the fields of `T` with the golden tensors of `prefix`; returns how many there were.
fn compare(golden: &Contents, prefix: &str, found: &Contents, swizzled: bool, what: &str) -> usize {
    let mut compared = 0;
    for (name, (dtype, shape, bytes)) in &golden.tensors {
        let Some(part) = name
            .strip_prefix(prefix)
            .and_then(|rest| rest.strip_prefix('.'))
        else {
            continue;
        };
        let fields: &[&str] = match (part, swizzled) {
            ("rowwise_data" | "columnwise_data" | "amax", _) => &[part],
            ("rowwise_scale_inv" | "columnwise_scale_inv", false) => &[part],
            ("rowwise_scale_inv_swizzled", true) => &["rowwise_scale_inv"],
            ("columnwise_scale_inv_swizzled", true) => &["columnwise_scale_inv"],
            ("scale_inv", _) => &["rowwise_scale_inv", "columnwise_scale_inv"],
            ("amax_columnwise", _) => &["amax"],
            _ => &[],
        };
        for field in fields {
            let (d, s, b) = &found.tensors[&format!("T.{field}")];
            assert_eq!((d, s), (dtype, shape), "{what} {name}");
            let differs = b.iter().zip(bytes).position(|(x, y)| x != y);
            assert_eq!(differs, None, "{what} {name}: first different byte");
            compared += 1;
        }
    }
    compared
}

#[test]
fn every_golden_vector() {
    let bench = Bench::new();
    let mut compared = 0;
    for path in golden_files() {
        let golden = Contents::read(&path);
        let (dtype, shape, bytes) = &golden.tensors["x"];
        bench.write(
            "in.safetensors",
            &[tensor("T", *dtype, shape, bytes.clone())],
        );
        let given = golden.metadata["delayed_scale"].clone();
        for (prefix, options) in RECIPES {
            if !golden
                .tensors
                .contains_key(&format!("{prefix}.rowwise_data"))
            {
                continue;
            }
            let what = format!("{} {prefix}", path.display());
            for form in ["padded", "swizzled"] {
                let mut args = vec![
                    "quantize",
                    "in.safetensors",
                    "-o",
                    "out.safetensors",
                    "--scales",
                    form,
                    "--dtypes",
                    "u8",
                ];
                args.extend(options);
                if prefix.starts_with("delayed") {
                    args.extend(["--delayed-scale", &given]);
                }
                bench.done(&args);
                let found = bench.read("out.safetensors");
                let same = compare(&golden, prefix, &found, form == "swizzled", &what);
                assert!(same >= 2, "{what}: only {same} tensors compared");
                compared += same;
            }
            if let Some((_, shape, bytes)) = golden.tensors.get(&format!("{prefix}.dequantized")) {
                bench.done("dequantize out.safetensors -o back.safetensors --usage rowwise");
                let back = bench.read("back.safetensors");
                assert_eq!(&back.tensors["T"].1, shape, "{what}");
                let word = |b: &[u8]| f32::from_le_bytes(b.try_into().expect("4 bytes"));
                for (i, (x, y)) in back.bytes("T").chunks(4).zip(bytes.chunks(4)).enumerate() {
                    let (x, y) = (word(x), word(y));
                    assert!(
                        x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan()),
                        "{what} {i}: {x} {y}"
                    );
                }
                compared += 1;
            }
        }
    }
    assert!(compared > 900, "only {compared} golden tensors compared");
}

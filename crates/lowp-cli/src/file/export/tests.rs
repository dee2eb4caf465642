//! Values are decoded in bands, whatever the size of a tensor.

use crate::file::tests::hostile::{run, text};
use std::fs;
use std::path::Path;

const ROWS: usize = 2048;
const COLS: usize = 4096;
/// Bytes of the values of the tensor: more than a command may hold.
const WHOLE: usize = ROWS * COLS * size_of::<f32>();

fn model(path: &Path) {
    let header = format!(
        r#"{{"w.weight":{{"dtype":"F32","shape":[{ROWS},{COLS}],"data_offsets":[0,{WHOLE}]}}}}"#
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    let value = |i: usize| (i.wrapping_mul(0x9e37_79b9) % 4099) as f32 - 2000.0;
    file.extend((0..ROWS * COLS).flat_map(|i| value(i).to_le_bytes()));
    fs::write(path, file).expect("a file");
}

/// The data of the only tensor of a file.
fn data(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).expect("a file");
    let header = u64::from_le_bytes(*bytes.first_chunk().expect("a length"));
    bytes[8 + usize::try_from(header).expect("a length")..].to_vec()
}

/// `export` and `import` that decode hold some rows of a tensor and its scales ([`run`] looks after what is held), and write what
/// `dequantize` does.
#[test]
fn values_are_decoded_in_bands() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let [source, q, plain, out] =
        ["in", "q", "d", "out"].map(|name| at(&format!("{name}.safetensors")));
    let (values, hub) = (at("values"), at("hub"));
    model(&source);
    let mut forms = 0;
    for recipe in ["mxfp8", "fp8-block", "nvfp4-2d"] {
        let done = |words: &[&str]| assert!(run(words), "{words:?}");
        done(&[
            "quantize",
            text(&source),
            "-o",
            text(&q),
            "--recipe",
            recipe,
        ]);
        done(&[
            "dequantize",
            text(&q),
            "-o",
            text(&plain),
            "--dtype",
            "bf16",
        ]);
        let expected = data(&plain);
        done(&["export", text(&q), "-o", text(&values), "--to", "bf16"]);
        assert!(
            data(&values.join("model.safetensors")) == expected,
            "{recipe}"
        );
        fs::remove_dir_all(&values).expect("a folder");
        done(&["import", text(&q), "-o", text(&out), "--to", "bf16"]);
        assert!(data(&out) == expected, "{recipe}");
        for target in ["compressed-tensors", "modelopt", "deepseek"] {
            if run(&["export", text(&q), "-o", text(&hub), "--to", target]) {
                done(&["import", text(&hub), "-o", text(&out), "--to", "bf16"]);
                assert!(data(&out) == expected, "{recipe} of {target}");
                fs::remove_dir_all(&hub).expect("a folder");
                forms += 1;
            }
        }
    }
    assert!(forms > 3, "{forms} forms were read");
}

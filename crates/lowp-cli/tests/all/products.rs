//! `lowp recipes --device`: the table of products.

use std::process::Command;

fn lowp(args: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_lowp"))
        .args(args)
        .output()
        .expect("lowp runs");
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

#[test]
fn products_by_recipe_and_device() {
    let mut tables = String::new();
    for device in ["sm_90", "sm_89", "sm_100", "sm_110", "sm_120", "cpu"] {
        let (done, table) = lowp(&["recipes", "--device", device]);
        assert!(done, "{table}");
        tables += &format!("{device}\n{table}\n");
    }
    insta::assert_snapshot!(tables);
}

#[test]
fn what_is_no_device_is_an_error() {
    let (done, text) = lowp(&["recipes", "--device", "sm_x"]);
    assert!(!done && text.contains("Hopper is sm_90"), "{text}");
    let (done, text) = lowp(&["recipes", "--device", "gpu"]);
    assert!(!done && text.contains("devices are"), "{text}");
}

/// Options of GPUs say so where there is none; nothing runs on the CPU instead.
#[test]
fn options_of_gpus_need_one() {
    let (done, text) = lowp(&["train", "--steps", "1", "--profile"]);
    assert!(
        !done && text.contains("--profile only applies to GPUs"),
        "{text}"
    );
}

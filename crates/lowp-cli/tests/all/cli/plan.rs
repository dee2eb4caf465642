//! `lowp plan`: tables and JSON of one weight; `model.rs` has those of models.

mod gpus;
mod model;
mod states;

use super::{lowp, recipes, stdout};
use serde_json::Value;

fn plan(args: &str) -> String {
    stdout(&format!("plan {args}").split(' ').collect::<Vec<_>>())
}

#[test]
fn every_recipe() {
    let plan = |name: &String| plan(&format!("--recipe {name} --shape 136x160 --world-size 3"));
    let plans: Vec<String> = recipes().iter().map(plan).collect();
    insta::assert_snapshot!(plans.join("\n\n"));
}

#[test]
fn options() {
    let plans = [
        "--shape 100x64 --world-size 3 --usage rowwise",
        "--shape 100x64 --world-size 40 --usage columnwise",
        "--shape 100x64 --world-size 3 --reshard-after-forward false",
        "--shape 100x64 --world-size 6 --reshard-after-forward 3",
        "--recipe fp8-current --format e5m2 --shape 100x64 --world-size 1",
        "--recipe nvfp4-1d+tensor-scale --shape 2x50x64 --world-size 3",
    ]
    .map(|args| format!("$ lowp plan {args}\n{}", plan(args)));
    insta::assert_snapshot!(plans.join("\n\n"));
}

#[test]
fn json() {
    insta::assert_snapshot!(plan(
        "--recipe nvfp4-2d --shape 40x32 --world-size 2 --json"
    ));
}

#[test]
fn json_and_tables_say_the_same() {
    for name in recipes() {
        for reshard in ["true", "false", "3"] {
            let args = format!(
                "--recipe {name} --shape 136x160 --world-size 6 --reshard-after-forward {reshard}"
            );
            let (text, json) = (plan(&args), plan(&format!("{args} --json")));
            let json: Value = serde_json::from_str(&json).expect("JSON");
            let total = format!("total: {} bytes on the wire", json["wire_bytes"]);
            assert!(text.contains(&total), "{name}: {total}\n{text}");
            let phases = json["phases"].as_array().expect("phases");
            let sum: u64 = phases
                .iter()
                .filter_map(|phase| phase["wire_bytes"].as_u64())
                .sum();
            assert_eq!(json["wire_bytes"], sum);
            assert_eq!(json["rows"].as_array().map(Vec::len), Some(6));
        }
    }
}

#[test]
fn errors() {
    let mut text = String::new();
    for args in [
        "--shape 4096x1000 --world-size 8",
        "--recipe nvfp4-2d --shape 64x24 --world-size 2",
        "--recipe nope --shape 64x64 --world-size 2",
        "--recipe mxfp8+nope --shape 64x64 --world-size 2",
        "--recipe fp8-current+hybrid --format e4m3 --shape 64x64 --world-size 2",
        "--recipe nvfp4-2d --format e4m3 --shape 64x64 --world-size 2",
        "--shape 64x64 --world-size 0",
        "--shape 64x64 --world-size 99999999999",
        "--shape 64x64 --world-size two",
        "--shape 64 --world-size 2",
        "--shape 64xK --world-size 2",
        "--shape 0x64 --world-size 2",
        "--shape 16777216x33554432 --world-size 2",
        "--shape 4294967296x4294967296 --world-size 2",
        "--shape 64x64 --world-size 2 --usage sideways",
        "--shape 64x64 --world-size 2 --usage rowwise --reshard-after-forward false",
        "--shape 64x64 --world-size 12 --reshard-after-forward 8",
        "--shape 64x64 --world-size 2 --reshard-after-forward 0",
        "--shape 64x64",
    ] {
        let all: Vec<&str> = ["plan"].into_iter().chain(args.split(' ')).collect();
        let outcome = lowp(&all);
        assert_eq!(
            (outcome.code, outcome.stdout.as_str()),
            (Some(2), ""),
            "{args}"
        );
        text += &format!("$ lowp plan {args}\n{}\n", outcome.stderr);
    }
    insta::assert_snapshot!(text);
}

//! `lowp plan --model --device cuda`: what a GPU holds.

use super::model::{check_sums, experts, file, llama, plan_json};
use crate::cli::stdout;
use serde_json::Value;
use std::fs;

/// What the pool of an H100 measured in `lowp train --params 1b --vocab 32768 --steps 5` (docs/notes/training-on-gpus.md), in bytes of rank 0.
#[test]
fn gpus_hold_what_was_measured() {
    for (options, measured) in [
        ("--world-size 1 --batch 16 --recipe bf16", 40_732_089_940.0),
        (
            "--world-size 1 --batch 16 --recipe fp8-current",
            37_266_174_808.0,
        ),
        (
            "--world-size 1 --batch 16 --recipe fp8-current --recompute",
            27_604_201_960.0,
        ),
        ("--world-size 2 --batch 16 --recipe bf16", 21_381_526_580.0),
        (
            "--world-size 2 --batch 16 --recipe fp8-current",
            19_649_104_184.0,
        ),
        (
            "--world-size 4 --batch 16 --seq 2048 --recipe bf16",
            22_834_810_996.0,
        ),
    ] {
        let args = format!("--model 1b --vocab 32768 --device cuda {options}");
        let planned = plan_json(&args)["device"]["total"].as_f64().expect("bytes");
        assert!(
            (planned / measured - 1.0f64).abs() < 0.001,
            "{options}: {planned} bytes planned and {measured} measured"
        );
    }
}

#[test]
fn what_a_gpu_holds_is_the_sum_of_its_parts() {
    let (dir, config) = file("llama.json", &llama());
    let experts_file = dir.path().join("experts.json");
    fs::write(&experts_file, experts().to_string()).expect("a file");
    for args in [
        "--model 1b --vocab 32768 --world-size 8 --batch 64 --recipe nvfp4-1d --keep-bf16 block0.*",
        "--model 125m --arch llama --mesh 2x2 --accumulate 2 --grad-wire bf16 --no-cudnn --no-prefetch",
        "--model 125m --world-size 4 --sharding zero1 --recompute",
        &format!("--model {config} --world-size 8"),
        &format!("--model {config} --world-size 8 --ranks-per-node 4"),
        &format!("--model {} --world-size 8", experts_file.display()),
    ] {
        let plan = plan_json(&format!("{args} --device cuda"));
        check_sums(&plan);
        let number = |key: &str| plan["device"][key].as_u64().unwrap_or(0);
        let parts = [
            "variables_gathered",
            "staging",
            "activations",
            "in_turn",
            "workspaces",
        ];
        let parts: u64 = parts.iter().map(|key| number(key)).sum();
        let parameters = plan["memory"]["total"].as_u64().expect("a number");
        assert_eq!(number("total"), parameters + parts, "{args}");
        assert_eq!(plan["memory"]["decoded"], 0, "{args}");
        let unknown = args.contains("experts.json");
        assert_eq!(plan["device"]["activations"].is_null(), unknown, "{args}");
        // GPUs of a node read gradients of f32 as they are.
        let is_read = !args.contains("--grad-wire bf16") && !args.contains("--ranks-per-node");
        assert_eq!(number("staging") == 0, is_read, "{args}");
    }
}

/// The first position that a token sees and, for cuDNN, what is added to its scores.
#[test]
fn masks_of_documents_are_counted() {
    let [tokens, seq] = [4 * 512, 512];
    for (options, mask) in [("", 2 * tokens * seq), ("--no-cudnn", 0)] {
        let model = format!("--model 125m --world-size 2 --batch 8 --device cuda {options}");
        let masked = format!("{model} --mask-documents");
        let [plain, masked] = [&model, &masked].map(|args| plan_json(args)["device"].take());
        for key in ["activations", "total"] {
            let [plain, masked] = [&plain, &masked].map(|device| device[key].as_u64());
            assert_eq!(
                masked,
                plain.map(|bytes| bytes + 4 * tokens + mask),
                "{options} {key}"
            );
        }
    }
}

/// Masters and states on the host are no bytes of the GPU, and the rest of the plan stays.
#[test]
fn masters_and_states_on_the_host() {
    // Passes over masters, ranks of a node, and bytes of a parameter on nodes that have whole replicas of f32.
    for (options, passes, ranks, each) in [
        ("--recipe mxfp8-2d --world-size 8", 1, 8, Some(12)),
        (
            "--recipe nvfp4-2d --world-size 8 --ranks-per-node 4",
            2,
            4,
            None,
        ),
        (
            "--recipe fp8-current --mesh 2x1 --sharding zero1",
            2,
            2,
            Some(24),
        ),
        (
            "--recipe mxfp8 --world-size 2 --sharding zero1",
            3,
            2,
            Some(12),
        ),
        (
            "--recipe mxfp8 --world-size 1 --optimizer-state master=bf16,exp_avg=fp8,exp_avg_sq=fp8",
            1,
            1,
            None,
        ),
        ("--recipe mxfp8 --world-size 2 --optimizer muon", 1, 2, None),
    ] {
        let args = format!("--model 1b --vocab 32768 --device cuda {options}");
        let [device, host] =
            ["", " --offload-optimizer"].map(|more| plan_json(&format!("{args}{more}")));
        for same in ["memory", "operations", "by_rank", "bf16", "left_out"] {
            assert_eq!(device[same], host[same], "{options}: {same}");
        }
        assert!(device["host"].is_null());
        let number = |plan: &Value, part: &str, key: &str| plan[part][key].as_u64().expect(key);
        let of = |key: &str| number(&host, "host", key);
        let saved = number(&device, "device", "total") - number(&host, "device", "total");
        let locked = of("bytes_per_rank");
        assert_eq!([saved, of("written_per_step")], [locked; 2], "{options}");
        let parameters = ["linear_parameters", "variable_parameters"];
        let parameters: u64 = parameters
            .iter()
            .map(|key| number(&host, "model", key))
            .sum();
        let node = of("bytes_per_node");
        assert!(
            (locked..=ranks * locked).contains(&node),
            "{options}: {node}"
        );
        assert!(
            each.is_none_or(|bytes| node == bytes * parameters),
            "{options}: {node}"
        );
        let masters = number(&host, "memory", "masters");
        let again = (passes - 1) * masters;
        assert_eq!(of("read_per_step"), locked + again, "{options}");
        let linear = masters + number(&host, "memory", "states");
        assert!(locked > linear, "{options}: variables have masters, too");
    }
    let args = "plan --model 1b --vocab 32768 --device cuda --world-size 8 --recipe mxfp8-2d --offload-optimizer";
    let text = stdout(&args.split(' ').collect::<Vec<_>>());
    let lines: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.starts_with("total"))
        .take_while(|line| !line.starts_with("No other"))
        .collect();
    insta::assert_snapshot!(lines.join("\n"));
}

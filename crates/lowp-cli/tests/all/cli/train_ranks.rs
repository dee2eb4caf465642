//! `lowp train` over ranks: results that depend on no number of ranks, mesh or policy, and the bytes of the plan.

use super::train::{number, runs, text};
use super::{stdout, train_json};
use crate::support::exhaustive;
use serde_json::Value;
use std::collections::BTreeMap;

#[test]
fn ranks_agree() {
    let mut losses: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    // A sum in another order can change the rounding of a code, so a mean over few tokens would tell the ranks apart.
    let args = "--compare all --steps 6 --batch 8 --eval-batches 16 --world-size";
    let worlds = ["1", "3", "4"];
    for ranks in &worlds[..if exhaustive() { 3 } else { 2 }] {
        let document = train_json(&args.split(' ').chain([*ranks]).collect::<Vec<_>>());
        for run in runs(&document) {
            let recipe = text(run, "recipe").to_owned();
            losses
                .entry(recipe)
                .or_default()
                .push(number(run, "val_loss"));
        }
    }
    for (recipe, losses) in losses {
        let spread = losses
            .iter()
            .fold(0f64, |m, loss| m.max((loss - losses[0]).abs()));
        assert!(spread < 1e-3, "{recipe}: {losses:?}");
    }
}

#[test]
fn gradients_in_bf16_change_little() {
    let [f32, bf16] = ["f32", "bf16"].map(|wire| {
        let document = train_json(&["--steps", "10", "--grad-wire", wire]);
        number(&runs(&document)[1], "val_loss")
    });
    assert!(f32 != bf16 && (f32 - bf16).abs() < 0.01, "{f32} {bf16}");
}

/// Bytes of the linear layers of the tiny model by `lowp plan`: on the wire per step, and resident.
fn planned(recipe: &str, shards: usize, reshard: &str) -> [u64; 2] {
    let mut bytes = [0; 2];
    for shape in ["192x64", "64x64", "256x64", "64x256"] {
        let world = shards.to_string();
        let args = [
            "plan",
            "--recipe",
            recipe,
            "--shape",
            shape,
            "--world-size",
            &world,
        ];
        let args = [&args[..], &["--reshard-after-forward", reshard, "--json"]].concat();
        let plan: Value = serde_json::from_str(&stdout(&args)).expect("JSON");
        bytes[0] += plan["wire_bytes"].as_u64().expect("bytes");
        let ranks = plan["rank_stored_bytes"]
            .as_array()
            .expect("one number per rank");
        bytes[1] += ranks.iter().filter_map(Value::as_u64).sum::<u64>();
    }
    bytes
}

#[test]
fn bytes_are_those_of_the_plan() {
    for (mesh, shards) in [("2x2", 2), ("1x3", 3)] {
        for reshard in ["true", "false"] {
            let of_all = ["--compare", "all", "--steps", "2", "--mesh", mesh];
            let args = [&of_all[..], &["--reshard-after-forward", reshard]].concat();
            for run in runs(&train_json(&args)) {
                let recipe = text(run, "recipe");
                let bytes = |key: &str| run[key].as_u64().expect("bytes");
                let counted = bytes("wire_bytes_per_step");
                let what = format!("{recipe} on {mesh}, reshard {reshard}");
                assert_eq!(counted, bytes("wire_bytes_formula"), "{what}");
                // Messages of unequal pieces are padded by at most an eighth.
                let [sent, resident] = planned(recipe, shards, reshard);
                assert!(sent <= counted && 8 * counted <= 9 * sent, "{what}");
                assert_eq!(bytes("resident_weight_bytes"), resident, "{what}");
            }
        }
    }
}

#[test]
fn resharding_does_not_change_the_result() {
    let [one, other] = ["true", "false"].map(|reshard| {
        train_json(&[
            "--compare",
            "all",
            "--steps",
            "3",
            "--mesh",
            "1x3",
            "--reshard-after-forward",
            reshard,
        ])
    });
    for (one, other) in runs(&one).iter().zip(runs(&other)) {
        for key in ["recipe", "train_loss", "val_loss"] {
            assert_eq!(one[key], other[key], "{key}");
        }
    }
}

/// ZeRO-1 trains the same bits; it keeps full weights and sends each code once per step.
#[test]
fn full_weights_do_not_change_the_result() {
    let meshes = ["2x2", "1x3", "1x2", "1x1"];
    for mesh in &meshes[..if exhaustive() { 4 } else { 2 }] {
        let [fsdp, zero1] = ["fsdp", "zero1"].map(|sharding| {
            let all = ["--compare", "all", "--steps", "3", "--mesh", mesh];
            train_json(&[&all[..], &["--sharding", sharding]].concat())
        });
        assert_eq!(zero1["config"]["sharding"], "zero1");
        for (fsdp, zero1) in runs(&fsdp).iter().zip(runs(&zero1)) {
            for key in ["recipe", "train_loss", "val_loss", "master_weight_bytes"] {
                assert_eq!(fsdp[key], zero1[key], "{key}, {mesh}");
            }
            let [less, more] = [fsdp, zero1].map(|run| number(run, "resident_weight_bytes"));
            assert!(more >= less, "{}", text(zero1, "recipe"));
            let wire = "wire_bytes_per_step";
            assert!(
                number(zero1, wire) <= number(fsdp, wire),
                "{}",
                text(zero1, "recipe")
            );
        }
    }
}

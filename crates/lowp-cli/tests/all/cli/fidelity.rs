//! The fidelity bars of docs/fidelity.md, in a reduced form that every test run takes. With
//! `LOWP_EXHAUSTIVE=1` the default model runs its 200 steps; one seed must meet
//! the bar that docs/fidelity.md states for the mean of three.

use super::{stdout, tiny};
use crate::support::exhaustive;
use serde_json::Value;

/// Gap to fp32 in percent that a run may have, by the width of its elements.
fn bar(recipe: &Value, runs: &[Value]) -> f64 {
    // Stored bytes per weight tell how wide an element is, without a list of names.
    let run = runs
        .iter()
        .find(|run| run["recipe"] == *recipe)
        .expect("a run");
    let bytes = run["resident_weight_bytes"].as_f64().expect("bytes");
    let wire = run["wire_bytes_per_step"].as_f64().expect("bytes");
    let weights = run["parameters"].as_f64().expect("a count");
    // Per gather: two phases, or one buffer per orientation.
    let per_element = bytes.min(wire / 2.0) / weights;
    if per_element < 0.9 { 1.0 } else { 0.5 }
}

#[test]
fn every_recipe_stays_close_to_fp32() {
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("runs.json");
    let json = json.to_str().expect("UTF-8");
    let args: Vec<String> = if exhaustive() {
        let args = ["train", "--compare", "all", "--json", json];
        args.map(str::to_owned).to_vec()
    } else {
        tiny(&[
            "--compare",
            "all",
            "--steps",
            "40",
            "--seq",
            "64",
            "--eval-batches",
            "16",
            "--json",
            json,
        ])
    };
    stdout(&args);
    let text = std::fs::read_to_string(json).expect("results");
    let results: Value = serde_json::from_str(&text).expect("JSON");
    let runs = results["runs"].as_array().expect("runs");
    let mut recipes: Vec<&Value> = Vec::new();
    for run in runs {
        if !recipes.contains(&&run["recipe"]) {
            recipes.push(&run["recipe"]);
        }
    }
    assert!(recipes.len() >= 7, "{recipes:?}");
    for recipe in &recipes[1..] {
        let gaps: Vec<f64> = runs
            .iter()
            .filter(|run| run["recipe"] == **recipe)
            .map(|run| run["gap_percent"].as_f64().expect("a gap"))
            .collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!(
            mean <= bar(recipe, runs),
            "{recipe}: mean gap {mean:+.2}% of {gaps:?}"
        );
    }
}

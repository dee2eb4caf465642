//! `lowp losses`: tables and pictures of recorded runs.

use super::{lowp, stdout};
use serde_json::json;
use std::path::PathBuf;

fn files(folder: &tempfile::TempDir) -> Vec<PathBuf> {
    let run = |recipe: &str, seed: u64, last: f64| {
        let losses = [Some(last + 1.0), None, Some(last)];
        json!({"recipe": recipe, "seed": seed, "train_loss": losses, "val_loss": last})
    };
    let documents = [
        json!({"runs": [run("fp32", 0, 2.0), run("mxfp8", 0, 2.01)], "config": {"dim": 8, "seed": 0}}),
        json!({"runs": [run("mxfp8", 1, 4.08), run("mxfp8", 5, 9.0)], "config": {"dim": 8, "seed": 1}}),
        json!({"runs": [run("fp32", 1, 4.0), run("<bf16>", 7, 3.0)], "config": {"dim": 8, "seed": 1}}),
    ];
    let write = |(index, document): (usize, &serde_json::Value)| {
        let path = folder.path().join(format!("{index}.json"));
        std::fs::write(&path, document.to_string()).expect("a file");
        path
    };
    documents.iter().enumerate().map(write).collect()
}

#[test]
fn runs_are_compared_by_recipe_and_seed() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut args = vec![PathBuf::from("losses")];
    args.extend(files(&folder));
    let picture = folder.path().join("losses.svg");
    args.extend([PathBuf::from("--svg"), picture.clone()]);
    insta::assert_snapshot!("losses_table", stdout(&args));
    let svg = std::fs::read_to_string(&picture).expect("a picture");
    // Three lines of losses, gaps of the one that shares seeds, and names that are escaped.
    assert_eq!(svg.matches("points=\"\"").count(), 1);
    assert!(svg.contains("&lt;bf16&gt;") && !svg.contains("<bf16>") && !svg.contains("NaN"));
    let last = args.len() - 1;
    let mut over = args.clone();
    over[last] = args[1].clone();
    let outcome = lowp(&over);
    assert_eq!(outcome.code, Some(2));
    assert!(
        outcome.stderr.contains("name the same path"),
        "{}",
        outcome.stderr
    );
    // A picture of losses that are not finite says so.
    let diverged = folder.path().join("diverged.json");
    let run = json!({"recipe": "fp32", "seed": 0, "train_loss": [null], "val_loss": null});
    std::fs::write(&diverged, json!({"runs": [run]}).to_string()).expect("a file");
    stdout(&[
        PathBuf::from("losses"),
        diverged,
        PathBuf::from("--svg"),
        picture.clone(),
    ]);
    let svg = std::fs::read_to_string(&picture).expect("a picture");
    assert!(svg.contains("<text ") && svg.contains("Training loss: no finite values</text>"));
    assert!(!svg.contains("<p>"), "{svg}");
    args.extend(["--baseline", "bf16"].map(PathBuf::from));
    let other = lowp(&args);
    assert_eq!(other.code, Some(2));
    insta::assert_snapshot!("losses_of_no_baseline", other.stderr);
}

#[test]
fn other_files_are_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("other.json");
    std::fs::write(&path, "{\"runs\": 1}").expect("a file");
    let other = folder.path().join("wide.json");
    std::fs::write(&other, "{\"runs\": [], \"config\": {\"dim\": 9}}").expect("a file");
    let mut args = vec![PathBuf::from("losses")];
    args.extend(files(&folder));
    args.push(other);
    let outcome = lowp(&args);
    assert_eq!(outcome.code, Some(2));
    assert!(outcome.stderr.contains("dim 9"), "{}", outcome.stderr);
    let folder = folder.path();
    for (path, text) in [
        (path, "other.json: not a result file of `lowp train --json`"),
        (folder.join("nothing.json"), "nothing.json: "),
        (folder.to_owned(), "is a directory"),
    ] {
        let outcome = lowp(&[PathBuf::from("losses"), path]);
        assert_eq!(outcome.code, Some(2), "{text}");
        assert!(outcome.stderr.contains(text), "{}", outcome.stderr);
    }
}

/// Losses per byte and per token, of other data or after other steps are not compared. Files of older programs do not say what theirs are.
#[test]
fn losses_are_of_the_same_where_it_is_known() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, key: &str, value: serde_json::Value| {
        let path = folder.path().join(name);
        let mut run = json!({"recipe": name, "seed": 0, "train_loss": [2.0], "val_loss": 2.0});
        let mut document = json!({"runs": []});
        match key {
            "steps" => run[key] = value,
            _ => document[key] = value,
        }
        document["runs"] = json!([run]);
        std::fs::write(&path, document.to_string()).expect("a file");
        path
    };
    let losses = PathBuf::from("losses");
    let old = file("fp32", "other", json!(0));
    for (key, [first, second]) in [
        ("unit", [json!("byte"), json!("token")]),
        ("data", [json!("a"), json!("b")]),
        ("steps", [json!(3), json!(40)]),
    ] {
        let one = file("mxfp8", key, first.clone());
        let other = file("bf16", key, second.clone());
        stdout(&[&losses, &old, &one]);
        let outcome = lowp(&[&losses, &old, &one, &other]);
        assert_eq!(outcome.code, Some(2));
        let (one, other) = (one.display(), other.display());
        let why = format!("{other} has {key} {second}, and {one} has {first}");
        assert!(outcome.stderr.contains(&why), "{}", outcome.stderr);
    }
    // Configurations leave defaults out. What changes no loss may differ.
    let other = file("mxfp8", "config", json!({"optimizer": "lion"}));
    let outcome = lowp(&[&losses, &old, &other]);
    let why = "has optimizer \"lion\", and ";
    assert!(outcome.stderr.contains(why), "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("fp32 has \"adamw\""),
        "{}",
        outcome.stderr
    );
    let free = json!({"eval_every": 2, "sharding": "zero1", "recompute": true});
    stdout(&[&losses, &old, &file("mxfp8", "config", free)]);
}

/// A seed that diverged is named, also one that is not counted.
#[test]
fn seeds_that_diverged_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("runs.json");
    let run = |recipe: &str, seed: u64, loss: Option<f64>| json!({"recipe": recipe, "seed": seed, "train_loss": [], "val_loss": loss});
    let runs = [
        run("fp32", 0, Some(5.0)),
        run("fp32", 1, Some(5.0)),
        run("mxfp8", 0, Some(5.5)),
        run("mxfp8", 1, None),
        run("mxfp8", 7, None),
    ];
    std::fs::write(&path, json!({"runs": runs}).to_string()).expect("a file");
    insta::assert_snapshot!(stdout(&[PathBuf::from("losses"), path]));
}

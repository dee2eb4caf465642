//! What options of `lowp train` mean for each run, and next to each other.

use super::{lowp, path, tiny, train_json};
use serde_json::{Value, json};

/// A comparison is with fp32 as it is; a run of fp32 alone has the states that are asked for.
#[test]
fn a_baseline_keeps_its_states_in_f32() {
    const BF16: &str = "exp_avg=bf16,exp_avg_sq=bf16";
    let train = |args: &[&str]| {
        let steps = ["--steps", "4", "--beta2", "0.9"];
        let document = train_json(&[&steps[..], args].concat());
        let runs = document["runs"].as_array().expect("runs");
        let found = runs
            .iter()
            .map(|run| ["train_loss", "optimizer_state"].map(|key| run[key].clone()));
        found.collect::<Vec<_>>()
    };
    let narrow = ["--optimizer-state", BF16];
    let [wide, found] = [train(&[]), train(&narrow)];
    assert_eq!(wide[0], found[0]);
    assert_ne!(wide[1][0], found[1][0]);
    let states: Vec<_> = found.into_iter().map(|[_, state]| state).collect();
    assert_eq!(states, [Value::Null, json!(BF16)]);
    let alone = train(&[&["--recipe", "fp32"], &narrow[..]].concat());
    assert_ne!(alone[0][0], wide[0][0]);
}

/// Losses are finite, as they are without the z-loss.
#[test]
fn a_run_whose_steps_are_all_skipped_is_a_failure() {
    let args = ["--no-baseline", "--steps", "2", "--z-loss", "1e38"];
    let outcome = lowp(&tiny(&args));
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    let text =
        "mxfp8, seed 0: nothing was trained, since the gradients of all 2 steps were not finite";
    assert!(outcome.stderr.contains(text), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("--z-loss"), "{}", outcome.stderr);
}

/// What a file says of another optimizer is left out, with a note.
#[test]
fn an_option_that_is_given_goes_before_keys_that_need_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("run.toml");
    let text = "steps = 2\nno_baseline = true\nbeta2 = 0.9\noptimizer = 'adamw'\n";
    std::fs::write(&file, text).expect("a file");
    let config = ["--config", &path(&file)];
    let outcome = lowp(&tiny(&[&config[..], &["--optimizer", "sgd"]].concat()));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let note = "run.toml: beta2 has no meaning with --optimizer sgd and is left out";
    assert!(outcome.stderr.contains(note), "{}", outcome.stderr);
    // A file by itself has to agree.
    std::fs::write(&file, "beta2 = 0.9\noptimizer = 'sgd'\n").expect("a file");
    assert_eq!(lowp(&tiny(&config)).code, Some(2));
}

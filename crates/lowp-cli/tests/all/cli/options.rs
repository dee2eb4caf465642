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
    // Halves are masters of weights in bf16, which a recipe may not have.
    let halves = ["--no-baseline", "--optimizer-state", "master=bf16+16"];
    for (more, state) in [
        (&[][..], Value::Null),
        (&["--keep-bf16", "*.out"], json!("master=bf16+16")),
    ] {
        assert_eq!(train(&[&halves[..], more].concat())[0][1], state);
    }
}

/// Losses are finite, as they are without the z-loss, or they are not: the option is named.
#[test]
fn a_run_that_trained_nothing_is_a_failure() {
    for (option, value, why) in [
        (
            "--z-loss",
            "1e38",
            "nothing was trained, since the gradients of all 2 steps were not finite",
        ),
        ("--weight-decay", "9e18", "training diverged"),
    ] {
        let args = ["--no-baseline", "--steps", "2", option, value];
        let outcome = lowp(&tiny(&args));
        assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
        let says = |text: &str| outcome.stderr.contains(text);
        assert!(says("mxfp8, seed 0: ") && says(why), "{}", outcome.stderr);
        assert!(says(option), "{}", outcome.stderr);
    }
}

#[test]
fn layers_that_are_wide_anyway_are_named() {
    let kept = ["--steps", "1", "--keep-bf16", "*.out", "--recipe"];
    for (recipe, noted) in [("fp32", true), ("mxfp8", false)] {
        let outcome = lowp(&tiny(&[&kept[..], &[recipe]].concat()));
        let note = outcome.stderr.contains("--keep-bf16 changes nothing");
        assert_eq!((outcome.code, note), (Some(0), noted), "{recipe}");
    }
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

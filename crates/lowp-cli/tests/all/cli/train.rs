//! `lowp train` on a model that trains in milliseconds.

use super::{lowp, path, recipes, stdout, tiny, train_json};
use serde_json::Value;
use std::fs;

pub(super) fn runs(document: &Value) -> &[Value] {
    document["runs"].as_array().expect("runs")
}

pub(super) fn text<'a>(run: &'a Value, key: &str) -> &'a str {
    run[key]
        .as_str()
        .unwrap_or_else(|| panic!("{key} of {run}"))
}

pub(super) fn number(run: &Value, key: &str) -> f64 {
    run[key]
        .as_f64()
        .unwrap_or_else(|| panic!("{key} of {run}"))
}

/// A run that stops and goes on, on other ranks and by itself or beside others, is the run that did not stop.
#[test]
fn runs_go_on_from_checkpoints() {
    let dir = tempfile::tempdir().expect("a folder");
    let saved = path(&dir.path().join("saved"));
    let compare = [
        "--steps",
        "6",
        "--compare",
        "nvfp4-2d,fp8-delayed",
        "--precision-tail",
        "0.3",
    ];
    let whole = train_json(&compare);
    let save = [
        "--stop-after",
        "3",
        "--save",
        &saved,
        "--save-every",
        "2",
        "--keep",
        "1",
    ];
    let half = train_json(&[&compare[..], &save].concat());
    assert_eq!(
        half["runs"][1]["train_loss"].as_array().map(Vec::len),
        Some(3)
    );
    // The last checkpoint is in the tail.
    let resume = ["--resume", &saved, "--save", &saved, "--stop-after", "5"];
    train_json(&[&compare[..], &resume].concat());
    let rest = train_json(&[&compare[..], &["--resume", &saved]].concat());
    for (whole, rest) in runs(&whole).iter().zip(runs(&rest)) {
        assert_eq!(number(rest, "resumed_at"), 5.0);
        for key in ["train_loss", "val_loss", "steps", "skipped_steps"] {
            assert_eq!(whole[key], rest[key], "{key} of {}", text(whole, "recipe"));
        }
    }
    let checkpoints = fs::read_dir(dir.path().join("saved/nvfp4-2d-seed0")).expect("a folder");
    let names = checkpoints.map(|entry| entry.expect("a file").file_name());
    let mut names: Vec<_> = names
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    assert_eq!(names, ["latest", "step-00000003", "step-00000005"]);
    // Another recipe begins with the masters of one checkpoint.
    let one = path(&dir.path().join("saved/nvfp4-2d-seed0/step-00000003"));
    let other = train_json(&[
        "--steps",
        "6",
        "--no-baseline",
        "--recipe",
        "mxfp8",
        "--resume",
        &one,
    ]);
    let [other] = runs(&other) else {
        panic!("one run: {other}")
    };
    assert_eq!(
        other["train_loss"]
            .as_array()
            .map(|losses| losses[..3].to_vec()),
        half["runs"][1]["train_loss"].as_array().cloned()
    );
    assert!(other["gap_percent"].is_null(), "{other}");
}

/// The tail has codes of each orientation by themselves, also where ranks have full weights and delayed scales.
#[test]
fn runs_go_on_in_the_tail() {
    for sharding in ["fsdp", "zero1"] {
        for stop in ["3", "4", "5"] {
            let dir = tempfile::tempdir().expect("a folder");
            let saved = path(dir.path());
            let run = [
                "--steps",
                "5",
                "--no-baseline",
                "--recipe",
                "fp8-delayed",
                "--precision-tail",
                "0.6",
                "--sharding",
                sharding,
            ];
            let whole = train_json(&run);
            train_json(&[&run[..], &["--save", &saved, "--stop-after", stop]].concat());
            let rest = train_json(&[&run[..], &["--resume", &saved]].concat());
            for key in ["train_loss", "val_loss"] {
                let [whole, rest] = [&whole, &rest].map(|document| &runs(document)[0][key]);
                assert_eq!(whole, rest, "{sharding}, stopped after {stop}");
            }
        }
    }
}

/// What a command that was killed early has not begun, it begins; what is done is saved where it is asked for.
#[test]
fn runs_without_a_checkpoint_begin_anew() {
    let dir = tempfile::tempdir().expect("a folder");
    let [saved, other] = ["saved", "other"].map(|name| path(&dir.path().join(name)));
    let steps = ["--steps", "2"];
    train_json(&[&steps[..], &["--save", &saved, "--recipe", "fp32"]].concat());
    let args = tiny(&[&steps[..], &["--save", &saved, "--resume", &saved]].concat());
    let outcome = lowp(&args);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let note = "mxfp8 seed 0: no checkpoint to resume from; the run starts at step 0";
    assert!(outcome.stderr.contains(note), "{}", outcome.stderr);
    // Both are done now.
    train_json(&[&steps[..], &["--save", &other, "--resume", &saved]].concat());
    let run = "mxfp8-seed0";
    stdout(&[
        "verify",
        &format!("{saved}/{run}"),
        &format!("{other}/{run}"),
    ]);
}

/// Checkpoints whose ranks have other parts hold the same tensors, and `inspect` reads all of their bytes.
#[test]
fn checkpoints_are_inspected_and_compared() {
    let dir = tempfile::tempdir().expect("a folder");
    let [one, two] = ["one", "two"].map(|name| path(&dir.path().join(name)));
    let steps = ["--steps", "2", "--no-baseline", "--recipe", "nvfp4-2d"];
    train_json(&[&steps[..], &["--save", &one, "--stop-after", "1"]].concat());
    let resume = ["--resume", &one, "--save"];
    train_json(&[&steps[..], &resume, &[&two, "--sharding", "zero1"]].concat());
    train_json(&[&steps[..], &resume, &[&one]].concat());
    let [run_one, run_two] = [&one, &two].map(|folder| format!("{folder}/nvfp4-2d-seed0"));
    let equal = stdout(&["verify", &run_one, &run_two]);
    assert!(equal.starts_with("equal: "), "{equal}");
    let first = format!("{run_one}/step-00000001");
    let outcome = lowp(&["verify", &first, &run_two]);
    assert_eq!(outcome.code, Some(1));
    assert!(
        outcome.stderr.contains("is of step 1, and"),
        "{}",
        outcome.stderr
    );
    let text = stdout(&["inspect", &run_two]);
    assert!(
        text.contains("step 2 of nvfp4-2d, saved by 2 ranks"),
        "{text}"
    );
    assert!(
        text.contains("block0.qkv.rowwise_data") && text.contains("optimizer.counts"),
        "{text}"
    );
    // The folder of --save has one run; next to a model it is a folder of that model.
    assert_eq!(stdout(&["verify", &one, &two]), equal);
    assert_eq!(stdout(&["inspect", &two]), text);
    let model = dir.path().join("two/model.safetensors");
    std::fs::write(&model, b"\x02\0\0\0\0\0\0\0{}").expect("a file");
    let of_model = lowp(&["inspect", &two]);
    assert!(!of_model.stdout.contains("saved by"), "{}", of_model.stdout);
    let json: Value =
        serde_json::from_str(&stdout(&["inspect", &run_two, "--json"])).expect("JSON");
    let sum = |tensors: &Value| -> f64 {
        let tensors = tensors.as_array().expect("tensors");
        tensors.iter().map(|tensor| number(tensor, "bytes")).sum()
    };
    assert_eq!(
        (number(&json, "step"), number(&json, "bytes")),
        (2.0, sum(&json["tensors"]))
    );
    let outcome = lowp(&["verify", &run_one, &format!("{run_one}/latest")]);
    assert_eq!(outcome.code, Some(2));
    assert!(
        outcome.stderr.contains("one is a checkpoint"),
        "{}",
        outcome.stderr
    );
}

/// What a run cannot resume from is an error before it begins.
#[test]
fn checkpoints_of_other_runs_are_errors() {
    let dir = tempfile::tempdir().expect("a folder");
    let saved = path(dir.path());
    let steps = ["--steps", "3", "--recipe", "mxfp8"];
    train_json(&[&steps[..], &["--save", &saved, "--save-every", "2"]].concat());
    let file = dir
        .path()
        .join("mxfp8-seed0/step-00000003/rank-00001.safetensors");
    let resume = |args: &[&str]| {
        let outcome = lowp(&tiny(&[args, &["--resume", &saved]].concat()));
        assert_eq!(
            (outcome.code, outcome.stderr.contains("  step ")),
            (Some(2), false),
            "{}",
            outcome.stderr
        );
        outcome.stderr
    };
    for (args, expected) in [
        (
            ["--steps", "3", "--lr", "0.5"],
            "was saved with --lr 0.003, and this run has 0.5; give the same value",
        ),
        (
            ["--steps", "4", "--recipe", "mxfp8"],
            "--steps 3, and this run has 4",
        ),
        (
            ["--steps", "3", "--precision-tail", "0.7"],
            "was saved with --precision-tail (in steps) 0, and this run has 2;",
        ),
        (["--steps", "3", "--seed", "1"], "fp32-seed1"),
        (
            ["--steps", "3", "--vocab", "300"],
            "--vocab 256, and this run has 300",
        ),
    ] {
        let text = resume(&args);
        assert!(text.contains(expected), "{args:?}: {text}");
    }
    let mut bytes = fs::read(&file).expect("a file");
    bytes.truncate(100);
    fs::write(&file, bytes).expect("a file");
    let text = resume(&steps);
    assert!(
        text.contains("has 100 bytes of") && text.contains("damaged"),
        "{text}"
    );
    let remedy = "or resume from step 2, the newest whole checkpoint there: with --resume latest and the --save that the run had";
    assert!(text.contains(remedy), "{text}");
}

/// Micro-batches and recomputed blocks gather more, and as much as the plans say; layers that stay in bf16 and a tail in bf16 show in the
/// bytes, too.
#[test]
fn options_of_passes_and_layers() {
    let plain = train_json(&["--steps", "4", "--recipe", "nvfp4-1d"]);
    let passes = ["--accumulate", "2", "--recompute"];
    let layers = ["--keep-bf16", "*.fc,block0.out", "--precision-tail", "0.5"];
    let steps = ["--steps", "4", "--recipe", "nvfp4-1d"];
    let [passes, layers] =
        [&passes[..], &layers[..]].map(|args| train_json(&[&steps, args].concat()));
    for (document, run) in [(&plain, 0), (&plain, 1), (&passes, 0), (&layers, 0)] {
        let run = &runs(document)[run];
        assert_eq!(
            run["wire_bytes_per_step"], run["wire_bytes_formula"],
            "{run}"
        );
        let rates = [
            "tokens_per_second",
            "flops_per_second",
            "parameter_bytes_per_rank",
        ];
        assert!(rates.iter().all(|key| number(run, key) > 0.0), "{run}");
        let gathering = number(run, "gather_seconds_exposed");
        assert!(
            0.0 < gathering && gathering < number(run, "seconds_per_step"),
            "{run}"
        );
    }
    let bytes = |document: &Value, key: &str| number(&runs(document)[1], key);
    // Two forward passes beside one backward pass, twice.
    let [once, often] = [&plain, &passes].map(|document| bytes(document, "wire_bytes_per_step"));
    assert_eq!(often, 3.0 * once);
    let losses = [&plain, &layers].map(|document| runs(document)[1]["train_loss"].clone());
    assert_ne!(losses[0][1], losses[1][1], "other layers in bf16");
    let [stored, kept] = [&plain, &layers].map(|document| bytes(document, "resident_weight_bytes"));
    assert!(kept > 1.2 * stored, "{kept} {stored}");
    let tail = runs(&layers)[1]["wire_bytes_tail"]
        .as_array()
        .expect("a tail");
    assert_eq!(tail[0], tail[1]);
    // The forward operand of the other layers is in bf16, too.
    assert!(tail[0].as_f64() > runs(&layers)[1]["wire_bytes_per_step"].as_f64());
    assert_eq!(
        layers["config"]["kept_in_bf16"],
        serde_json::json!(["block0.fc", "block0.out"])
    );
    assert_eq!(runs(&plain)[1]["wire_bytes_tail"], Value::Null);
    // The baseline is what it is without them.
    assert_eq!(
        runs(&plain)[0]["train_loss"],
        runs(&layers)[0]["train_loss"]
    );
}

#[test]
fn json_has_the_promised_keys() {
    let document = train_json(&["--steps", "3"]);
    let [baseline, run] = runs(&document) else {
        panic!("the baseline and one recipe: {document}")
    };
    assert_eq!(
        (text(baseline, "recipe"), text(run, "recipe")),
        ("fp32", "mxfp8")
    );
    for run in [baseline, run] {
        assert_eq!(
            (
                number(run, "ranks"),
                number(run, "steps"),
                number(run, "seed")
            ),
            (2.0, 3.0, 0.0)
        );
        let losses = run["train_loss"].as_array().expect("an array");
        assert_eq!(losses.len(), 3);
        assert!(
            losses
                .iter()
                .all(|loss| loss.as_f64().is_some_and(|loss| loss > 0.0))
        );
        assert!(number(run, "val_loss") > 0.0);
        assert_eq!(number(run, "parameters"), (12 * 64 * 64) as f64);
        assert!(number(run, "resident_weight_bytes") > 0.0);
        assert_eq!(run["wire_bytes_per_step"], run["wire_bytes_formula"]);
    }
    for run in [baseline, run] {
        let bytes = |key| number(run, &format!("{key}_weight_bytes"));
        assert_eq!(bytes("master"), 4.0 * number(run, "parameters"));
        // On both ranks: one set of buffers for the plans of both phases, the messages of a phase, decoded values of each
        // length, host values of the longest, and one bucket of gradients, as long as the longest. `memory.rs` of lowp-candle
        // has the account of every recipe.
        let (shapes, lengths, longest) = (12 * 64 * 64, 3 * 4096 + 4096 + 16384, 16384);
        let gathered = match text(run, "recipe") {
            "fp32" => 2 * 4 * shapes,
            _ => 3 * (shapes + shapes / 32),
        };
        let transient = f64::from(2 * (gathered + 4 * (lengths + 2 * longest)));
        let peak = bytes("resident") + bytes("master") + transient;
        assert_eq!(bytes("peak"), peak, "{run}");
    }
    assert_eq!(number(baseline, "gap_percent"), 0.0);
    assert_eq!(
        number(baseline, "resident_weight_bytes"),
        4.0 * number(baseline, "parameters")
    );
    assert_eq!(
        number(baseline, "wire_bytes_per_step"),
        8.0 * number(baseline, "parameters")
    );
    assert_eq!(document["config"]["mesh"], serde_json::json!([1, 2]));
}

#[test]
fn the_table() {
    let table = stdout(&tiny(&[
        "--compare",
        "all",
        "--steps",
        "2",
        "--seeds",
        "2",
        "--mesh",
        "2x1",
    ]));
    let filters = [
        (r" \d\.\d{4} ", " [loss] "),
        (r"[+-]\d\.\d\d to [+-]\d\.\d\d", "[low] to [high]"),
        (r"[+-]\d\.\d\d", "[gap]"),
        (
            r"(?m) +\d+\.\d +\d+\.\d +\d+ +\d+\.\d( +\d+\.\d)$",
            "  [times and rates]$1",
        ),
    ];
    insta::with_settings!({ filters => filters }, {
        insta::assert_snapshot!(table);
    });
}

#[test]
fn the_same_seed_gives_the_same_bits() {
    let args = ["--compare", "all", "--steps", "3"];
    let [first, second] = [train_json(&args), train_json(&args)];
    assert_eq!(runs(&first).len(), recipes().len() - 1, "all but bf16");
    for (one, other) in runs(&first).iter().zip(runs(&second)) {
        for key in ["recipe", "train_loss", "val_loss"] {
            assert_eq!(one[key], other[key], "{key}");
        }
    }
    let other = train_json(&["--steps", "3", "--seed", "1"]);
    assert_ne!(runs(&other)[0]["train_loss"], runs(&first)[0]["train_loss"]);
}

#[test]
fn seeds_repeat_every_run() {
    let document = train_json(&["--steps", "2", "--seeds", "2", "--seed", "5"]);
    let made: Vec<_> = runs(&document)
        .iter()
        .map(|run| (text(run, "recipe"), number(run, "seed")))
        .collect();
    assert_eq!(
        made,
        [("fp32", 5.0), ("mxfp8", 5.0), ("fp32", 6.0), ("mxfp8", 6.0)]
    );
    for pair in runs(&document).chunks(2) {
        let gap = (number(&pair[1], "val_loss") / number(&pair[0], "val_loss") - 1.0) * 100.0;
        // JSON keeps all digits, but reading them may round.
        assert!((number(&pair[1], "gap_percent") - gap).abs() < 1e-9);
    }
    let alone = train_json(&["--steps", "2", "--seed", "6"]);
    assert_eq!(
        runs(&alone)[1]["train_loss"],
        runs(&document)[3]["train_loss"]
    );
}

#[test]
fn own_text() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("text");
    fs::write(
        &file,
        "all work and no play makes jack a dull boy\n".repeat(50),
    )
    .expect("a written file");
    let document = train_json(&["--steps", "40", "--lr", "0.01", "--data", &path(&file)]);
    for run in runs(&document) {
        assert!(number(run, "val_loss") < 2.5, "{run}");
    }
}

#[test]
fn progress_without_a_terminal_is_plain_lines() {
    let outcome = lowp(&tiny(&["--recipe", "fp32", "--steps", "25"]));
    let lines: Vec<_> = outcome.stderr.lines().collect();
    assert!((5..=11).contains(&lines.len()), "{}", outcome.stderr);
    let last = lines.last().expect("a line");
    assert!(
        last.starts_with("fp32  step 25/25  loss ") && last.ends_with("FLOP/s"),
        "{last}"
    );
    assert!(!outcome.stderr.contains('\u{1b}'), "no escape codes");
}

#[test]
fn a_run_that_diverges_says_so() {
    let dir = tempfile::tempdir().expect("a folder");
    let [json, page] = ["out.json", "out.html"].map(|name| path(&dir.path().join(name)));
    let args = [
        "--steps", "4", "--lr", "1e30", "--warmup", "0", "--clip", "1e30", "--json", &json,
        "--report", &page,
    ];
    let outcome = lowp(&tiny(&args));
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    let last = outcome.stderr.lines().last().expect("a message");
    assert!(
        last.starts_with("error: fp32, seed 0: the loss of step 2 of 4 is not finite"),
        "{last}"
    );
    let document: Value =
        serde_json::from_str(&fs::read_to_string(json).expect("JSON")).expect("JSON");
    let run = &runs(&document)[1];
    assert!(
        run["val_loss"].is_null() || number(run, "val_loss") > 10.0,
        "{run}"
    );
    let page = fs::read_to_string(page).expect("HTML");
    assert!(!page.contains("points=\"NaN") && !page.contains(",NaN") && !page.contains(",inf"));
}

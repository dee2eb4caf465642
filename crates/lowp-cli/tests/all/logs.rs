//! What a run is trained on by share and epoch, when it is evaluated, and what it logs of itself.

use crate::continued::{TRAIN, begin};
use crate::support::Bench;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

fn json(bench: &Bench, name: &str) -> Result<Value> {
    Ok(serde_json::from_slice(&fs::read(bench.path(name))?)?)
}

/// Evaluations, their bytes and their gathers are no part of steps: losses, and traffic by formula, which the command checks.
#[test]
fn evaluations_change_nothing_else() -> Result<()> {
    let bench = begin("llama2")?;
    for more in [
        "--recipe fp8-delayed --precision-tail 0.4",
        "--recipe fp8-current --sharding zero1",
        "--recipe fp8-rowwise --reshard-after-forward false --recompute",
    ] {
        let more = format!("{more} --world-size 2");
        let run = format!(
            "train --model MODEL {} {more}",
            TRAIN.replace("--recipe fp8-current ", "")
        );
        bench.done(&format!("{run} --json plain.json"));
        bench.done(&format!("{run} --json often.json --eval-every 2"));
        let [plain, often] = ["plain.json", "often.json"].map(|name| json(&bench, name));
        let [plain, often] = [&plain?["runs"][0], &often?["runs"][0]];
        for key in [
            "train_loss",
            "val_loss",
            "wire_bytes_per_step",
            "wire_bytes_tail",
        ] {
            assert_eq!(plain[key], often[key], "{key} of {more}");
        }
        let evaluations = often["evaluations"].as_array().context("evaluations")?;
        let steps: Vec<_> = evaluations.iter().map(|at| at["step"].as_u64()).collect();
        assert_eq!(steps, [2, 4, 6].map(Some));
        assert_eq!(evaluations[2]["loss"], often["val_loss"]);
        assert_eq!(plain["evaluations"], Value::Array(Vec::new()));
    }
    Ok(())
}

/// The z-loss changes what is trained, and no loss of the same weights.
#[test]
fn z_loss_is_in_gradients_alone() -> Result<()> {
    let bench = begin("llama2")?;
    for (name, more) in [("plain.json", ""), ("z.json", "--z-loss 0.1")] {
        bench.done(&format!("train --model MODEL {TRAIN} {more} --json {name}"));
    }
    let [plain, z] = [json(&bench, "plain.json")?, json(&bench, "z.json")?];
    let [losses, others] = [&plain, &z].map(|document| &document["runs"][0]["train_loss"]);
    assert_eq!(losses[0], others[0]);
    assert_ne!(losses[5], others[5]);
    assert_eq!(z["config"]["z_loss"], 0.1);
    let run = format!("train --model MODEL {TRAIN}");
    bench.done(&format!("{run} --stop-after 3 --save runs"));
    let error = bench.rejected(2, &format!("{run} --z-loss 0.1 --resume runs"));
    let differs = "was saved with --z-loss 0, and this run has 0.1";
    assert!(error.contains(differs), "{error}");
    // Of one micro-batch, how many are reduced at once is no difference.
    bench.done(&format!("{run} --reduce-every-micro-batch --resume runs"));
    Ok(())
}

/// 2000 ids in sequences of 16 are 124, of which 12 are held out; sources of another weight are another run.
#[test]
fn sources_and_epochs() -> Result<()> {
    let bench = begin("llama2")?;
    fs::copy(bench.path("ids.npy"), bench.path("b.npy"))?;
    let train =
        "train --model MODEL --recipe fp8-current --seq 16 --batch 32 --lr 1e-2 --eval-batches 1";
    let both = format!("{train} --data ids.npy=0.75 --data b.npy=0.25 --epochs 0.5");
    bench.done(&format!("{both} --json whole.json"));
    let whole = json(&bench, "whole.json")?;
    // Half of twice 112 sequences, 32 at a time.
    assert_eq!(whole["config"]["steps"], 4);
    bench.done(&format!("{both} --stop-after 2 --save runs"));
    bench.done(&format!("{both} --resume runs --json rest.json"));
    let rest = json(&bench, "rest.json")?;
    assert_eq!(
        whole["runs"][0]["train_loss"],
        rest["runs"][0]["train_loss"]
    );
    let other = both.replace("0.25", "0.5");
    let error = bench.rejected(2, &format!("{other} --resume runs"));
    assert!(error.contains("--data"), "{error}");
    for (words, why) in [
        ("--data ids.npy=0", "expected a positive number"),
        ("--data ids.npy --data MODEL", "holds no tokens"),
        (
            "--data ids.npy --epochs 0",
            "--epochs 0: expected a positive number",
        ),
        ("--data ids.npy --epochs 1e9", "a run has 1 to"),
    ] {
        let error = bench.rejected(2, &format!("{train} {words}"));
        assert!(error.contains(why), "{error}");
    }
    let error = bench.rejected(2, "train --epochs 1");
    assert!(error.contains("only applies to tokens"), "{error}");
    // The same of a file, where sources are a list.
    fs::write(
        bench.path("run.toml"),
        "data = ['ids.npy=0.75', 'b.npy=0.25']\nepochs = 0.5\n",
    )?;
    bench.done(&format!("{train} --config run.toml --json file.json"));
    assert_eq!(
        json(&bench, "file.json")?["runs"][0]["train_loss"],
        whole["runs"][0]["train_loss"]
    );
    Ok(())
}

/// What an event file has of a step.
#[derive(Default)]
struct Event {
    step: u64,
    version: String,
    starts: bool,
    scalars: Vec<(String, f32)>,
}

/// CRC-32C by a table of the bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let table: Vec<u32> = (0..256u32)
        .map(|byte| (0..8).fold(byte, |crc, _| (crc >> 1) ^ ((crc & 1) * 0x82F6_3B78)))
        .collect();
    let step = |crc: u32, byte: &u8| table[((crc ^ u32::from(*byte)) & 255) as usize] ^ (crc >> 8);
    !bytes.iter().fold(!0, step)
}

/// The fields of a message: their numbers, whole numbers, and bytes.
fn fields(mut bytes: &[u8]) -> Result<Vec<(u8, u64, &[u8])>> {
    let mut found = Vec::new();
    while let Some((&key, rest)) = bytes.split_first() {
        bytes = rest;
        let mut varint = || {
            let end = bytes
                .iter()
                .position(|byte| byte & 128 == 0)
                .context("an end")?;
            let (number, rest) = bytes.split_at(end + 1);
            bytes = rest;
            let digits = number.iter().rev();
            Ok::<_, anyhow::Error>(digits.fold(0, |sum, byte| sum << 7 | u64::from(byte & 127)))
        };
        let (number, length) = match key & 7 {
            0 => (varint()?, 0),
            1 => (0, 8),
            2 => (0, varint()? as usize),
            5 => (0, 4),
            kind => bail!("kind {kind}"),
        };
        let (value, rest) = bytes.split_at_checked(length).context("a field")?;
        bytes = rest;
        found.push((key >> 3, number, value));
    }
    Ok(found)
}

/// The events of each file of `folder`, in the order of their first times.
fn event_files(folder: &Path) -> Result<Vec<Vec<Event>>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if !path.to_string_lossy().contains("tfevents") {
            continue;
        }
        let bytes = fs::read(path)?;
        let (mut rest, mut events, mut first) = (&bytes[..], Vec::new(), None);
        while !rest.is_empty() {
            let length: [u8; 8] = rest[..8].try_into()?;
            let record = &rest[12..12 + u64::from_le_bytes(length) as usize];
            for (part, at) in [(&length[..], 8), (record, 12 + record.len())] {
                // `masked_crc32c` of TensorFlow.
                let masked = crc32c(part).rotate_right(15).wrapping_add(0xa282_ead8);
                assert_eq!(masked.to_le_bytes(), rest[at..at + 4]);
            }
            rest = &rest[16 + record.len()..];
            let mut event = Event::default();
            for (field, number, value) in fields(record)? {
                match field {
                    1 => first = first.or(Some(f64::from_le_bytes(value.try_into()?))),
                    2 => event.step = number,
                    3 => event.version = String::from_utf8(value.to_vec())?,
                    5 => {
                        for (_, _, value) in fields(value)? {
                            let [(1, _, tag), (2, _, simple)] = fields(value)?[..] else {
                                bail!("a value of step {}", event.step);
                            };
                            let tag = String::from_utf8(tag.to_vec())?;
                            event
                                .scalars
                                .push((tag, f32::from_le_bytes(simple.try_into()?)));
                        }
                    }
                    7 => event.starts = fields(value)? == [(1, 1, &[][..])],
                    other => bail!("field {other}"),
                }
            }
            events.push(event);
        }
        files.push((first.context("a time")?, events));
    }
    files.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(files.into_iter().map(|(_, events)| events).collect())
}

/// Every step once, whatever stops there were, and the same numbers in the event files.
#[test]
fn a_run_is_logged() -> Result<()> {
    let bench = begin("llama2")?;
    let run = format!(
        "train --model MODEL {TRAIN} --world-size 2 --eval-every 3 --log-dir logs --log-codes 2 --peak-tflops 1"
    );
    bench.done(&format!("{run} --save runs --stop-after 4"));
    let error = bench.rejected(2, &run);
    assert!(error.contains("the log of an earlier run"), "{error}");
    bench.done(&format!("{run} --resume runs --json run.json"));
    let folder = bench.path("logs/fp8-current-seed0");
    let text = fs::read_to_string(folder.join("metrics.jsonl"))?;
    let lines: Vec<Value> = text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    let with = |key: &'static str| lines.iter().filter(move |line| !line[key].is_null());
    let steps = |key: &'static str| {
        with(key)
            .filter_map(|line| line["step"].as_u64())
            .collect::<Vec<_>>()
    };
    assert_eq!(steps("loss"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(steps("val_loss"), [3, 6]);
    assert_eq!(steps("codes"), [2, 4, 6]);
    let result = &json(&bench, "run.json")?["runs"][0];
    for (line, loss) in with("loss").zip(result["train_loss"].as_array().context("losses")?) {
        let number = |key: &str| {
            line[key]
                .as_f64()
                .with_context(|| format!("{key} of {line}"))
        };
        let loss = loss.as_f64().context("a loss")?;
        assert!((number("loss")? - loss).abs() < 1e-6 * loss);
        assert!(number("grad_norm")? > 0.0 && number("tokens_per_second")? > 0.0);
        assert!((0.0..1.0).contains(&number("data_wait")?) && number("mfu")? > 0.0);
        assert_eq!(number("tokens")?, 64.0 * number("step")?);
    }
    for line in with("codes") {
        let layers = line["codes"].as_array().context("layers")?;
        // At least one code per scale is saturated.
        let all: f64 = layers
            .iter()
            .filter_map(|layer| layer["saturated"].as_f64())
            .sum();
        assert!(all > 0.0 && layers.len() == 14, "{line}");
    }
    // A file for each start, with what is in the lines.
    let files = event_files(&folder)?;
    assert_eq!(files.len(), 2);
    for (file, done) in files.iter().zip([1..=4, 5..=6]) {
        let starts: Vec<u64> = file
            .iter()
            .filter(|event| event.starts)
            .map(|event| event.step)
            .collect();
        assert_eq!(starts, if *done.start() == 1 { vec![] } else { vec![5] });
        assert!(
            file.iter()
                .all(|event| event.step == 0 || done.contains(&event.step))
        );
        assert!(file[0].step == 0 && file[0].version == "brain.Event:2");
    }
    let scalars: BTreeMap<(u64, &str), f32> = files
        .iter()
        .flatten()
        .flat_map(|event| {
            event
                .scalars
                .iter()
                .map(|(tag, value)| ((event.step, &**tag), *value))
        })
        .collect();
    let mut compared = 0;
    for line in &lines {
        let step = line["step"].as_u64().context("a step")?;
        let mut same = |tag: &str, value: &Value| {
            let value = value.as_f64().with_context(|| format!("{tag} of {line}"))?;
            compared += 1;
            assert_eq!(
                scalars.get(&(step, tag)),
                Some(&(value as f32)),
                "{tag} of step {step}"
            );
            Ok::<_, anyhow::Error>(())
        };
        for key in ["loss", "grad_norm", "lr", "tokens", "mfu", "val_loss"] {
            if !line[key].is_null() {
                same(key, &line[key])?;
            }
        }
        for codes in line["codes"].as_array().into_iter().flatten() {
            let layer = codes["layer"].as_str().context("a layer")?;
            for what in ["saturated", "zero"] {
                same(&format!("codes/{layer}/{what}"), &codes[what])?;
            }
        }
    }
    assert_eq!(compared, 6 * 5 + 2 + 3 * 14 * 2);
    let record = json(&bench, "logs/fp8-current-seed0/run.json")?;
    assert_eq!(record["config"]["steps"], 6);
    Ok(())
}

/// The steps of the lines that a log has with `key`.
fn steps(bench: &Bench, log: &str, key: &str) -> Result<Vec<u64>> {
    let text = fs::read_to_string(bench.path(log).join("metrics.jsonl"))?;
    let lines = text.lines().map(serde_json::from_str::<Value>);
    let lines: Vec<Value> = lines.collect::<Result<_, _>>()?;
    let with = lines.iter().filter(|line| !line[key].is_null());
    Ok(with.filter_map(|line| line["step"].as_u64()).collect())
}

/// One line starts a run and goes on with it, whether or not a checkpoint was saved before the stop, and whether or not it is damaged.
#[test]
fn a_log_goes_on_from_any_stop() -> Result<()> {
    let bench = begin("llama2")?;
    let run = format!("train --model MODEL {TRAIN} --log-dir logs");
    let (log, all) = ("logs/fp8-current-seed0", [1, 2, 3, 4, 5, 6]);
    // What a run leaves that is killed before its first checkpoint.
    bench.done(&format!("{run} --stop-after 3"));
    let latest = format!("{run} --save runs --save-every 2 --resume latest");
    bench.done(&format!("{latest} --stop-after 4"));
    assert_eq!(steps(&bench, log, "loss")?, all[..4]);
    // The index is damaged in a way that only checksums tell of.
    let file = bench.path("runs/fp8-current-seed0/step-00000004/rank-00000.safetensors");
    let mut bytes = fs::read(&file)?;
    *bytes.last_mut().context("a byte")? ^= 1;
    fs::write(&file, bytes)?;
    bench.done(&latest);
    assert_eq!(steps(&bench, log, "loss")?, all);
    // The loss at the end, whatever `--eval-every` is.
    assert_eq!(steps(&bench, log, "val_loss")?, [6]);
    bench.done(&latest);
    assert_eq!(steps(&bench, log, "loss")?, all);
    assert_eq!(steps(&bench, log, "val_loss")?, [6]);
    Ok(())
}

/// A log that is longer than a run without checkpoints shows that these are missing.
#[test]
fn a_log_of_checkpoints_that_are_gone_is_not_cut() -> Result<()> {
    let bench = begin("llama2")?;
    let run = format!("train --model MODEL {TRAIN} --log-dir logs --save runs --resume latest");
    bench.done(&format!("{run} --save-every 1 --stop-after 4"));
    let file = bench.path("logs/fp8-current-seed0/metrics.jsonl");
    let before = fs::read(&file)?;
    fs::rename(bench.path("runs"), bench.path("elsewhere"))?;
    let error = bench.rejected(2, &run);
    let numbers = ["checkpoint of step 4 was saved", "runs has none of it"];
    assert!(numbers.iter().all(|&part| error.contains(part)), "{error}");
    assert_eq!(fs::read(&file)?, before);
    fs::rename(bench.path("elsewhere"), bench.path("runs"))?;
    bench.done(&run);
    assert_eq!(
        steps(&bench, "logs/fp8-current-seed0", "loss")?,
        [1, 2, 3, 4, 5, 6]
    );
    Ok(())
}

/// A run that is killed before its only checkpoint is there starts again.
#[test]
fn a_log_before_the_first_checkpoint_begins_anew() -> Result<()> {
    let bench = begin("llama2")?;
    let run = format!("train --model MODEL {TRAIN} --log-dir logs --save runs --resume latest");
    bench.done(&format!("{run} --stop-after 4"));
    fs::remove_dir_all(bench.path("runs"))?;
    // What a run that was killed leaves: all lines of steps.
    let file = bench.path("logs/fp8-current-seed0/metrics.jsonl");
    let lines = fs::read_to_string(&file)?;
    let steps_alone = lines.lines().filter(|line| line.contains("loss"));
    let steps_alone: Vec<&str> = steps_alone.collect();
    assert_eq!(steps_alone.len() + 1, lines.lines().count(), "{lines}");
    fs::write(&file, steps_alone.join("\n") + "\n")?;
    bench.done(&run);
    assert_eq!(
        steps(&bench, "logs/fp8-current-seed0", "loss")?,
        [1, 2, 3, 4, 5, 6]
    );
    Ok(())
}

/// A log of other numbers stays as it is.
#[test]
fn the_log_of_another_run_is_not_cut() -> Result<()> {
    let bench = begin("llama2")?;
    let run = format!("train --model MODEL {TRAIN}");
    let other = run.replace("fp8-current", "fp8-rowwise");
    bench.done(&format!("{run} --save runs --stop-after 3"));
    bench.done(&format!("{other} --log-dir logs"));
    let file = bench.path("logs/fp8-rowwise-seed0/metrics.jsonl");
    let before = fs::read(&file)?;
    // In another recipe the steps before are those of another run.
    let recast = format!("{other} --resume runs/fp8-current-seed0");
    let error = bench.rejected(2, &format!("{recast} --log-dir logs"));
    assert!(error.contains("the log of an earlier run"), "{error}");
    // Another rate of the same recipe, which is saved elsewhere.
    let faster = other.replace("1e-2", "2e-2");
    bench.done(&format!("{faster} --save faster --stop-after 3"));
    for more in ["--resume faster", "--save new --resume latest"] {
        let error = bench.rejected(2, &format!("{faster} {more} --log-dir logs"));
        assert!(error.contains("the log of an earlier run"), "{error}");
    }
    assert_eq!(fs::read(&file)?, before);
    // A log of its own begins after the steps of the other recipe.
    bench.done(&format!("{recast} --log-dir others --json recast.json"));
    assert_eq!(
        steps(&bench, "others/fp8-rowwise-seed0", "loss")?,
        [4, 5, 6]
    );
    bench.done(&format!("{recast} --log-dir others"));
    assert_eq!(
        steps(&bench, "others/fp8-rowwise-seed0", "loss")?,
        [4, 5, 6]
    );
    Ok(())
}

/// A finished run that is resumed in another recipe, or evaluated on other batches, has a loss of its own.
#[test]
fn losses_are_those_of_the_weights() -> Result<()> {
    let bench = begin("llama2")?;
    let run = format!("train --model MODEL {TRAIN}");
    bench.done(&format!(
        "{run} --eval-every 3 --save runs --json first.json"
    ));
    let first = json(&bench, "first.json")?;
    for (from, to) in [("fp8-current", "bf16"), ("batches 2", "batches 1")] {
        let other = run.replace(from, to);
        bench.done(&format!(
            "{other} --resume runs/fp8-current-seed0 --eval-every 3 --json again.json"
        ));
        let again = json(&bench, "again.json")?;
        assert_eq!(again["runs"][0]["resumed_at"], 6);
        assert_ne!(again["runs"][0]["val_loss"], first["runs"][0]["val_loss"]);
        assert_eq!(again["runs"][0]["evaluations"], Value::Array(Vec::new()));
    }
    Ok(())
}

/// Losses outlast a log: the folder is checked before the run, and an error of the log is returned after the run.
#[test]
fn a_full_disk_costs_the_log_alone() -> Result<()> {
    let bench = begin("llama2")?;
    let run = format!("train --model MODEL {TRAIN} --log-dir logs");
    fs::create_dir_all(bench.path("logs"))?;
    fs::write(bench.path("logs/fp8-current-seed0"), "")?;
    let error = bench.rejected(2, &run);
    assert!(error.contains("the log folder"), "{error}");
    // No file of more than 8 KiB: the log of codes is longer, the losses are not.
    let run = format!("train --model MODEL {TRAIN} --log-dir full --log-codes 1");
    let script = "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\"";
    let output = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_lowp")])
        .args(format!("{run} --seeds 2 --json out.json").split(' '))
        .current_dir(bench.path("."))
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("cannot write the log of a run"), "{error}");
    assert!(error.contains("allow larger files (ulimit -f)"), "{error}");
    let runs = json(&bench, "out.json")?;
    assert_eq!(runs["runs"].as_array().context("runs")?.len(), 2);
    Ok(())
}

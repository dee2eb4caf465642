//! Damaged folders of other programs and damaged checkpoints through the commands that read them, and damaged headers through all that
//! looks at them, in this process. `LOWP_EXHAUSTIVE=1` tries a hundred times as many.

use super::counted;
use super::hostile::{NUMBERS, Random, damaged, good, recipes, rounds, run, runs, text};
use clap::Parser;
use lowp_file::codes::quantized;
use lowp_file::dtypes::Dtypes;
use lowp_file::{Hub, Import};
use std::fs;
use std::path::{Path, PathBuf};

/// What looking at a header may hold beyond what it held before.
const MEMORY: usize = 4 << 20;

/// Folders that `lowp export` made of every recipe for every target that takes it, and the files that the other commands made.
fn exported(dir: &Path) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let files = good(dir);
    let mut folders = Vec::new();
    for recipe in recipes() {
        let q = dir.join(format!("{recipe}.safetensors"));
        // A matrix whose name ends in .weight, which all targets take.
        run(&[
            "quantize",
            text(&dir.join("model.safetensors")),
            "-o",
            text(&q),
            "--recipe",
            recipe,
            "--tensors",
            "a.weight",
        ]);
        for to in ["compressed-tensors", "modelopt", "deepseek", "te"] {
            let folder = dir.join(format!("{recipe}-{to}"));
            if run(&["export", text(&q), "-o", text(&folder), "--to", to]) {
                folders.push(folder);
            }
        }
    }
    assert!(folders.len() > 30, "{}", folders.len());
    (folders, files)
}

/// A JSON text with other numbers, words and signs.
fn changed(text: &[u8], random: &mut Random) -> Vec<u8> {
    let mut text = text.to_vec();
    for _ in 0..=random.below(8) / 6 {
        match random.below(4) {
            0 | 1 => {
                let numbers = runs(&text, |byte| byte.is_ascii_digit());
                if let Some(&(from, to)) = numbers.get(random.below(numbers.len())) {
                    text.splice(from..to, random.one_of(&NUMBERS).bytes());
                }
            }
            2 => {
                let words = runs(&text, |byte| {
                    byte.is_ascii_alphanumeric() || b"_-.".contains(&byte)
                });
                let [from, to] = [(); 2].map(|()| words.get(random.below(words.len())).copied());
                if let (Some((a, b)), Some((c, d))) = (from, to) {
                    let word = text[a..b].to_vec();
                    text.splice(c..d, word);
                }
            }
            _ => {
                let at = random.below(text.len());
                text[at] ^= 1 << random.below(8);
            }
        }
    }
    text
}

#[test]
fn damaged_models_of_other_programs() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let (folders, _) = exported(dir);
    let (bad, out) = (dir.join("bad"), dir.join("out.safetensors"));
    fs::create_dir(&bad).expect("a folder");
    let (mut random, mut taken) = (Random(0x2545_f491_4f6c_dd1d), 0);
    let rounds = rounds(400);
    for round in 0..rounds {
        let source = &folders[round % folders.len()];
        for name in ["model.safetensors", "config.json"] {
            let Ok(whole) = fs::read(source.join(name)) else {
                drop(fs::remove_file(bad.join(name)));
                continue;
            };
            let bytes = match (name, random.below(5)) {
                ("config.json", 0) => changed(&whole, &mut random),
                ("model.safetensors", 1..) => damaged(&whole, &mut random),
                _ => whole,
            };
            fs::write(bad.join(name), bytes).expect("a file");
        }
        let (bad, out) = (text(&bad), text(&out));
        taken += usize::from(run(&["import", bad, "-o", out]));
        run(&["import", bad, "-o", out, "--to", "bf16"]);
        run(&["inspect", bad]);
        run(&["verify", bad, text(source)]);
    }
    let some = rounds / 12..rounds * 10 / 12;
    assert!(some.contains(&taken), "{taken} of {rounds} were taken");
}

/// All that looks at a header before a tensor is touched.
#[test]
fn damaged_headers() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let (folders, files) = exported(dir);
    let folders = folders
        .iter()
        .map(|folder| folder.join("model.safetensors"));
    let read = |path: PathBuf| fs::read(path).expect("a file");
    let files: Vec<Vec<u8>> = folders.chain(files).map(read).collect();
    let bad = dir.join("bad.safetensors");
    let rounds = rounds(2500);
    let (mut random, mut taken) = (Random(0xd1b5_4a32_d192_ed03), 0);
    for round in 0..rounds {
        fs::write(&bad, damaged(&files[round % files.len()], &mut random)).expect("a file");
        let before = counted::start();
        let looked = Hub::open(&bad).and_then(|hub| {
            let import = Import::new(&hub, None, Dtypes::default());
            Ok((quantized(&hub.model)?.len(), import?.weights()))
        });
        let used = counted::peak() - before;
        assert!(used < MEMORY, "round {round}: {used} bytes in use");
        match looked {
            Ok(_) => taken += 1,
            Err(error) => {
                let message = format!("{error:#}");
                assert!(
                    message.contains("bad.safetensors") && message.lines().count() == 1,
                    "{message}"
                );
            }
        }
    }
    assert!(
        (rounds / 20..rounds / 2).contains(&taken),
        "{taken} of {rounds} were taken"
    );
}

/// What a checkpoint's index says of recipes, scales and shapes, changed, with the checksum that it needs.
#[test]
fn damaged_checkpoints() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let mut indexes = Vec::new();
    for recipe in recipes() {
        let saved = dir.join("runs");
        let words = [
            "lowp",
            "train",
            "--dim",
            "32",
            "--layers",
            "1",
            "--heads",
            "1",
            "--seq",
            "16",
            "--batch",
            "2",
            "--eval-batches",
            "1",
            "--steps",
            "1",
            "--no-baseline",
            "--world-size",
            "2",
            "--recipe",
            recipe,
            "--save",
            text(&saved),
        ];
        let cli = crate::Cli::try_parse_from(words).expect("a command line");
        let crate::Command::Train(args) = cli.command else {
            panic!("no run");
        };
        crate::train::main(&args).expect("a run");
        let step = saved.join(format!("{recipe}-seed0/step-00000001"));
        let index = fs::read_to_string(step.join("index.json")).expect("an index");
        indexes.push((step, index));
    }
    let mut random = Random(0x9e6c_63d0_876a_46ad);
    let (mut taken, out) = (0, dir.join("out"));
    let rounds = rounds(400);
    for round in 0..rounds {
        let (step, index) = &indexes[round % indexes.len()];
        let (_, inner) = index.split_once("\"index\":").expect("an index");
        let inner = inner.trim_end().strip_suffix('}').expect("its end");
        let about = inner.find("\"about\"").expect("what the run says");
        let about = if random.below(4) == 0 { 0 } else { about };
        let inner = [
            &inner.as_bytes()[..about],
            &changed(&inner.as_bytes()[about..], &mut random),
        ]
        .concat();
        let inner = String::from_utf8_lossy(&inner).into_owned();
        let sum = lowp_checkpoint::checksum(inner.as_bytes());
        let document = format!("{{\"version\": 2, \"checksum\": \"{sum}\", \"index\": {inner}}}");
        fs::write(step.join("index.json"), document).expect("a file");
        let (step, to) = (
            text(step),
            ["te", "bf16", "compressed-tensors", "modelopt"][random.below(4)],
        );
        run(&["inspect", step, "--json"]);
        run(&[
            "verify",
            step,
            text(&indexes[(round + 1) % indexes.len()].0),
        ]);
        if run(&["export", step, "-o", text(&out), "--to", to]) {
            taken += 1;
            fs::remove_dir_all(&out).expect("a folder");
        }
    }
    let some = rounds / 12..rounds * 11 / 12;
    assert!(some.contains(&taken), "{taken} of {rounds} were taken");
}

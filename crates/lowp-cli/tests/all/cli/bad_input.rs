//! Arguments of `lowp train` that cannot work: exit code 2, one message with the remedy, and no training.

use super::{lowp, path, tiny};
use std::fs;

/// Runs `lowp train` with arguments that must be rejected, and gives its message.
pub(super) fn rejected(args: &[&str]) -> String {
    let outcome = lowp(&tiny(args));
    assert_eq!(outcome.code, Some(2), "{args:?}: {}", outcome.stderr);
    assert_eq!(outcome.stdout, "", "{args:?}");
    assert!(
        outcome.stderr.starts_with("error: "),
        "{args:?}: {}",
        outcome.stderr
    );
    assert!(
        !outcome.stderr.contains(" step "),
        "{args:?} trained: {}",
        outcome.stderr
    );
    outcome.stderr
}

#[test]
fn messages() {
    let mut text = String::new();
    for args in [
        "--world-size 0",
        "--world-size 65 --batch 65",
        "--world-size two",
        "--world-size 2 --mesh 1x2",
        "--mesh 2",
        "--mesh 0x2",
        "--mesh axb",
        "--mesh 9x9",
        "--world-size 5",
        "--mesh 5x1",
        "--recipe nope",
        "--recipe mxfp8+nope",
        "--recipe mxfp8+e4m3+hybrid",
        "--compare nvfp4-2d,nvfp4-2d+nearest+nearest",
        "--recipe fp32+tensor-scale",
        "--recipe mxfp8 --compare all",
        "--compare mxfp8,nope",
        "--dim 24",
        "--dim 40 --recipe nvfp4-1d",
        "--dim 40 --heads 4 --compare fp8-current,mxfp8-2d",
        "--heads 3",
        "--heads 0",
        "--steps 0",
        "--steps -1",
        "--steps 99999999999999",
        "--seeds 0",
        "--seed 18446744073709551615 --seeds 2",
        "--layers 0",
        "--dim 16384 --layers 1024",
        "--batch 65536 --seq 65536",
        "--eval-batches 0",
        "--lr NaN",
        "--var-lr 1e-3",
        "--final-lr 1e30",
        "--precision-tail 1e300",
        "--lr -1",
        "--lr 0",
        "--lr 1e-60",
        "--lr 1e60",
        "--lr fast",
        "--clip 0",
        "--clip inf",
        "--beta2 1",
        "--weight-decay -0.1",
        "--schedule wsd --steps 3 --decay-steps 4",
        "--optimizer-state bf16",
        "--optimizer lion --optimizer-state exp_avg=bf16,exp_avg_sq=bf16",
        "--optimizer sgd --optimizer-state exp_avg=bf16",
        "--optimizer muon --optimizer-state momentum_buffer=bf16",
        "--offload-optimizer",
        "--optimizer sgd --beta2 0.9",
        "--warmup 4 --steps 3",
        "--grad-wire fp8",
        "--reshard-after-forward maybe",
        "--world-size 4 --reshard-after-forward 3",
        "--mesh 2x1 --reshard-after-forward 2",
        "--sharding zero1 --reshard-after-forward false",
        "--sharding zero1 --recipe nvfp4-2d+mae",
        "--sharding zero1 --compare mxfp8,nvfp4-mxfp8+mse-448",
        "--data /no/such/file",
        "--data /proc/self/ns",
        "--params 2b",
        "--vocab 255",
        "--tokens 0",
        "--tokens 1000 --steps 2",
        "--accumulate 0",
        "--world-size 2 --accumulate 3",
        "--precision-tail 1.5",
        "--precision-tail NaN",
        "--keep-bf16 block0",
        "--recipe fp8-current --keep-bf16 * --amax-group *.{qkv,proj}",
        "--recipe fp8-current --keep-bf16 block0.* --amax-group block0.{qkv,proj}",
        "--dim 24 --keep-bf16 *.qkv",
        "--keep-bf16 [",
        "--kv-heads 1",
        "--arch llama --heads 4 --kv-heads 3",
        "--arch llama --kv-heads 0",
        "--arch llama --dim 66 --heads 22",
        "--save-every 2",
        "--keep 1",
        "--save /tmp --save-every 0",
        "--save /tmp --save-every 4 --steps 3",
        "--save /tmp --keep 0",
        "--stop-after 4 --steps 3",
        "--eval-every 4 --steps 3",
        "--log-dir out --log-codes 4 --steps 3",
        "--save out --log-dir out",
        "--params 10m --from-scratch",
        "--from-scratch",
        "--resume /no/such/folder",
        "--dim 48 --recipe nvfp4-mxfp8",
        "--save out --json out",
        "--data /dev/zero",
        "--json /no/such/folder/out.json",
        "--json /",
        "--json ..",
        "--json /dev/null",
        "--json -",
        "--report -",
        "--report /no/such/folder/out.html",
        "--json same --report same",
    ] {
        let message = rejected(&args.split(' ').collect::<Vec<_>>());
        text += &format!("$ lowp train {args}\n{message}\n");
    }
    insta::assert_snapshot!(text);
}

/// Without a size that --model would conflict with, and with one.
#[test]
fn from_scratch_needs_a_model() {
    for (args, text) in [
        (&["train", "--from-scratch"][..], "--model <DIR>"),
        (
            &["train", "--from-scratch", "--arch", "llama"],
            "cannot be used with '--arch",
        ),
    ] {
        let outcome = lowp(args);
        assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
        assert!(outcome.stderr.contains(text), "{}", outcome.stderr);
    }
}

#[test]
fn options_of_nccl_need_ranks() {
    let bench = |args: &[&str]| {
        let outcome = lowp(&[&["bench", "--device", "cuda"], args].concat());
        assert_eq!((outcome.code, &*outcome.stdout), (Some(2), ""), "{args:?}");
        outcome.stderr
    };
    for args in [["--sums", "nccl"], ["--min-ctas", "0"]] {
        let alone = bench(&args);
        assert!(alone.contains("add --ranks N"), "{args:?}: {alone}");
        // Without GPUs, or without CUDA: about that, then.
        let beside = bench(&[&args[..], &["--ranks", "64"]].concat());
        assert!(!beside.contains("--sums"), "{args:?}: {beside}");
    }
    let alone = bench(&["--offload-optimizer"]);
    assert!(alone.contains("add --ranks 1"), "{alone}");
    for (args, text) in [
        (
            ["--sums", "ncc"],
            "[possible values: peers, nccl, rank-order]",
        ),
        (["--min-ctas", "65"], "65 is not in 0..=64"),
    ] {
        let message = bench(&[&args[..], &["--ranks", "2"]].concat());
        assert!(message.contains(text), "{args:?}: {message}");
    }
}

#[test]
fn a_shape_that_does_not_fit_names_layer_numbers_and_remedy() {
    let message = rejected(&["--dim", "24", "--recipe", "mxfp8"]);
    for part in ["block0.qkv", "72x24", "mxfp8", "multiple of 32", "--dim 32"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

/// An output that is the input, or the other output, by whatever path or link.
#[cfg(unix)]
#[test]
fn outputs_are_files_of_their_own() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = |name: &str| path(&dir.path().join(name));
    fs::create_dir(file("sub")).expect("a folder");
    let text = vec![b'a'; 400];
    fs::write(file("text"), &text).expect("a written file");
    std::os::unix::fs::symlink(file("text"), file("link")).expect("a link");
    std::os::unix::fs::symlink(file("nothing"), file("dangling")).expect("a link");
    for (args, message) in [
        (["--data", "text", "--json", "text"], "--data and --json"),
        (
            ["--data", "link", "--report", "text"],
            "--data and --report",
        ),
        (
            ["--data", "text", "--json", "sub/../link"],
            "--data and --json",
        ),
        (
            ["--json", "a", "--report", "sub/../a"],
            "--json and --report",
        ),
        (["--json", "a", "--report", "dangling"], "not there"),
    ] {
        let args = [args[0], &file(args[1]), args[2], &file(args[3])];
        let found = rejected(&args);
        assert!(found.contains(message), "{args:?}: {found}");
    }
    assert_eq!(fs::read(file("text")).expect("the text"), text);
}

#[test]
fn the_last_seed_there_is_can_be_used() {
    let args = [
        "--seed",
        "18446744073709551615",
        "--recipe",
        "fp32",
        "--steps",
        "1",
    ];
    assert_eq!(lowp(&tiny(&args)).code, Some(0));
}

#[test]
fn short_data_is_rejected_and_long_enough_data_is_not() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("text");
    // Ten times the sequence and the byte that follows it.
    for (bytes, fits) in [(0, false), (329, false), (330, true)] {
        fs::write(&file, vec![b'a'; bytes]).expect("a written file");
        let args = ["--data", &path(&file), "--recipe", "fp32", "--steps", "1"];
        if fits {
            assert_eq!(lowp(&tiny(&args)).code, Some(0));
        } else {
            let message = rejected(&args);
            assert!(message.contains("at least 330 bytes"), "{message}");
        }
    }
}

/// Sizes that no machine has memory for: rejected with the bytes, not ended by the allocator.
#[cfg(target_os = "linux")]
#[test]
fn what_does_not_fit_into_memory_is_rejected() {
    let long = "--seq 65536 --layers 64 --batch 64 --dim 128";
    let wide = "--batch 65536 --seq 128 --layers 100 --dim 1024";
    for (args, option) in [(long, "--seq"), (wide, "--batch")] {
        let message = rejected(&args.split(' ').collect::<Vec<_>>());
        let needed = message
            .split_once("at least ")
            .and_then(|(_, rest)| rest.split_once(" bytes"));
        let needed: u128 = needed
            .and_then(|(bytes, _)| bytes.parse().ok())
            .expect(&message);
        assert!(needed > 1 << 44 && message.contains(option), "{message}");
    }
}

/// A pipe has no end that could be known, and perhaps no writer.
#[cfg(unix)]
#[test]
fn a_pipe_is_no_text() {
    let dir = tempfile::tempdir().expect("a folder");
    let pipe = path(&dir.path().join("pipe"));
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo runs").success());
    let message = rejected(&["--data", &pipe]);
    assert!(message.contains("no regular file"), "{message}");
}

#[test]
fn a_rejected_run_leaves_no_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let json = path(&dir.path().join("out.json"));
    rejected(&["--json", &json, "--report", "/no/such/folder/out.html"]);
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
}

/// What a run writes is no part of the text that it reads, and no text is replaced by it.
#[test]
fn outputs_in_the_folder_of_the_text() {
    let dir = tempfile::tempdir().expect("a folder");
    let text = dir.path().join("text.txt");
    fs::write(&text, "a text that is kept").expect("a file");
    let data = dir.path().display().to_string();
    for (option, name) in [
        ("--json", "text.txt"),
        ("--json", "run.json"),
        ("--report", "run.html"),
        ("--save", "saved"),
    ] {
        let path = dir.path().join(name).display().to_string();
        let message = rejected(&["--data", &data, option, &path]);
        assert!(
            message.contains(&format!("{option} {path} is inside --data")),
            "{message}"
        );
    }
    assert_eq!(fs::read(&text).expect("the text"), b"a text that is kept");
}

/// Layers that stay in bf16 take any shape.
#[test]
fn layers_in_bf16_need_no_blocks() {
    for kept in ["--keep-bf16 *", "--keep-bf16 block0.*"] {
        let words = format!(
            "train --no-baseline --dim 24 --heads 2 --layers 1 --seq 16 --steps 1 --batch 4 --eval-batches 1 {kept}"
        );
        let words: Vec<&str> = words.split(' ').collect();
        let outcome = lowp(&words);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    }
}

#[test]
fn a_text_that_is_too_short_is_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let text = dir.path().join("text.txt");
    fs::write(&text, "abc").expect("a file");
    let text = text.display().to_string();
    let message = rejected(&["--data", &text]);
    assert!(
        message.contains(&format!("--data {text} of 3 bytes is too short for --seq")),
        "{message}"
    );
}

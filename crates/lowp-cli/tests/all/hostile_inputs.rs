//! Inputs that state what is not so, or are no files at all: names and shapes of any length, rows without elements, pipes,
//! what a server or Git put in the place of a file.

use crate::support::{self, Args, Bench, f32s, matrix, recipes, tensor, values};
use safetensors::Dtype;
use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A file with this header and `data` bytes of zeros after it.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// Runs `lowp` with at most 4 GB of addresses and 20 s of processor time.
fn limited(bench: &Bench, line: &str) -> Output {
    let limits = "ulimit -v 4000000; ulimit -t 20; exec \"$@\"";
    Command::new("sh")
        .args(["-c", limits, "sh", env!("CARGO_BIN_EXE_lowp")])
        .args(line.words())
        .current_dir(bench.path(""))
        .output()
        .expect("lowp runs")
}

/// Nothing is allocated, and nothing walked, in proportion to rows that hold nothing.
#[cfg(target_os = "linux")]
#[test]
fn rows_without_elements_cost_nothing() {
    let bench = Bench::new();
    let entry = r#""dtype":"F32","data_offsets":[0,0]"#;
    for shape in ["[4294967296,0]", "[2,4294967296,0]", "[0,4294967296]"] {
        let header = format!("{{\"w\":{{{entry},\"shape\":{shape}}}}}");
        fs::write(bench.path("in.safetensors"), file(&header, 0)).expect("a file");
        for recipe in recipes() {
            // The lines of this one have a scale each, which a file of that many would have to hold.
            if recipe == "fp8-rowwise" {
                for (command, out) in [("quantize", "q.safetensors"), ("shard --world-size 3", "q")]
                {
                    let line = format!("{command} in.safetensors -o {out} --recipe {recipe}");
                    let output = limited(&bench, &line);
                    let stderr = String::from_utf8_lossy(&output.stderr);
                    assert_eq!(output.status.code(), Some(2), "{line}: {stderr}");
                    assert!(stderr.contains("at most 1048576 are written"), "{stderr}");
                    let kept = limited(&bench, &format!("{line} --skip-unsupported"));
                    assert!(kept.status.success(), "{line} --skip-unsupported");
                    if command == "quantize" {
                        fs::remove_file(bench.path(out)).expect("a file");
                    } else {
                        fs::remove_dir_all(bench.path(out)).expect("a folder");
                    }
                }
                continue;
            }
            for (form, line) in [
                ("padded", "quantize in.safetensors -o q.safetensors"),
                ("compact", "quantize in.safetensors -o q.safetensors"),
                ("padded", "verify q.safetensors --source in.safetensors"),
                ("padded", "inspect q.safetensors --reference in.safetensors"),
                ("padded", "dequantize q.safetensors -o d.safetensors"),
                ("padded", "shard in.safetensors -o ranks --world-size 3"),
                ("padded", "unshard ranks -o u.safetensors"),
                ("padded", "inspect ranks"),
                (
                    "padded",
                    "dequantize ranks/rank-00001-of-00003.safetensors -o d.safetensors",
                ),
            ] {
                let quantizes = line.starts_with("quantize") || line.starts_with("shard");
                let options = format!(" --recipe {recipe} --scales {form}");
                let line = format!("{line}{}", if quantizes { &options } else { "" });
                let output = limited(&bench, &line);
                let stderr = String::from_utf8_lossy(&output.stderr);
                assert!(
                    output.status.success(),
                    "{shape}: {line}: {} {stderr}",
                    output.status
                );
            }
            fs::remove_dir_all(bench.path("ranks")).expect("a folder");
            let (q, d) = (bench.read("q.safetensors"), bench.read("d.safetensors"));
            assert!(
                q.tensors.values().all(|(_, _, bytes)| bytes.len() <= 4),
                "{recipe}"
            );
            assert_eq!(d.tensors["w"].2.len(), 0, "{recipe}");
        }
    }
}

#[test]
fn names_can_neither_command_a_terminal_nor_fill_it() {
    let bench = Bench::new();
    for (name, shown) in [
        ("a\u{1b}[2J\nb".to_owned(), r"a\u{1b}[2J\nb"),
        ("a\u{202e}b\u{2066}".to_owned(), r"a\u{202e}b\u{2066}"),
        ("a\u{2028}b\u{2029}".to_owned(), r"a\u{2028}b\u{2029}"),
        (
            "a\u{200b}\u{feff}\u{ad}".to_owned(),
            r"a\u{200b}\u{feff}\u{ad}",
        ),
        ("n".repeat(65_536), "[.. 65440 more characters ..]"),
        ("\u{202e}".repeat(65_536), "[.. 65440 more characters ..]"),
    ] {
        bench.write("in.safetensors", &[f32s(&name, &[2, 33], &values(66, 1))]);
        // A name that sorts after all of these.
        bench.write("other.safetensors", &[matrix("\u{10fffd}", &[2, 33], 1)]);
        let mut texts = vec![
            bench.done("inspect in.safetensors"),
            bench.rejected(2, "quantize in.safetensors -o out --recipe mxfp8"),
            bench.rejected(
                2,
                "shard in.safetensors -o out --recipe mxfp8 --world-size 2",
            ),
            bench.rejected(1, "verify in.safetensors other.safetensors"),
        ];
        bench.write("in.safetensors", &[f32s(&name, &[2, 32], &values(64, 1))]);
        bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
        texts.push(bench.rejected(2, "quantize q.safetensors -o out --recipe mxfp8"));
        texts.push(bench.done("inspect q.safetensors"));
        // The file has the exact name.
        assert!(
            bench
                .read("q.safetensors")
                .tensors
                .contains_key(&format!("{name}.rowwise_data"))
        );
        for text in texts {
            assert!(
                text.contains(shown) && text.len() < 8192,
                "{} bytes: {:.4096}",
                text.len(),
                text
            );
            assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text}");
            assert!(
                !text.contains(['\u{202e}', '\u{2028}', '\u{200b}', '\u{2066}']),
                "{text}"
            );
        }
    }
}

#[test]
fn shapes_of_many_axes() {
    let bench = Bench::new();
    let ones = vec![1; 33_000];
    bench.write(
        "in.safetensors",
        &[f32s("w", &[&ones[..], &[32]].concat(), &values(32, 1))],
    );
    bench.write("other.safetensors", &[f32s("w", &[1, 32], &values(32, 1))]);
    let text = bench.done("inspect in.safetensors");
    assert!(
        text.contains("33001 axes") && text.len() < 2048,
        "{} bytes",
        text.len()
    );
    bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
    assert!(bench.done("inspect q.safetensors").len() < 4096);
    let message = bench.rejected(1, "verify in.safetensors other.safetensors");
    assert!(
        message.contains("33001 axes") && message.len() < 2048,
        "{message}"
    );
    let message = bench.rejected(1, "verify q.safetensors --source other.safetensors");
    assert!(message.len() < 2048, "{message}");
    // More elements than there are: the message of a shape that is too large tells the shape.
    let header = format!(
        "{{\"w\":{{\"dtype\":\"F32\",\"shape\":[{}0],\"data_offsets\":[0,0]}}}}",
        "9,".repeat(33_000)
    );
    fs::write(bench.path("in.safetensors"), file(&header, 0)).expect("a file");
    for command in [
        "inspect in.safetensors",
        "quantize in.safetensors -o out --recipe mxfp8",
    ] {
        assert!(bench.rejected(2, command).len() < 4096);
    }
}

/// A pipe without a writer is not waited for, a device is not read.
#[cfg(unix)]
#[test]
fn pipes_and_devices_are_rejected_at_once() {
    let bench = Bench::new();
    bench.write("good.safetensors", &[matrix("w", &[32, 32], 1)]);
    bench.done("quantize good.safetensors -o q.safetensors --recipe mxfp8");
    fs::create_dir(bench.path("ranks")).expect("a folder");
    for pipe in ["pipe", "pipe.json", "ranks/rank-00000-of-00001.safetensors"] {
        let made = Command::new("mkfifo").arg(bench.path(pipe)).status();
        assert!(made.expect("mkfifo runs").success());
    }
    for input in ["pipe", "pipe.json", "/dev/zero", "/dev/tty"] {
        for line in [
            format!("quantize {input} -o out --recipe mxfp8"),
            format!("shard {input} -o out --recipe mxfp8 --world-size 2"),
            format!("dequantize {input} -o out"),
            format!("inspect {input}"),
            format!("inspect q.safetensors --reference {input}"),
            format!("verify good.safetensors {input}"),
            format!("verify {input} good.safetensors"),
            format!("verify q.safetensors --source {input}"),
            "unshard ranks -o out".to_owned(),
            "inspect ranks".to_owned(),
        ] {
            let mut child = Command::new(env!("CARGO_BIN_EXE_lowp"))
                .args(line.words())
                .current_dir(bench.path(""))
                .stderr(Stdio::piped())
                .spawn()
                .expect("lowp starts");
            let start = Instant::now();
            while child.try_wait().expect("a status").is_none() {
                if start.elapsed() > Duration::from_secs(60) {
                    child.kill().expect("it ends");
                    panic!("{line}: waits");
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            let output = child.wait_with_output().expect("an end");
            let message = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{line}: {message}");
            assert!(message.contains("no regular file"), "{line}: {message}");
        }
    }
}

#[test]
fn what_is_often_given_in_the_place_of_a_model() {
    let bench = Bench::new();
    bench.write("good.safetensors", &[matrix("w", &[32, 32], 1)]);
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    let page = "\n<!DOCTYPE html>\n<html><body>Please log in</body></html>\n";
    for (text, expected) in [(pointer, "git lfs pull"), (page, "a web page")] {
        for name in ["in.safetensors", "in.safetensors.index.json"] {
            fs::write(bench.path(name), text).expect("a file");
            for line in [
                format!("quantize {name} -o out --recipe mxfp8"),
                format!("inspect {name}"),
                format!("verify good.safetensors {name}"),
            ] {
                let message = bench.rejected(2, &line);
                assert!(message.contains(expected), "{line}: {message}");
            }
        }
    }
}

/// A file of codes without what they mean is not the same model, whichever side it is on.
#[test]
fn verify_asks_for_the_metadata_of_both() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[32, 32], 1)]);
    bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
    let found = bench.read("q.safetensors");
    let tensors: Vec<support::Tensor> = found
        .names()
        .into_iter()
        .map(|name| {
            let (dtype, shape, bytes) = found.tensors[name].clone();
            tensor(name, dtype, &shape, bytes)
        })
        .collect();
    bench.write("bare.safetensors", &tensors);
    for line in [
        "verify q.safetensors bare.safetensors",
        "verify bare.safetensors q.safetensors",
    ] {
        let message = bench.rejected(1, line);
        assert!(
            message.contains("bare.safetensors lacks its metadata"),
            "{line}: {message}"
        );
        assert!(message.contains("'w'"), "{line}: {message}");
    }
    bench.done("verify bare.safetensors bare.safetensors");
}

/// Indices, masks and packed codes are no weights, of whatever shape.
#[test]
fn integers_pass_through() {
    let bench = Bench::new();
    let dtypes = [Dtype::I64, Dtype::U8, Dtype::BOOL, Dtype::I32, Dtype::U16];
    let mut tensors: Vec<support::Tensor> = dtypes
        .iter()
        .map(|&dtype| {
            tensor(
                &format!("i.{dtype:?}"),
                dtype,
                &[4, 32],
                vec![1; 4 * 32 * dtype.bitsize() / 8],
            )
        })
        .collect();
    tensors.push(matrix("w", &[32, 32], 1));
    bench.write("in.safetensors", &tensors);
    bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
    bench.done("quantize in.safetensors -o k.safetensors --recipe mxfp8 --skip-unsupported");
    bench.done("shard in.safetensors -o ranks --world-size 2 --recipe mxfp8");
    bench.done("unshard ranks -o u.safetensors");
    bench.done("verify q.safetensors k.safetensors");
    bench.done("verify q.safetensors u.safetensors");
    bench.done("verify q.safetensors --source in.safetensors");
    let found = bench.read("q.safetensors");
    for t in &tensors[..5] {
        assert_eq!(
            found.tensors[&t.name],
            (t.dtype, t.shape.clone(), t.bytes.clone())
        );
    }
    let quiet = bench.lowp("quantize in.safetensors -o q.safetensors --recipe mxfp8");
    assert!(
        quiet.stdout.is_empty() && quiet.stderr.is_empty(),
        "scripts get no message"
    );
    let verbose = bench.lowp("quantize in.safetensors -o q.safetensors --recipe mxfp8 -v");
    let text = String::from_utf8_lossy(&verbose.stderr).into_owned();
    assert!(
        text.contains("matrices of integers that passed through: 5")
            && text.contains("'i.I64' (I64)"),
        "{text}"
    );
    let message = bench.rejected(
        2,
        "quantize in.safetensors -o out --recipe mxfp8 --tensors i.*",
    );
    assert!(
        message.contains("matches no tensor of two or more dimensions that does not hold integers"),
        "{message}"
    );
}

#[test]
fn what_is_left_as_it_was_is_named() {
    let bench = Bench::new();
    let mut tensors: Vec<support::Tensor> = (0..5)
        .map(|i| matrix(&format!("unfit{i}"), &[2, 33], i))
        .collect();
    bench.write("unfit.safetensors", &tensors);
    tensors.push(matrix("even", &[32, 32], 9));
    bench.write("in.safetensors", &tensors);
    let notes = |line: &str| {
        let output = bench.lowp(line);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success() && output.stdout.is_empty(),
            "{text}"
        );
        text
    };
    for line in [
        "quantize in.safetensors -o q.safetensors --recipe mxfp8 --skip-unsupported",
        "shard in.safetensors -o ranks --world-size 2 --recipe mxfp8 --skip-unsupported",
    ] {
        let text = notes(line);
        assert!(text.contains("passed through: 5: 'unfit0' ("), "{text}");
        assert!(
            text.contains("33") && text.contains("and 2 more (--verbose names all)"),
            "{text}"
        );
        assert!(
            !text.contains("unfit3") && text.lines().count() == 1,
            "{text}"
        );
    }
    let text = notes(
        "quantize in.safetensors -o q.safetensors --recipe mxfp8 --skip-unsupported --verbose",
    );
    assert!(
        (0..5).all(|i| text.contains(&format!("  'unfit{i}' ("))),
        "{text}"
    );
    let text =
        notes("quantize unfit.safetensors -o q.safetensors --recipe mxfp8 --skip-unsupported");
    assert!(text.starts_with("warning: nothing was quantized"), "{text}");
    bench.write("norm.safetensors", &[matrix("norm", &[8], 1)]);
    let text = notes("quantize norm.safetensors -o q.safetensors --recipe mxfp8");
    assert!(text.starts_with("warning: nothing was quantized"), "{text}");
}

/// One line for people: how many tensors, bytes in and out, and the time.
#[test]
fn success_is_printed_for_people_only() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[matrix("w", &[32, 32], 1), matrix("n", &[7], 2)],
    );
    for (line, expected) in [
        (
            "quantize in.safetensors -o q.safetensors --recipe mxfp8",
            "quantized 1 of 2 tensors",
        ),
        (
            "shard in.safetensors -o ranks --recipe mxfp8 --world-size 2",
            "sharded 1 of 2 tensors",
        ),
        (
            "unshard ranks -o u.safetensors",
            "gathered 1 tensors of 2 ranks",
        ),
        (
            "dequantize q.safetensors -o d.safetensors",
            "dequantized 1 of 2 tensors",
        ),
    ] {
        let quiet = bench.lowp(line);
        assert!(quiet.status.success() && quiet.stderr.is_empty(), "{line}");
        if line.starts_with("shard") {
            fs::remove_dir_all(bench.path("ranks")).expect("a folder");
        }
        let verbose = bench.lowp(&format!("{line} -v"));
        let text = String::from_utf8_lossy(&verbose.stderr).into_owned();
        assert!(
            verbose.stdout.is_empty() && text.lines().count() == 1,
            "{text}"
        );
        assert!(text.starts_with(expected), "{text}");
        assert!(
            text.contains(" in, ") && text.contains(" out, ") && text.ends_with(" s\n"),
            "{text}"
        );
    }
}

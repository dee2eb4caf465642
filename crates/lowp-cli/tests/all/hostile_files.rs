//! Files that are cut off, malformed or made to harm: exit code 2, one message, nothing written.

use crate::support::{self, Bench, f32s, values};

/// A file with this header and `data` bytes of zeros after it.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// A tensor of a header.
fn entry(name: &str, dtype: &str, shape: &str, start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
}

fn rejected(bytes: &[u8], expected: &str) {
    let bench = Bench::new();
    std::fs::write(bench.path("in.safetensors"), bytes).expect("a file");
    std::fs::write(bench.path("good.safetensors"), file("{}", 0)).expect("a file");
    for args in [
        &[
            "quantize",
            "in.safetensors",
            "-o",
            "out",
            "--recipe",
            "mxfp8",
        ][..],
        &["dequantize", "in.safetensors", "-o", "out"],
        &[
            "shard",
            "in.safetensors",
            "-o",
            "out",
            "--recipe",
            "mxfp8",
            "--world-size",
            "2",
        ],
        &["inspect", "in.safetensors"],
        &["verify", "good.safetensors", "in.safetensors"],
    ] {
        let message = bench.rejected(2, args);
        assert!(
            message.contains(expected),
            "{args:?}: '{expected}' is not in: {message}"
        );
    }
}

#[test]
fn headers() {
    let two = |a: &str, b: &str| format!("{{{a},{b}}}");
    let one = |e: String| format!("{{{e}}}");
    let w = |start, end| entry("w", "F32", "[2,2]", start, end);
    let v = |start, end| entry("v", "F32", "[2,2]", start, end);
    let deep = format!("{{\"w\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    for (bytes, expected) in [
        (Vec::new(), "too few"),
        (vec![1, 2, 3], "too few"),
        (
            u64::MAX.to_le_bytes().to_vec(),
            "longer than the format allows",
        ),
        (vec![9, 0, 0, 0, 0, 0, 0, 0, b'{'], "cut off"),
        (file("not json", 0), "no valid JSON object"),
        (file("[]", 0), "no valid JSON object"),
        (file(&deep, 0), "no valid JSON object"),
        (file(&one(w(0, 16)), 15), "1 bytes are missing at the end"),
        (file(&one(w(0, 16)), 17), "1 bytes after the last tensor"),
        (file(&one(w(0, u64::MAX)), 16), "missing at the end"),
        (file(&one(w(16, 0)), 16), "before it begins"),
        (file(&two(&w(0, 16), &v(8, 24)), 24), "'w' and 'v' overlap"),
        (file(&two(&w(0, 16), &v(24, 40)), 40), "belong to no tensor"),
        (file(&two(&w(0, 16), &w(16, 32)), 32), "'w' is there twice"),
        (
            file(&one(entry("w", "F32", "[2,3]", 0, 16)), 16),
            "more or fewer bytes",
        ),
        (
            file(
                &one(entry(
                    "w",
                    "F32",
                    "[4294967296,4294967296,4294967296]",
                    0,
                    16,
                )),
                16,
            ),
            "address",
        ),
        (
            file(&one(entry("w", "F99", "[2,2]", 0, 16)), 16),
            "no safetensors header",
        ),
        (
            file(&one(entry("w", "F32", "[-2,-2]", 0, 16)), 16),
            "no safetensors header",
        ),
        (
            file(r#"{"__metadata__":{"a":1}}"#, 0),
            "no safetensors header",
        ),
        (file(r#"{"w":{"dtype":"F32","shape":[2,2]}}"#, 0), "header"),
    ] {
        rejected(&bytes, expected);
    }
}

#[test]
fn every_truncation_of_a_real_file() {
    let bench = Bench::new();
    bench.write("whole.safetensors", &[f32s("w", &[4, 32], &values(128, 1))]);
    let whole = std::fs::read(bench.path("whole.safetensors")).expect("a file");
    for length in (0..whole.len()).step_by(7).chain([whole.len() - 1]) {
        std::fs::write(bench.path("in.safetensors"), &whole[..length]).expect("a file");
        bench.rejected(2, "quantize in.safetensors -o out --recipe mxfp8");
    }
}

#[test]
fn indexes() {
    let bench = Bench::new();
    bench.write("a.safetensors", &[f32s("w", &[1, 32], &values(32, 1))]);
    bench.write("same.safetensors", &[f32s("w", &[1, 32], &values(32, 1))]);
    for (index, expected) in [
        ("", "no index of a sharded model"),
        ("{}", "no index of a sharded model"),
        (r#"{"weight_map": {"w": 1}}"#, "no index of a sharded model"),
        (
            r#"{"weight_map": {"w": "a.safetensors", "w": "a.safetensors"}}"#,
            "'w' is there twice",
        ),
        (
            r#"{"weight_map": {"w": "b.safetensors"}}"#,
            "'b.safetensors', which is missing",
        ),
        (
            r#"{"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}"#,
            "does not hold it",
        ),
        (
            r#"{"weight_map": {"w": "../a.safetensors"}}"#,
            "no file name beside the index",
        ),
        (
            r#"{"weight_map": {"w": "/etc/passwd"}}"#,
            "no file name beside the index",
        ),
        (
            r#"{"weight_map": {"w": ""}}"#,
            "it puts 'w' into '', which is no file name beside the index",
        ),
        (
            r#"{"weight_map": {"w": "."}}"#,
            "no file name beside the index",
        ),
        (
            r#"{"weight_map": {"w": "a.safetensors", "x": "same.safetensors"}}"#,
            "holds too",
        ),
    ] {
        std::fs::write(bench.path("m.index.json"), index).expect("an index");
        let message = bench.rejected(2, "quantize m.index.json -o out --recipe mxfp8");
        assert!(message.contains(expected), "{index}: {message}");
    }
    bench.write(
        "a.safetensors",
        &[f32s("w", &[1, 32], &values(32, 1)), f32s("v", &[1], &[1.0])],
    );
    std::fs::write(
        bench.path("m.index.json"),
        r#"{"weight_map": {"w": "a.safetensors"}}"#,
    )
    .expect("an index");
    let message = bench.rejected(2, "inspect m.index.json");
    assert!(
        message.contains("'v', which the index does not name"),
        "{message}"
    );
}

#[test]
fn metadata() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[f32s("w", &[32, 32], &values(1024, 1))]);
    bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
    let found = bench.read("q.safetensors");
    let good = found.metadata["lowp.tensor.w"].clone();
    let key = "lowp.tensor.w";
    let change = |from: &str, to: &str| {
        assert!(good.contains(from), "{good}");
        good.replace(from, to)
    };
    for (key, value, expected) in [
        ("lowp.format", "2".to_owned(), "reads '1'"),
        (key, "{".to_owned(), "make no sense"),
        (key, change("mxfp8", "mxfp0"), "there is no recipe"),
        (key, change("e4m3", "e9m9"), "no format 'e9m9'"),
        (key, change("\"both\"", "\"all\""), "no usage 'all'"),
        (key, change("padded", "folded"), "no scales 'folded'"),
        (key, change("[32,32]", "[64,32]"), "the metadata asks for"),
        (key, change("[32,32]", "[32,33]"), "multiple of 32"),
        (key, change("[32,32]", "[32]"), "fewer than two dimensions"),
        (
            key,
            change("[32,32]", "[18446744073709551615,0]"),
            "more elements",
        ),
        (
            key,
            change("[32,32]", "[4611686018427387904,32]"),
            "more elements",
        ),
        (key, change("mxfp8", "nvfp4-1d"), "make no sense"),
        (
            key,
            change("\"usage\"", "\"extra\":1,\"usage\""),
            "unknown field",
        ),
        ("lowp.tensor.v", good.clone(), "'v.rowwise_data' is missing"),
    ] {
        let tensors: Vec<support::Tensor> = found
            .names()
            .into_iter()
            .map(|name| {
                let (dtype, shape, bytes) = found.tensors[name].clone();
                support::tensor(name, dtype, &shape, bytes)
            })
            .collect();
        let mut metadata = found.metadata.clone();
        metadata.insert(key.to_owned(), value.clone());
        let metadata: Vec<(&str, &str)> = metadata
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        bench.write_with("bad.safetensors", &tensors, &metadata);
        for args in [
            &["dequantize", "bad.safetensors", "-o", "out"][..],
            &["inspect", "bad.safetensors"],
        ] {
            let message = bench.rejected(2, args);
            assert!(message.contains(expected), "{value}: {message}");
        }
    }
}

/// Names mean nothing to the commands: they are never paths.
#[test]
fn any_name_is_only_a_name() {
    let bench = Bench::new();
    let names = [
        "",
        "../up",
        "/abs",
        "a/b",
        "a",
        "a.rowwise",
        "\u{fc}\u{f1}",
        "sp ace",
        ".",
    ];
    let tensors = names.map(|name| f32s(name, &[33, 32], &values(33 * 32, 1)));
    bench.write("in.safetensors", &tensors);
    let before = bench.listing();
    let quantize = [
        "quantize",
        "in.safetensors",
        "-o",
        "q.safetensors",
        "--recipe",
        "mxfp8",
    ];
    bench.done(&quantize);
    bench.done("shard in.safetensors -o ranks --world-size 2 --recipe mxfp8");
    bench.done("unshard ranks -o u");
    bench.done("verify q.safetensors u");
    bench.done("dequantize u -o d");
    let mut expected = names;
    expected.sort_unstable();
    assert_eq!(bench.read("d/model.safetensors").names(), expected);
    let mut after = [
        before,
        ["d", "q.safetensors", "ranks", "u"]
            .map(str::to_owned)
            .to_vec(),
    ]
    .concat();
    after.sort();
    assert_eq!(bench.listing(), after);
}

#[test]
fn paths_that_are_no_files() {
    let bench = Bench::new();
    std::fs::create_dir(bench.path("folder")).expect("a folder");
    for input in ["absent.safetensors", "folder", "/dev/null"] {
        bench.rejected(2, &format!("quantize {input} -o out --recipe mxfp8"));
    }
}

#[cfg(unix)]
#[test]
fn a_pipe_in_an_index_is_called_one() {
    let bench = Bench::new();
    let made = std::process::Command::new("mkfifo")
        .arg(bench.path("a.safetensors"))
        .status();
    assert!(made.expect("mkfifo runs").success());
    let index = r#"{"weight_map": {"w": "a.safetensors"}}"#;
    std::fs::write(bench.path("m.index.json"), index).expect("an index");
    let message = bench.rejected(2, "inspect m.index.json");
    assert!(message.contains("a pipe or a device"), "{message}");
    assert!(!message.contains("missing"), "{message}");
}

#[test]
fn a_repeated_key_of_the_metadata_is_an_error() {
    let tensor = r#""w":{"dtype":"F32","shape":[1,4],"data_offsets":[0,16]}"#;
    for (metadata, is_error) in [
        (r#"{"a":"1","b":"2"}"#, false),
        (r#"{"a":"1","b":"2","a":"1"}"#, true),
    ] {
        let header = format!(r#"{{"__metadata__":{metadata},{tensor}}}"#);
        let bench = Bench::new();
        std::fs::write(bench.path("in.safetensors"), file(&header, 16)).expect("a file");
        if is_error {
            let message = bench.rejected(2, "inspect in.safetensors");
            assert!(
                message.contains("the key 'a' of '__metadata__' is there twice"),
                "{message}"
            );
        } else {
            bench.done("inspect in.safetensors");
        }
    }
}

/// Keys of ours are those of the version that the file states, for every command; a file without any is somebody else's.
#[test]
fn keys_of_ours_need_their_version() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[f32s("w", &[32, 32], &values(1024, 1))]);
    bench.done("quantize in.safetensors -o q.safetensors --recipe mxfp8");
    let found = bench.read("q.safetensors");
    let text = found.metadata["lowp.tensor.w"].as_str();
    let write = |name: &str, metadata: &[(&str, &str)]| {
        let tensors: Vec<support::Tensor> = found
            .tensors
            .iter()
            .map(|(name, (dtype, shape, bytes))| {
                support::tensor(name, *dtype, shape, bytes.clone())
            })
            .collect();
        bench.write_with(name, &tensors, metadata);
    };
    let tensor = ("lowp.tensor.w", text);
    for (metadata, expected) in [
        (&[tensor][..], "'lowp.tensor.w' and no lowp.format"),
        (
            &[("lowp.version", "1"), tensor],
            "'lowp.tensor.w' and no lowp.format",
        ),
        (&[("lowp.Format", "1")], "'lowp.Format' and no lowp.format"),
        (
            &[("lowp.format", "1.0"), tensor],
            "lowp.format is '1.0' and this program reads '1'",
        ),
        (&[("lowp.format", "")], "lowp.format is ''"),
        (
            &[("lowp.format", "1"), ("lowp.tensors.w", text)],
            "'lowp.tensors.w' is none of lowp.format '1'",
        ),
    ] {
        write("bad.safetensors", metadata);
        for command in [
            "verify bad.safetensors q.safetensors",
            "verify q.safetensors bad.safetensors",
            "verify bad.safetensors --source in.safetensors",
            "inspect bad.safetensors",
            "inspect q.safetensors --reference bad.safetensors",
            "dequantize bad.safetensors -o out",
            "quantize bad.safetensors -o out --recipe mxfp8",
            "shard bad.safetensors -o out --recipe mxfp8 --world-size 2",
        ] {
            let message = bench.rejected(2, command);
            assert!(message.contains(expected), "{command}: {message}");
        }
    }
    for metadata in [&[][..], &[("format", "pt"), ("lowp", "1")]] {
        write("foreign.safetensors", metadata);
        let text = bench.done("inspect foreign.safetensors");
        assert!(text.contains(", 0 quantized, "), "{text}");
        let message = bench.rejected(1, "verify q.safetensors foreign.safetensors");
        assert!(message.contains("lacks its metadata"), "{message}");
    }
}

/// Of a sharded model the metadata of all files count, and each has the version.
#[test]
fn files_of_a_model_agree_on_its_metadata() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[f32s("w", &[32, 32], &values(1024, 1))]);
    bench.done("quantize in.safetensors -o a.safetensors --recipe mxfp8");
    let text = bench.read("a.safetensors").metadata["lowp.tensor.w"].clone();
    let places: Vec<String> = bench
        .read("a.safetensors")
        .names()
        .iter()
        .map(|name| format!(r#""{name}":"a.safetensors""#))
        .collect();
    let index = format!(
        r#"{{"weight_map":{{{},"v":"b.safetensors"}}}}"#,
        places.join(",")
    );
    std::fs::write(bench.path("m.index.json"), index).expect("an index");
    let other = text.replace("padded", "swizzled");
    for (metadata, expected) in [
        (&[][..], None),
        (&[("lowp.format", "1"), ("lowp.tensor.w", &text)], None),
        (
            &[("lowp.format", "1"), ("lowp.tensor.w", &other)],
            Some("not those of another file"),
        ),
        (&[("lowp.tensor.w", &text)], Some("no lowp.format")),
        (&[("lowp.format", "2")], Some("reads '1'")),
    ] {
        let v = f32s("v", &[4], &values(4, 1));
        bench.write_with("b.safetensors", &[v], metadata);
        match expected {
            None => assert!(
                bench
                    .done("inspect m.index.json")
                    .contains(", 1 quantized, ")
            ),
            Some(expected) => {
                let message = bench.rejected(2, "inspect m.index.json");
                assert!(message.starts_with("error: b.safetensors: "), "{message}");
                assert!(message.contains(expected), "{message}");
            }
        }
    }
}

//! The files that commands write: replaced or left as a whole, the same every time.

use crate::support::{Bench, bf16s, matrix, values};

const QUANTIZE: &str = "quantize in.safetensors -o q.safetensors --recipe mxfp8";

#[test]
fn an_existing_output_is_replaced_and_an_input_is_not() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[32, 32], 1)]);
    std::fs::write(bench.path("q.safetensors"), "old").expect("a file");
    bench.done(QUANTIZE);
    let before = std::fs::read(bench.path("in.safetensors")).expect("a file");
    let message = bench.rejected(
        2,
        "quantize in.safetensors -o ./in.safetensors --recipe mxfp8",
    );
    assert!(message.contains("it is the input"), "{message}");
    assert_eq!(
        std::fs::read(bench.path("in.safetensors")).expect("a file"),
        before
    );
    bench.rejected(
        2,
        "quantize in.safetensors -o no/such/folder --recipe mxfp8",
    );
    std::fs::write(bench.path("file"), "").expect("a file");
    for (output, expected) in [
        (".", "it is the folder of the input"),
        ("x.safetensors/y", "there is no folder"),
        ("in.safetensors/", "is no folder"),
        (
            "file",
            "a name that does not end in .safetensors is a folder",
        ),
    ] {
        let message = bench.rejected(
            2,
            &format!("quantize in.safetensors -o {output} --recipe mxfp8"),
        );
        assert!(message.contains(expected), "{message}");
    }
}

/// Caches and signatures work on whole files.
#[test]
fn the_same_command_writes_the_same_file() {
    let bench = Bench::new();
    bench.write_with(
        "in.safetensors",
        &[
            matrix("w", &[32, 64], 1),
            bf16s("head", &[33, 32], &values(33 * 32, 2)),
            matrix("norm", &[7], 3),
        ],
        &[("format", "pt"), ("author", "x"), ("date", "y")],
    );
    let mut files = Vec::new();
    for name in ["1", "2", "3"] {
        bench.done(&format!(
            "quantize in.safetensors -o {name} --recipe nvfp4-1d"
        ));
        let name = format!("{name}/model.safetensors");
        files.push(std::fs::read(bench.path(&name)).expect("a file"));
    }
    assert!(files.windows(2).all(|pair| pair[0] == pair[1]));
    // Tensors begin at a multiple of their dtype's size, as readers that map files expect.
    let header = u64::from_le_bytes(*files[0].first_chunk().expect("a length"));
    assert_eq!(header % 8, 0);
}

/// Ranks and unshard keep what quantize would: the file that a user gets has the permissions of any new file.
#[cfg(unix)]
#[test]
fn outputs_have_the_permissions_of_new_files() {
    use std::os::unix::fs::PermissionsExt;
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[32, 32], 1)]);
    bench.done(QUANTIZE);
    bench.done("shard in.safetensors -o ranks --world-size 1 --recipe mxfp8");
    std::fs::write(bench.path("file"), "").expect("a file");
    std::fs::create_dir(bench.path("folder")).expect("a folder");
    let mode = |name: &str| {
        let data = std::fs::metadata(bench.path(name)).expect(name);
        data.permissions().mode()
    };
    assert_eq!(mode("q.safetensors"), mode("file"));
    assert_eq!(mode("ranks/rank-00000-of-00001.safetensors"), mode("file"));
    assert_eq!(mode("ranks"), mode("folder"));
}

/// Who could not read a file cannot read what replaces it, nor what is written to replace it.
#[cfg(unix)]
#[test]
fn what_replaces_an_output_has_its_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[32, 32], 1)]);
    let mode = |name: &str| {
        let data = std::fs::metadata(bench.path(name)).expect(name);
        data.permissions().mode() & 0o7777
    };
    let set = |name: &str, mode: u32| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(bench.path(name), permissions).expect(name);
    };
    std::fs::write(bench.path("q.safetensors"), "old").expect("a file");
    for expected in [0o600, 0o640, 0o666, 0o400] {
        set("q.safetensors", expected);
        bench.done(QUANTIZE);
        assert_eq!(mode("q.safetensors"), expected);
    }
    // Others' permission to run as the owner of the old file is not given to run as that of the new one.
    set("q.safetensors", 0o4755);
    bench.done(QUANTIZE);
    assert_eq!(mode("q.safetensors"), 0o755);
    std::fs::create_dir(bench.path("ranks")).expect("a folder");
    set("ranks", 0o700);
    bench.done("shard in.safetensors -o ranks --world-size 1 --recipe mxfp8");
    assert_eq!(mode("ranks"), 0o700);
}

#[test]
fn output_names_that_collide() {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[matrix("w", &[32, 32], 1), matrix("w.rowwise_data", &[4], 2)],
    );
    let message = bench.rejected(2, QUANTIZE);
    assert!(message.contains("'w.rowwise_data'"), "{message}");
}

/// Its codes would pass for an integer tensor, and what they mean would be lost.
#[test]
fn a_quantized_model_is_not_quantized_again() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[32, 32], 1)]);
    bench.done(QUANTIZE);
    for command in ["quantize", "shard --world-size 2"] {
        let line = format!("{command} q.safetensors -o again --recipe nvfp4-2d --skip-unsupported");
        let message = bench.rejected(2, &line);
        assert!(message.contains("'w' is quantized already"), "{message}");
    }
}

#[test]
fn names_that_would_be_read_as_something_else() {
    let bench = Bench::new();
    bench.write("in.safetensors", &[matrix("w", &[32, 64], 1)]);
    for (name, expected) in [
        ("q.safetensors.index.json", "index of a sharded model"),
        ("q.json", "index of a sharded model"),
        ("-", "standard output is no place for it"),
    ] {
        let message = bench.rejected(
            2,
            &format!("quantize in.safetensors -o {name} --recipe mxfp8"),
        );
        assert!(message.contains(expected), "{message}");
    }
    let line = "shard in.safetensors -o - --recipe mxfp8 --world-size 2";
    let message = bench.rejected(2, line);
    assert!(message.contains("standard output"), "{message}");
    bench.done("quantize in.safetensors -o ./- --recipe mxfp8");
    assert!(bench.path("-").is_dir());
}

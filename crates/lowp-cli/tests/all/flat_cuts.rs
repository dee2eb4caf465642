//! `lowp quantize --flat-cuts`: the same file for any cuts, and clear errors for those that make no sense.

use crate::support::{Bench, bf16s, f16s, matrix, recipes, tensor, values};
use safetensors::Dtype;

/// Tensors of three dtypes, of several lengths, and some that pass through.
fn model() -> Bench {
    let bench = Bench::new();
    bench.write(
        "in.safetensors",
        &[
            matrix("a", &[33, 64], 1),
            bf16s("b", &[32, 96], &values(32 * 96, 2)),
            f16s("c", &[2, 3, 32], &values(6 * 32, 3)),
            matrix("none", &[0, 64], 4),
            matrix("norm", &[64], 5),
            tensor("ids", Dtype::I64, &[2, 32], vec![7; 512]),
        ],
    );
    bench
}

#[test]
fn flat_cuts_do_not_show_in_the_file() {
    let bench = model();
    for recipe in recipes().iter().chain(&["fp32", "bf16"]) {
        for options in ["", "--usage columnwise", "--usage rowwise --scales compact"] {
            let line = |file: &str| {
                format!("quantize in.safetensors -o {file}.safetensors --recipe {recipe} {options}")
            };
            bench.done(&line("whole"));
            let whole = std::fs::read(bench.path("whole.safetensors")).expect("a file");
            // Through bytes, rows and blocks; ranks of one element and of none; one end of every tensor.
            for cuts in ["1", "0,1,2,3,3,191,192,1111,3072"] {
                bench.done(&format!("{} --flat-cuts {cuts}", line("flat")));
                let flat = std::fs::read(bench.path("flat.safetensors")).expect("a file");
                assert!(flat == whole, "{recipe} {options}: cut at {cuts}");
            }
        }
    }
}

#[test]
fn a_given_scale_and_a_selection_go_with_flat_cuts() {
    let bench = model();
    for (recipe, options) in [
        ("fp8-delayed", "--delayed-scale 3 --tensors a"),
        ("fp8-current", "--pow2 --ignore b"),
        ("mxfp8", "--scale-mode ocp-floor --tensors c --tensors b"),
    ] {
        let line = |file: &str| {
            format!("quantize in.safetensors -o {file}.safetensors --recipe {recipe} {options}")
        };
        bench.done(&line("whole"));
        bench.done(&format!("{} --flat-cuts 7,50", line("flat")));
        bench.done("verify whole.safetensors flat.safetensors");
        bench.done("verify flat.safetensors --source in.safetensors");
    }
}

#[test]
fn cuts_that_make_no_sense_are_errors_with_the_numbers() {
    let bench = model();
    let line = |cuts: &str| {
        format!("quantize in.safetensors -o q.safetensors --recipe mxfp8 --flat-cuts {cuts}")
    };
    let message = bench.rejected(2, &line("5,9,8"));
    assert!(
        message.contains("8 comes after 9") && message.contains("ascending"),
        "{message}"
    );
    let message = bench.rejected(2, &line("5,3073"));
    for part in ["3073", "'b'", "32x96", "3072"] {
        assert!(message.contains(part), "{message}");
    }
    let four = line("5").replace("mxfp8", "nvfp4-2d --four-over-six mae");
    let message = bench.rejected(2, &four);
    for part in ["four over six", "whole blocks", "between rows"] {
        assert!(message.contains(part), "{message}");
    }
    let many: Vec<String> = (0..1024).map(|cut| cut.to_string()).collect();
    let message = bench.rejected(2, &line(&many.join(",")));
    assert!(
        message.contains("1025") && message.contains("1023"),
        "{message}"
    );
    for cuts in ["-1", "x", "1,,2"] {
        let output = bench.lowp(&line(cuts));
        assert_eq!(output.status.code(), Some(2), "{cuts}");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            text.contains("flat-cuts") || text.contains("'-1'"),
            "{text}"
        );
    }
}

//! Plans with the states of each optimizer in every dtype.

use super::model::{trains_as_planned, words};
use crate::cli::{lowp, stdout, tiny};

/// Memory and traffic with any states are those that a run has, and what they save is said.
#[test]
fn states_of_every_optimizer_and_dtype() {
    for state in [
        "--optimizer-state exp_avg=bf16,exp_avg_sq=bf16",
        "--optimizer-state exp_avg=bf16",
        "--optimizer lion",
        "--optimizer sgd --optimizer-state momentum_buffer=bf16",
        "--optimizer muon --optimizer-state exp_avg=bf16",
        "--optimizer-state master=bf16,exp_avg=fp8,exp_avg_sq=fp8",
    ] {
        for sharding in ["fsdp", "zero1"] {
            let options = format!("--world-size 3 --sharding {sharding} {state}");
            trains_as_planned("mxfp8-2d,fp8-current", &options);
        }
    }
    // One rank owns every matrix; of many, each some.
    for options in ["--world-size 1", "--world-size 2 --accumulate 2"] {
        let options = format!("{options} --optimizer moonlight");
        trains_as_planned("mxfp8-2d,fp8-current", &options);
    }
    for (state, per_parameter) in [
        ("", "13.00 bytes per parameter"),
        (
            "--optimizer-state exp_avg=bf16",
            "11.00 bytes per parameter",
        ),
        (
            "--optimizer-state exp_avg_sq=bf16,exp_avg=bf16",
            "9.00 bytes per parameter",
        ),
        ("--optimizer lion", "9.00 bytes per parameter"),
        ("--optimizer moonlight", "9.00 bytes per parameter"),
        (
            "--optimizer sgd --optimizer-state momentum_buffer=bf16",
            "7.00 bytes per parameter",
        ),
        (
            "--optimizer-state master=bf16,exp_avg=fp8,exp_avg_sq=fp8",
            "5.06 bytes per parameter",
        ),
    ] {
        let options = format!("plan --model 1b --world-size 8 --recipe mxfp8-2d {state}");
        let text = stdout(&words(&options)).replace('\n', " ");
        assert!(text.contains(per_parameter), "{text}");
    }
}

/// What no GPU updates is an error of plans as of runs, before anything begins.
#[test]
fn states_that_gpus_do_not_update_are_an_error() {
    for state in ["exp_avg=fp8", "master=bf16"] {
        let plan =
            format!("plan --model 1b --device cuda --world-size 8 --optimizer-state {state}");
        let train = format!("--device cuda --optimizer-state {state}");
        for outcome in [lowp(&words(&plan)), lowp(&tiny(&words(&train)))] {
            assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
            let expected =
                format!("error: --optimizer-state {state}: states in fp8 and masters in bf16");
            assert!(outcome.stderr.starts_with(&expected), "{}", outcome.stderr);
        }
    }
}

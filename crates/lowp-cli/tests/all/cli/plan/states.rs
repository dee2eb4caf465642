//! Plans with the states of each optimizer, in f32 and in bf16.

use super::model::{trains_as_planned, words};
use crate::cli::stdout;

/// Memory and traffic with any states are those that a run has, and what they save is said.
#[test]
fn states_of_every_optimizer_and_dtype() {
    for state in [
        "--optimizer-state exp_avg=bf16,exp_avg_sq=bf16",
        "--optimizer-state exp_avg=bf16",
        "--optimizer lion",
        "--optimizer sgd --optimizer-state momentum_buffer=bf16",
        "--optimizer muon --optimizer-state exp_avg=bf16",
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
    ] {
        let options = format!("plan --model 1b --world-size 8 --recipe mxfp8-2d {state}");
        let text = stdout(&words(&options)).replace('\n', " ");
        assert!(text.contains(per_parameter), "{text}");
    }
}

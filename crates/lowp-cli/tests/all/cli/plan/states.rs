//! Plans with the states of each optimizer in every dtype.

use super::model::{trains_as_planned, words};
use crate::cli::stdout;
use crate::support::exhaustive;

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
        for (sharding, recipe) in [("fsdp", "mxfp8-2d"), ("zero1", "fp8-current")] {
            let options = format!("--world-size 3 --sharding {sharding} {state}");
            let compared = if exhaustive() {
                "mxfp8-2d,fp8-current"
            } else {
                recipe
            };
            trains_as_planned(compared, &options);
        }
    }
    for sharding in ["fsdp", "zero1"] {
        let state = "--optimizer-state master=bf16+16,exp_avg=fp8,exp_avg_sq=fp8";
        let options = format!("--world-size 3 --sharding {sharding} {state}");
        trains_as_planned("mxfp8-2d,bf16", &options);
    }
    // One rank owns every matrix; of many, each some.
    for options in ["--world-size 1", "--world-size 2 --accumulate 2"] {
        let options = format!("{options} --optimizer moonlight");
        trains_as_planned("mxfp8-2d,fp8-current", &options);
    }
    for (recipe, state, bytes) in [
        ("mxfp8-2d", "", "13.00"),
        ("mxfp8-2d", "--optimizer-state exp_avg=bf16", "11.00"),
        (
            "mxfp8-2d",
            "--optimizer-state exp_avg_sq=bf16,exp_avg=bf16",
            "9.00",
        ),
        ("mxfp8-2d", "--optimizer lion", "9.00"),
        ("mxfp8-2d", "--optimizer moonlight", "9.00"),
        (
            "mxfp8-2d",
            "--optimizer sgd --optimizer-state momentum_buffer=bf16",
            "7.00",
        ),
        (
            "mxfp8-2d",
            "--optimizer-state master=bf16,exp_avg=fp8,exp_avg_sq=fp8",
            "5.06",
        ),
        ("bf16", "", "14.00"),
        ("bf16", "--optimizer-state master=bf16+16", "12.00"),
        (
            "bf16",
            "--optimizer-state master=bf16+16,exp_avg=fp8,exp_avg_sq=fp8",
            "6.06",
        ),
    ] {
        for device in ["cpu", "cuda --vocab 32768"] {
            let options = format!("--world-size 8 --recipe {recipe} {state} --device {device}");
            let text = stdout(&words(&format!("plan --model 1b {options}"))).replace('\n', " ");
            let per_parameter = format!("{bytes} bytes per parameter");
            assert!(text.contains(&per_parameter), "{text}");
        }
    }
    // Masters of other weights stay in f32; a note says so where fewer bits were asked for.
    let options = "--world-size 8 --recipe mxfp8-2d --optimizer-state master=bf16+16";
    let text = stdout(&words(&format!("plan --model 1b {options}"))).replace('\n', " ");
    for part in ["13.00 bytes per parameter", "mxfp8-2d has none"] {
        assert!(text.contains(part), "{text}");
    }
}

//! Plans with moments in bf16.

use super::model::{trains_as_planned, words};
use crate::cli::stdout;

/// Memory and traffic with moments in bf16 are those that a run has, and what they save is said.
#[test]
fn moments_of_every_dtype() {
    for state in ["exp_avg=bf16,exp_avg_sq=bf16", "exp_avg=bf16"] {
        for sharding in ["fsdp", "zero1"] {
            let options = format!("--world-size 3 --sharding {sharding} --optimizer-state {state}");
            trains_as_planned("mxfp8-2d,fp8-current", &options);
        }
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
    ] {
        let options = format!("plan --model 1b --world-size 8 --recipe mxfp8-2d {state}");
        let text = stdout(&words(&options)).replace('\n', " ");
        assert!(text.contains(per_parameter), "{text}");
    }
}

//! `--bandwidth`: rates as they are given, or files of `lowp bench --ranks`.

use crate::files::read_json;
use crate::output::shown;
use crate::usage::UsageError;
use lowp_fsdp::cost::{Bandwidth, CostError, Rate};
use std::path::Path;

/// What `--bandwidth` says.
pub(super) fn bandwidth(text: &str) -> Result<Bandwidth, UsageError> {
    let rates: Vec<&str> = text.split(',').map(str::trim).collect();
    match rates[..] {
        [within] => Ok(Bandwidth::new(rate(within)?, None)),
        [within, between] => Ok(Bandwidth::new(rate(within)?, Some(rate(between)?))),
        _ => Err(UsageError::new(format!(
            "--bandwidth {}: {} rates; give one within a node, and one between nodes after a comma",
            shown(text),
            rates.len()
        ))),
    }
}

/// A rate as it is given, or those of a file.
fn rate(text: &str) -> Result<Rate, UsageError> {
    let failed = |error: CostError| {
        UsageError::new(match error {
            CostError::Rate { rate, least, most } => format!(
                "--bandwidth {rate:?}: expected a number of GB/s from {least} to {most}, or a file of `lowp bench --ranks`"
            ),
            error => format!(
                "--bandwidth {error}; write it with `lowp bench --device cuda --ranks N --json FILE`"
            ),
        })
    };
    match text.parse::<f64>() {
        Ok(rate) => Rate::given(rate).map_err(failed),
        Err(_) if !Path::new(text).exists() => Err(UsageError::new(format!(
            "--bandwidth {}: no number, and there is no such file; give GB/s, or a file of `lowp bench --ranks`",
            shown(text)
        ))),
        Err(_) => {
            let mut report = read_json("--bandwidth", text)?;
            if let Some(device) = report.get_mut("device")
                && let Some(name) = device.as_str()
            {
                *device = shown(name).to_string().into();
            }
            Rate::of_report(&shown(text).to_string(), &report).map_err(failed)
        }
    }
}

//! The result file of `--json`.

use super::config::{Config, ConfigRecord};
use super::result::RunResult;
use anyhow::Result;
use serde::Serialize;

#[derive(Serialize)]
struct Document<'a> {
    runs: &'a [RunResult],
    config: ConfigRecord,
}

/// The whole file as text.
///
/// # Errors
/// If a value has no JSON form.
pub(crate) fn render(config: &Config, runs: &[RunResult]) -> Result<String> {
    let document = Document {
        runs,
        config: config.record(),
    };
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

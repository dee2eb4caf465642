//! The result file of `--json`; `lowp train --help` describes it.

use super::args::Args;
use super::config::Setup;
use super::planned;
use super::source::Batches;
use crate::output;
use anyhow::Result;
use lowp_format::is_in_bf16;
use lowp_optim::StateDtypes;
use lowp_train::Config;
use lowp_train::result::RunResult;
use lowp_train::summary::baseline;
use lowp_transformer::GptConfig;
use serde::Serialize;

#[derive(Serialize)]
struct Document<'a> {
    /// `cpu` or `cuda`.
    device: &'static str,
    /// What each loss is a mean over: bytes or tokens.
    unit: &'static str,
    /// The digest of the training data.
    data: String,
    runs: Vec<Run<'a>>,
    config: &'a Config<GptConfig>,
}

#[derive(Serialize)]
struct Run<'a> {
    #[serde(flatten)]
    result: &'a RunResult,
    planned_bytes_per_rank: Option<u64>,
    /// As text; none where all are f32.
    optimizer_state: Option<String>,
    /// To the baseline of the same seed.
    gap_percent: Option<f64>,
}

/// The whole file as text. Losses that are not finite have no JSON form and become null.
pub(crate) fn render(
    args: &Args,
    setup: &Setup,
    runs: &[RunResult],
    text: &Batches,
) -> Result<String> {
    let state = |name: &str| {
        let run = setup.runs.iter().find(|run| run.name == name)?;
        // Masters of halves are those of weights in bf16, where there are any.
        let in_bf16 = setup.recipes(run).into_iter().find(is_in_bf16);
        let recipe = in_bf16.unwrap_or(run.recipe);
        let state = setup.optimizer_state(run).of_recipe(&recipe);
        (state != StateDtypes::default()).then(|| state.to_string())
    };
    let record = |result| Run {
        result,
        optimizer_state: state(&result.recipe),
        planned_bytes_per_rank: planned::bytes(args, setup, &result.recipe),
        gap_percent: baseline(runs, result).map(|base| result.gap_percent(base)),
    };
    let document = Document {
        device: setup.device.kind(),
        unit: text.unit(),
        data: text.digest(),
        runs: runs.iter().map(record).collect(),
        config: &setup.config,
    };
    output::json(&document)
}

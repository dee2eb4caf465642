//! `lowp losses`: the losses of result files of `lowp train --json` side by side, as a table and as one picture. It calls `lowp_train::loss_picture`.

use crate::columns::Columns;
use crate::files::{check_distinct, check_writable, read_regular, write_atomically};
use crate::output;
use crate::usage::{UsageError, input_error};
use anyhow::Result;
use lowp_train::loss_picture::{RecipeLosses, picture};
use lowp_train::shown_value;
use lowp_train::summary::{mean, range};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::PathBuf;

/// Compare the losses of runs that `lowp train --json` recorded
///
/// Runs of one recipe are averaged over their seeds; if some seeds also have a baseline run, only over these. A gap is how far the
/// validation loss is above that of the baseline with the same seed. A seed that diverged is named below the
/// table, and makes the loss and the gaps of its recipe NaN.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  lowp losses run.json
  lowp losses sweep/*.json --baseline bf16 --svg losses.svg")]
pub(crate) struct Args {
    /// Result files; of two runs with the same recipe and seed the last one is used
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// The recipe that gaps are measured against
    #[arg(long, value_name = "NAME", default_value = "fp32")]
    baseline: String,

    /// Draw training losses and their gaps over steps
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Document {
    runs: Vec<Run>,
    /// What each loss is a mean over: bytes or tokens.
    unit: Option<String>,
    /// The digest of the training data.
    data: Option<String>,
    #[serde(default)]
    config: Map<String, Value>,
}

/// Most bytes of a result file: a loss takes some twenty.
const MAX_BYTES: u64 = 256 << 20;

/// What two files may differ in: seeds, and what changes no loss.
const FREE: [&str; 7] = [
    "seed",
    "seeds",
    "eval_every",
    "offload_optimizer",
    "recompute",
    "reshard_after_forward",
    "sharding",
];

#[derive(Deserialize)]
struct Run {
    recipe: String,
    seed: u64,
    /// Number of steps that the run has done.
    steps: Option<u64>,
    /// Not finite ones are null.
    train_loss: Vec<Option<f64>>,
    val_loss: Option<f64>,
}

/// The runs of a recipe by seed.
type Seeds = BTreeMap<u64, Run>;

pub(crate) fn main(args: &Args) -> Result<()> {
    if let Some(path) = &args.svg {
        check_writable("--svg", path)?;
        let inputs = args
            .files
            .iter()
            .map(|file| ("a result file", file.as_path()));
        check_distinct(inputs, [("--svg", path.as_path())])?;
    }
    let (recipes, unit) = read(args)?;
    if recipes.is_empty() {
        return Err(input_error(
            "the files have no runs; give files that `lowp train --json` wrote",
        ));
    }
    let Some((_, baseline)) = recipes.iter().find(|(name, _)| *name == args.baseline) else {
        let names: Vec<&str> = recipes.iter().map(|(name, _)| name.as_str()).collect();
        return Err(input_error(format!(
            "--baseline {}: the files have runs of {}; give --baseline with one of them",
            args.baseline,
            names.join(", ")
        )));
    };
    output::print(&table(&recipes, baseline))?;
    if let Some(path) = &args.svg {
        let recipes: Vec<_> = recipes.iter().map(training_losses).collect();
        write_atomically(path, &picture(&recipes, &unit))?;
    }
    Ok(())
}

/// The runs by recipe: the baseline, then the others in the order in which they are found. With them, the unit of losses.
fn read(args: &Args) -> Result<(Vec<(String, Seeds)>, String)> {
    let mut recipes: Vec<(String, Seeds)> = Vec::new();
    let mut known: Option<(String, Map<String, Value>)> = None;
    let (mut unit, mut data, mut steps) = (None, None, None);
    for path in &args.files {
        let name = || path.display().to_string();
        let wrong = |why: String| UsageError::new(format!("{}: {why}", name()));
        let bytes = read_regular(path, MAX_BYTES).map_err(|e| wrong(e.to_string()))?;
        let document: Document = serde_json::from_slice(&bytes)
            .map_err(|e| wrong(format!("not a result file of `lowp train --json`: {e}")))?;
        match &known {
            None => known = Some((name(), document.config)),
            Some((first, config)) => same(first, config, &name(), &document.config)?,
        }
        same_where_known("unit", &mut unit, name(), document.unit)?;
        same_where_known("data", &mut data, name(), document.data)?;
        for run in document.runs {
            same_where_known("steps", &mut steps, name(), run.steps)?;
            let place = recipes.iter().position(|(recipe, _)| *recipe == run.recipe);
            let at = place.unwrap_or_else(|| {
                recipes.push((run.recipe.clone(), Seeds::new()));
                recipes.len() - 1
            });
            recipes[at].1.insert(run.seed, run);
        }
    }
    recipes.sort_by_key(|(name, _)| *name != args.baseline);
    let unit = unit.map_or("nats".to_owned(), |(_, unit): (_, String)| {
        format!("nats per {unit}")
    });
    Ok((recipes, unit))
}

/// Checks a value of a file against that of the first file which has one: those of older programs have none.
fn same_where_known<T: PartialEq + Debug>(
    key: &str,
    known: &mut Option<(String, T)>,
    name: String,
    found: Option<T>,
) -> Result<(), UsageError> {
    match (&*known, found) {
        (Some((first, value)), Some(found)) if *value != found => {
            let [value, found] = [value, &found].map(|value| format!("{value:?}"));
            return Err(differs(key, &name, &found, first, &value));
        }
        (None, Some(found)) => *known = Some((name, found)),
        _ => {}
    }
    Ok(())
}

/// Runs of other models or steps have losses that say nothing of recipes.
fn same(
    first: &str,
    config: &Map<String, Value>,
    other: &str,
    found: &Map<String, Value>,
) -> Result<(), UsageError> {
    let keys = config.keys().chain(found.keys());
    let mut keys = keys.filter(|key| !FREE.contains(&key.as_str()));
    let value =
        |config: &Map<String, Value>, key: &str| config.get(key).cloned().unwrap_or_default();
    match keys.find(|key| value(config, key) != value(found, key)) {
        None => Ok(()),
        Some(key) => {
            let [found, known] = [found, config].map(|config| value(config, key).to_string());
            let [found, known] = [&found, &known].map(|value| shown_value(key, value));
            Err(differs(key, other, &found, first, &known))
        }
    }
}

/// Two files with other values of `key`: `other` has `found`, and `first` has `known`.
fn differs(key: &str, other: &str, found: &str, first: &str, known: &str) -> UsageError {
    UsageError::new(format!(
        "{other} has {key} {found}, and {first} has {known}: runs can only be compared if nothing that changes losses differs but recipe and seed"
    ))
}

/// The table, and below it which seeds diverged.
fn table(recipes: &[(String, Seeds)], baseline: &Seeds) -> String {
    let mut table = Columns::new(
        &["recipe", "seeds", "val loss", "gap", "least", "most"],
        &[0],
    );
    let mut notes = String::new();
    for (name, seeds) in recipes {
        let loss = |run: &Run| run.val_loss.unwrap_or(f64::NAN);
        let gap = |(seed, run): (&u64, &Run)| {
            let base = loss(baseline.get(seed)?);
            Some((loss(run) / base - 1.0) * 100.0)
        };
        let gaps: Vec<f64> = seeds.iter().filter_map(gap).collect();
        // Of a recipe that shares seeds with the baseline the others say nothing beside it.
        let shared = |seed: &u64| gaps.is_empty() || baseline.contains_key(seed);
        let counted: Vec<_> = seeds.iter().filter(|(seed, _)| shared(seed)).collect();
        let losses: Vec<f64> = counted.iter().map(|(_, run)| loss(run)).collect();
        let percent = |value: Option<f64>| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:+.2}%"))
        };
        table.row([
            name.clone(),
            counted.len().to_string(),
            format!("{:.4}", mean(&losses).unwrap_or(f64::NAN)),
            percent(mean(&gaps)),
            percent(range(&gaps).map(|[least, _]| least)),
            percent(range(&gaps).map(|[_, most]| most)),
        ]);
        let diverged = seeds.iter().filter(|(_, run)| !loss(run).is_finite());
        notes.extend(diverged.map(|(seed, _)| {
            let name = output::shown(name);
            let counts = match shared(seed) {
                true => "so that means and gaps with it are NaN",
                false => "and the baseline has no run of this seed, so it is not counted",
            };
            format!("{name} seed {seed}: training diverged, {counts}\n")
        }));
    }
    table.render() + &notes
}

fn training_losses((name, seeds): &(String, Seeds)) -> RecipeLosses<'_> {
    RecipeLosses {
        name,
        seeds: seeds
            .iter()
            .map(|(seed, run)| (*seed, &run.train_loss[..]))
            .collect(),
    }
}

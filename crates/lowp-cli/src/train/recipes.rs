//! Which runs a command makes: the baseline, and what `--recipe` or `--compare` ask for.

use crate::usage::UsageError;
use lowp_format::spelling::Variant;
use lowp_format::{AnyRecipe, Recipe};
use lowp_train::Run;
use lowp_train::summary::BASELINE;

/// The runs that `--recipe` and `--compare` ask for, the baseline first if it is asked for, each once.
pub(crate) fn select(
    recipe: &str,
    compare: &[String],
    baseline: bool,
) -> Result<Vec<Run>, UsageError> {
    let one = [recipe.to_owned()];
    let asked = if compare.is_empty() { &one } else { compare };
    let mut names: Vec<String> = baseline.then(|| BASELINE.to_owned()).into_iter().collect();
    for name in asked.iter().map(|name| name.trim()) {
        if name == "all" {
            names.extend(
                AnyRecipe::low_precision()
                    .iter()
                    .map(|recipe| recipe.name().to_owned()),
            );
        } else {
            names.push(name.to_owned());
        }
    }
    let mut runs: Vec<Run> = Vec::new();
    for name in names {
        let recipe: Variant = name.parse()?;
        // However it is spelled.
        if runs.iter().any(|run| run.recipe == recipe) {
            continue;
        }
        runs.push(Run::new(name, recipe)?);
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn baseline_comes_first_and_once() {
        let names = |runs: Vec<Run>| runs.into_iter().map(|r| r.name).collect::<Vec<_>>();
        assert_eq!(
            names(select(BASELINE, &[], true).expect("a run")),
            [BASELINE]
        );
        let all = names(select("", &["all".to_owned()], true).expect("runs"));
        assert_eq!(all[0], BASELINE);
        assert_eq!(all.len(), 1 + AnyRecipe::low_precision().len());
        let spellings = ["mxfp8+hybrid", "mxfp8+format=hybrid", "mxfp8+ hybrid"];
        let spellings = spellings.map(str::to_owned);
        let runs = names(select("", &spellings, false).expect("runs"));
        assert_eq!(runs, ["mxfp8+hybrid"]);
        let error = select("fp3", &[], true).unwrap_err();
        assert!(error.to_string().contains("fp3"));
    }
}

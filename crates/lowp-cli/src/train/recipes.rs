//! Which runs a command makes: the baseline, and what `--recipe` or `--compare` ask for.

use crate::usage::UsageError;
use lowp_format::spelling::Variant;
use lowp_format::{AnyRecipe, KernelKey, PlainF32, Recipe, Role, ScaleRule};

pub(crate) use lowp_format::has_tensor_scale;

/// The name of the run that every gap is measured against.
pub(crate) const BASELINE: &str = PlainF32::NAME;

/// One run: its name as the user wrote it, and its recipe.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Run {
    pub(crate) name: String,
    pub(crate) recipe: Variant,
}

impl Run {
    /// The run of `recipe`, called `name`.
    ///
    /// # Errors
    /// Weights that cannot train so.
    pub(crate) fn new(name: String, recipe: Variant) -> Result<Self, UsageError> {
        if recipe.weights_lack_precision() {
            return Err(UsageError::new(format!(
                "{name}: weights in E5M2 lose a mantissa bit for range they do not need; use +hybrid for E5M2 gradients"
            )));
        }
        if recipe.casts_weights_late() {
            return Err(UsageError::new(format!(
                "{name}: a cast of f32 weights in one product has no delayed scale; leave weights exact in both \
                 products, or modify a recipe whose scales follow from the values"
            )));
        }
        let kernels = recipe.quantizers(Role::Weight).kernels();
        let wide = |key: &&KernelKey| key.element.bits() >= 16 && key.scale != ScaleRule::None;
        if let Some(key) = kernels.iter().find(wide) {
            return Err(UsageError::new(format!(
                "{name}: {} elements take no scale; modify a recipe below 16 bits (`lowp recipes` lists them)",
                key.element
            )));
        }
        Ok(Self { name, recipe })
    }
}

/// The runs that `--recipe` and `--compare` ask for, the baseline first if it is asked for, each once.
///
/// # Errors
/// A name that is no recipe; the message lists those that are.
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
        let recipe = name.parse()?;
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

//! Which runs there are: the baseline, and every recipe that has an engine.

use crate::usage::UsageError;

/// The name of the run that every gap is measured against.
pub(crate) const BASELINE: &str = "fp32";

/// Names of all recipes, in the order of the tables.
pub(crate) fn names() -> Vec<String> {
    Vec::new()
}

/// The runs that `--recipe` and `--compare` ask for, the baseline first, each once.
///
/// # Errors
/// A name that is no recipe; the message lists those that are.
pub(crate) fn select(recipe: &str, compare: &[String]) -> Result<Vec<String>, UsageError> {
    let known = names();
    let one = [recipe.to_owned()];
    let asked = if compare.is_empty() { &one } else { compare };
    let mut runs = vec![BASELINE.to_owned()];
    for name in asked.iter().map(|name| name.trim()) {
        let found = if name == "all" {
            known.clone()
        } else if name == BASELINE || known.iter().any(|k| k == name) {
            vec![name.to_owned()]
        } else {
            return Err(UsageError::new(format!(
                "unknown recipe '{name}'; there are: {BASELINE} {}",
                known.join(" ")
            )));
        };
        for name in found {
            if !runs.contains(&name) {
                runs.push(name);
            }
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn baseline_comes_first_and_once() {
        assert!(select(BASELINE, &[]).is_ok_and(|runs| runs == [BASELINE]));
        assert!(select("", &["all".to_owned()]).is_ok_and(|runs| runs[0] == BASELINE));
        let error = select("fp3", &[]).unwrap_err();
        assert!(error.to_string().contains("fp3"));
    }
}

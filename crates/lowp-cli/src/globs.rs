//! Patterns of names in options that take several, separated by commas.

use crate::output::shown;
use crate::usage::UsageError;
use globset::Glob;

/// For each of `names`, whether one of the `patterns` that `option` gave matches it.
///
/// # Errors
/// A pattern that is none, or that matches no name: then `names_are` says what there is.
pub(crate) fn matching(
    option: &str,
    patterns: &[String],
    names: &[&str],
    names_are: impl Fn() -> String,
) -> Result<Vec<bool>, UsageError> {
    let mut matched = vec![false; names.len()];
    for text in patterns.iter().flat_map(|text| split(text)) {
        let glob = Glob::new(text).map_err(|e| UsageError::new(format!("{option}: {e}")))?;
        let glob = glob.compile_matcher();
        let mut any = false;
        for (matched, name) in matched.iter_mut().zip(names) {
            if glob.is_match(name) {
                (*matched, any) = (true, true);
            }
        }
        if !any {
            return Err(UsageError::new(format!(
                "{option} '{}' matches {}",
                shown(text),
                names_are()
            )));
        }
    }
    Ok(matched)
}

/// The patterns of `text`, which commas outside of braces separate.
fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0usize;
    text.split(move |c: char| {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_braces_belong_to_the_pattern() {
        let names = ["block0.fc", "block0.out", "block1.fc", "block1.qkv"];
        let matched = |text: &str| {
            let found = matching("--keep", &[text.to_owned()], &names, || {
                "nothing".to_owned()
            });
            found.map_err(|error| error.to_string())
        };
        assert_eq!(
            matched("block0.{fc,out}"),
            Ok(vec![true, true, false, false])
        );
        assert_eq!(
            matched("*.qkv,block0.{fc,x}"),
            Ok(vec![true, false, false, true])
        );
        assert_eq!(
            matched("*.fc,y*"),
            Err("--keep 'y*' matches nothing".to_owned())
        );
        assert!(matched("{a").is_err_and(|error| error.starts_with("--keep: ")));
    }
}

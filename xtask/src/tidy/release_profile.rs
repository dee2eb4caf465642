//! The release program is stripped: with debug information it would be six times as large, with symbols more than
//! 15 MB. The profile `profiling` has both.

use toml::{Table, Value};

use super::violation::Violation;
use crate::tree::Tree;

/// The manifest of the workspace.
const ROOT: &str = "Cargo.toml";

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    violation(tree).into_iter().collect()
}

fn violation(tree: &Tree) -> Option<Violation> {
    let text = &tree.file(ROOT)?.text;
    let manifest = match text.parse::<Table>() {
        Ok(manifest) => manifest,
        Err(error) => return Some(Violation::new(ROOT, 1, error.message())),
    };
    let release = manifest
        .get("profile")
        .and_then(|profiles| profiles.get("release"));
    let setting = |name: &str| release.and_then(|profile| profile.get(name));
    let stripped = match setting("strip") {
        Some(Value::Boolean(all)) => *all,
        Some(Value::String(what)) => what == "symbols",
        _ => false,
    };
    if stripped && setting("debug").is_none() {
        return None;
    }
    let message =
        "[profile.release] must say `strip = \"symbols\"` and leave `debug` to [profile.profiling]";
    Some(Violation::new(ROOT, 1, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_information_is_caught() {
        for (profile, passes) in [
            ("strip = \"debuginfo\"", false),
            ("strip = \"symbols\"", true),
            ("strip = true", true),
            ("strip = false", false),
            ("strip = \"none\"", false),
            ("", false),
            ("strip = \"symbols\"\ndebug = \"line-tables-only\"", false),
        ] {
            let text = format!("[profile.dev]\ndebug = true\n[profile.release]\n{profile}\n");
            let found = violation(&Tree::of(&[(ROOT, &text)]));
            assert_eq!(found.is_none(), passes, "{profile}");
        }
        assert!(violation(&Tree::of(&[(ROOT, "")])).is_some());
        assert!(violation(&Tree::of(&[(ROOT, "[profile")])).is_some());
    }
}

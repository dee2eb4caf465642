//! Every package has the lints of the workspace, which deny unsafe code where no module expects it; crates that
//! need none forbid it. The rest is the compiler's: `unsafe_code`, unfulfilled expectations, and expectations without a reason.
//!
//! The release program is stripped: with debug information it would be six times as large, with symbols more than
//! 15 MB. The profile `profiling` has both.

use toml::{Table, Value};

use super::lex::lex;
use super::violation::Violation;
use crate::tree::Tree;

const ROOT: &str = "Cargo.toml";

/// What the workspace must say, as group, lint and level.
const LEVELS: &[[&str; 3]] = &[
    ["rust", "unsafe_code", "deny"],
    ["clippy", "allow_attributes_without_reason", "warn"],
    ["clippy", "undocumented_unsafe_blocks", "warn"],
];

/// Crates that are correct by what they compute, never by what they may assume.
const FORBID: &[&str] = &[
    "crates/lowp-format/src/lib.rs",
    "crates/lowp-comm/src/lib.rs",
    "crates/lowp-shard/src/lib.rs",
];

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let levels = check_levels(tree);
    let forbid = FORBID.iter().filter_map(|path| check_forbid(tree, path));
    levels.into_iter().chain(forbid).collect()
}

fn check_levels(tree: &Tree) -> Vec<Violation> {
    let mut violations = Vec::new();
    for file in tree.files.iter().filter(|file| file.name() == ROOT) {
        let manifest = match file.text.parse::<Table>() {
            Ok(manifest) => Value::Table(manifest),
            Err(error) => {
                violations.push(Violation::new(&file.path, 1, error.message()));
                continue;
            }
        };
        let is = |keys: &[&str], value: Value| at(&manifest, keys) == Some(&value);
        if file.path == ROOT {
            for [group, lint, level] in LEVELS {
                if !is(&["workspace", "lints", group, lint], (*level).into()) {
                    let message =
                        format!("[workspace.lints.{group}] must say `{lint} = \"{level}\"`");
                    violations.push(Violation::new(ROOT, 1, message));
                }
            }
            let release = ["profile", "release"];
            let stripped = |value: Value| is(&[&release[..], &["strip"]].concat(), value);
            let debug = at(&manifest, &[&release[..], &["debug"]].concat());
            if !(stripped(true.into()) || stripped("symbols".into())) || debug.is_some() {
                let message = "[profile.release] must say `strip = \"symbols\"` and leave `debug` to [profile.profiling]";
                violations.push(Violation::new(ROOT, 1, message));
            }
        } else if !is(&["lints", "workspace"], true.into()) {
            let message = "the lints of the workspace are missing: `[lints]`, `workspace = true`";
            violations.push(Violation::new(&file.path, 1, message));
        }
    }
    violations
}

fn at<'v>(value: &'v Value, keys: &[&str]) -> Option<&'v Value> {
    keys.iter().try_fold(value, |value, key| value.get(key))
}

fn check_forbid(tree: &Tree, path: &str) -> Option<Violation> {
    let forbids = tree.file(path).is_some_and(|file| {
        lex(&file.text)
            .bare
            .iter()
            .any(|line| line.trim() == "#![forbid(unsafe_code)]")
    });
    (!forbids).then(|| Violation::new(path, 1, "must contain `#![forbid(unsafe_code)]`"))
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    const WORKSPACE: &str = "[profile.release]\nstrip = \"symbols\"\n[workspace.lints]\nrust.unsafe_code = \"deny\"\n\
        clippy.allow_attributes_without_reason = \"warn\"\nclippy.undocumented_unsafe_blocks = \"warn\"\n";

    #[test]
    fn a_package_without_the_lints_is_caught() {
        let tree = Tree::of(&[
            (ROOT, WORKSPACE),
            ("a/Cargo.toml", "[lints]\nworkspace = true\n"),
            ("b/Cargo.toml", "lints.workspace = true\n"),
            ("c/Cargo.toml", "[lints]\nworkspace = false\n"),
            ("d/Cargo.toml", "# [lints]\n# workspace = true\n"),
            ("e/Cargo.toml", "[lints\n"),
        ]);
        let found = places(&check_levels(&tree));
        assert_eq!(
            found,
            ["c/Cargo.toml:1", "d/Cargo.toml:1", "e/Cargo.toml:1"]
        );
    }

    #[test]
    fn a_weaker_workspace_is_caught() {
        for [_, lint, level] in LEVELS {
            let said = format!("{lint} = \"{level}\"");
            assert!(WORKSPACE.contains(&said), "{said}");
            let weaker = WORKSPACE.replace(&said, &format!("{lint} = \"allow\""));
            let found = check_levels(&Tree::of(&[(ROOT, &weaker)]));
            assert_eq!(places(&found), ["Cargo.toml:1"]);
            assert!(found[0].message.contains(&said), "{}", found[0].message);
        }
    }

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
            let text = WORKSPACE.replace("strip = \"symbols\"", profile);
            let found = check_levels(&Tree::of(&[(ROOT, &text)]));
            assert_eq!(found.is_empty(), passes, "{profile}");
        }
    }

    #[test]
    fn a_crate_that_does_not_forbid_is_caught() {
        let path = FORBID[0];
        let with = |text: &str| check_forbid(&Tree::of(&[(path, text)]), path);
        assert_eq!(with("//! x\n#![forbid(unsafe_code)]\n"), None);
        assert!(with("//! x\n// #![forbid(unsafe_code)]\n").is_some());
        assert!(check_forbid(&Tree::of(&[]), path).is_some());
    }
}

//! Dependencies between the crates point one way.

use super::Violation;
use crate::tree::Tree;

/// From the meaning of bytes up to the command. A crate may use those before it.
const ORDER: &[&str] = &[
    "lowp-format",
    "lowp-kernels",
    "lowp-shard",
    "lowp-optim",
    "lowp-candle",
    "lowp-cli",
];

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let mut violations = Vec::new();
    for file in tree.with_extension("toml") {
        let Some(name) = file
            .path
            .strip_prefix("crates/")
            .and_then(|path| path.strip_suffix("/Cargo.toml"))
        else {
            continue;
        };
        let Some(level) = level(name) else {
            let message = format!("`{name}` has no place in the order {}", ORDER.join(" <- "));
            violations.push(Violation::new(&file.path, 1, message));
            continue;
        };
        for (line, dependency) in own_dependencies(&file.text) {
            if self::level(&dependency).is_none_or(|other| other >= level) {
                let message = format!(
                    "`{name}` may not depend on `{dependency}`: the order is {}",
                    ORDER.join(" <- ")
                );
                violations.push(Violation::new(&file.path, line, message));
            }
        }
    }
    violations
}

fn level(name: &str) -> Option<usize> {
    ORDER.iter().position(|&known| known == name)
}

/// Dependencies on crates of this workspace, with their lines. Those of tests and benches are free:
/// they are not built into the crate.
fn own_dependencies(manifest: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_dependencies = false;
    for (line, text) in manifest.lines().enumerate() {
        let text = text.trim();
        let mut names = Vec::new();
        if let Some(header) = text
            .strip_prefix('[')
            .and_then(|text| text.split(']').next())
        {
            let parts: Vec<&str> = header
                .split('.')
                .map(|part| part.trim_matches('"'))
                .collect();
            let at = parts
                .iter()
                .position(|part| matches!(*part, "dependencies" | "build-dependencies"));
            in_dependencies = at.is_some();
            // `[dependencies.lowp-format]`
            names.extend(at.and_then(|at| parts.get(at + 1)).copied());
        } else if in_dependencies && !text.starts_with('#') {
            // `lowp-format.workspace = true`, `lowp-format = { .. }`
            names.extend(
                text.split(['.', '=', ' '])
                    .next()
                    .map(|key| key.trim_matches('"')),
            );
            // `format = { package = "lowp-format" }`, `package = "lowp-format"`
            names.extend(
                text.split_once("package")
                    .and_then(|(_, value)| value.split('"').nth(1)),
            );
        }
        found.extend(
            names
                .into_iter()
                .filter(|name| name.starts_with("lowp-"))
                .map(|name| (line + 1, name.to_owned())),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::testing::places;
    use super::*;

    #[test]
    fn down_is_allowed_and_up_is_not() {
        let path = "crates/lowp-kernels/Cargo.toml";
        for (line, allowed) in [
            ("lowp-format.workspace = true", true),
            ("lowp-format = { path = \"../lowp-format\" }", true),
            ("# lowp-shard.workspace = true", true),
            ("lowp-shard.workspace = true", false),
            ("lowp-kernels.workspace = true", false),
            ("lowp-tests.workspace = true", false),
            (
                "shard = { package = \"lowp-shard\", path = \"../lowp-shard\" }",
                false,
            ),
        ] {
            let text = format!("[package]\nname = \"lowp-kernels\"\n[dependencies]\n{line}\n");
            let found = places(&check(&Tree::of(&[(path, &text)])));
            let expected = if allowed {
                vec![]
            } else {
                vec![format!("{path}:4")]
            };
            assert_eq!(found, expected, "{line}");
        }
    }

    #[test]
    fn every_kind_of_table_is_read() {
        let path = "crates/lowp-format/Cargo.toml";
        for (text, line) in [
            ("[dependencies.lowp-cli]\nworkspace = true", 1),
            (
                "[target.'cfg(unix)'.dependencies]\nlowp-cli.workspace = true",
                2,
            ),
            ("[build-dependencies]\nlowp-cli.workspace = true", 2),
            ("[dependencies.cli]\npackage = \"lowp-cli\"", 2),
        ] {
            assert_eq!(
                places(&check(&Tree::of(&[(path, text)]))),
                [format!("{path}:{line}")],
                "{text}"
            );
        }
        let tests_only = "[dev-dependencies]\nlowp-cli.workspace = true";
        assert_eq!(check(&Tree::of(&[(path, tests_only)])), []);
    }

    #[test]
    fn a_crate_without_a_place_is_caught() {
        assert_eq!(
            check(&Tree::of(&[("crates/lowp-extra/Cargo.toml", "")])).len(),
            1
        );
        assert_eq!(
            check(&Tree::of(&[(
                "tests/Cargo.toml",
                "[dependencies]\nlowp-cli.workspace = true"
            )])),
            []
        );
    }
}

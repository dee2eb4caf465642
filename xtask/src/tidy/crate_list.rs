//! The list of crates in ARCHITECTURE.md has every crate, after those that it uses.

use super::violation::Violation;
use crate::packages::Kind;
use crate::tree::Tree;

const PAGE: &str = "ARCHITECTURE.md";
const HEADING: &str = "## Crates";

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let text = tree.file(PAGE).map_or("", |file| &file.text);
    let listed = listed(text);
    let line_of = |name: &str| {
        let row = listed.iter().find(|(_, listed)| *listed == name);
        row.map(|&(line, _)| line)
    };
    let mut violations = Vec::new();
    let crates = tree.packages.iter();
    for package in crates.filter(|package| package.manifest.starts_with("crates/")) {
        let name = &package.name;
        let Some(line) = line_of(name) else {
            let message = format!("the list under `{HEADING}` is without `{name}`");
            violations.push(Violation::new(PAGE, 1, message));
            continue;
        };
        let used = package.dependencies.iter();
        for other in used.filter(|other| other.kind != Some(Kind::Dev)) {
            if line_of(&other.name).is_some_and(|used| used > line) {
                let message = format!("`{name}` uses `{}`, which must come first", other.name);
                violations.push(Violation::new(PAGE, line, message));
            }
        }
    }
    let known = |name: &str| tree.packages.iter().any(|package| package.name == name);
    let gone = listed.iter().filter(|(_, name)| !known(name));
    violations.extend(
        gone.map(|(line, name)| Violation::new(PAGE, *line, format!("there is no crate `{name}`"))),
    );
    violations
}

/// The names in the first column of the table, with their lines.
fn listed(text: &str) -> Vec<(usize, &str)> {
    text.lines()
        .enumerate()
        .skip_while(|(_, line)| *line != HEADING)
        .skip(1)
        .take_while(|(_, line)| !line.starts_with("## "))
        .filter_map(|(index, line)| {
            let name = line.strip_prefix("| `")?.split_once('`')?.0;
            Some((index + 1, name))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;
    use crate::packages::{Dependency, Package};

    fn found(rows: &str) -> Vec<String> {
        let page =
            format!("# A\n## Crates\n| crate | what |\n{rows}## Else\n| `lowp-cli` | no |\n");
        let package = |name: &str, uses: &[&str]| Package {
            name: name.into(),
            manifest: format!("crates/{name}/Cargo.toml"),
            dependencies: uses
                .iter()
                .map(|&name| Dependency {
                    name: name.into(),
                    kind: None,
                })
                .collect(),
            publish: None,
        };
        let mut tree = Tree::of(&[(PAGE, &page)]);
        tree.packages = vec![
            package("lowp-cli", &["lowp-format", "half"]),
            package("lowp-format", &[]),
        ];
        places(&check(&tree))
    }

    #[test]
    fn a_crate_that_is_left_out_is_caught() {
        assert!(found("| `lowp-format` | a |\n| `lowp-cli` | b |\n").is_empty());
        assert_eq!(found("| `lowp-format` | a |\n"), ["ARCHITECTURE.md:1"]);
        assert_eq!(found("").len(), 2);
    }

    #[test]
    fn a_crate_that_is_not_there_is_caught() {
        let rows = "| `lowp-format` | a |\n| `lowp-gone` | c |\n| `lowp-cli` | b |\n";
        assert_eq!(found(rows), ["ARCHITECTURE.md:5"]);
    }

    #[test]
    fn a_crate_before_those_that_it_uses_is_caught() {
        let found = found("| `lowp-cli` | b |\n| `lowp-format` | a |\n");
        assert_eq!(found, ["ARCHITECTURE.md:4"]);
    }
}

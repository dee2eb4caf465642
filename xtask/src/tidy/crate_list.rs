//! Dependencies between the crates point one way: the list of crates in ARCHITECTURE.md has every crate, after those that it uses.

use super::violation::Violation;
use crate::packages::Kind;
use crate::tree::Tree;

const PAGE: &str = "ARCHITECTURE.md";
const HEADING: &str = "## Crates";
/// The golden vectors, and the only crate that is built with them.
const DATA: [&str; 2] = ["lowp-golden", "lowp-conformance"];

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
        // Those of tests and benches are free: they are not built into the crate.
        let used = package.dependencies.iter();
        let used =
            used.filter(|other| other.kind != Some(Kind::Dev) && [&other.name, name] != DATA);
        for other in used.filter(|other| other.name.starts_with("lowp-")) {
            if line_of(&other.name).is_none_or(|used| used >= line) {
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

    const ROWS: &str = "| `lowp-format` | a |\n| `lowp-cli` | b |\n";

    /// What is found where `lowp-cli` uses the packages `uses`, for `kind`.
    fn found(rows: &str, uses: &[&str], kind: Option<Kind>) -> Vec<String> {
        let page =
            format!("# A\n## Crates\n| crate | what |\n{rows}## Else\n| `lowp-cli` | no |\n");
        let dependency = |&name: &&str| Dependency {
            name: name.into(),
            kind,
        };
        let package = |name: &str, folder: &str, uses: &[&str]| Package {
            name: name.into(),
            manifest: format!("{folder}/Cargo.toml"),
            dependencies: uses.iter().map(dependency).collect(),
            publish: None,
        };
        let mut tree = Tree::of(&[(PAGE, &page)]);
        tree.packages = vec![
            package("lowp-cli", "crates/lowp-cli", uses),
            package("lowp-format", "crates/lowp-format", &[]),
            package("lowp-tests", "tests", &["lowp-cli"]),
        ];
        places(&check(&tree))
    }

    #[test]
    fn a_crate_that_is_left_out_is_caught() {
        let left_out = |rows: &str| found(rows, &["lowp-format", "half"], None);
        assert!(left_out(ROWS).is_empty());
        assert_eq!(left_out("| `lowp-format` | a |\n"), ["ARCHITECTURE.md:1"]);
        assert_eq!(left_out("").len(), 2);
    }

    #[test]
    fn a_crate_that_is_not_there_is_caught() {
        let rows = "| `lowp-format` | a |\n| `lowp-gone` | c |\n| `lowp-cli` | b |\n";
        assert_eq!(found(rows, &[], None), ["ARCHITECTURE.md:5"]);
    }

    #[test]
    fn down_is_allowed_and_up_is_not() {
        let turned = "| `lowp-cli` | b |\n| `lowp-format` | a |\n";
        for kind in [None, Some(Kind::Build)] {
            assert_eq!(found(turned, &["lowp-format"], kind), ["ARCHITECTURE.md:4"]);
            for name in ["lowp-cli", "lowp-tests"] {
                assert_eq!(found(ROWS, &[name], kind), ["ARCHITECTURE.md:5"], "{name}");
            }
            assert!(found(ROWS, &["lowp-format", "half"], kind).is_empty());
            assert_eq!(found(ROWS, &[DATA[0]], kind), ["ARCHITECTURE.md:5"]);
        }
        assert!(found(turned, &["lowp-format", "lowp-tests"], Some(Kind::Dev)).is_empty());
    }
}

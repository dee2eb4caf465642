//! The list of crates in ARCHITECTURE.md has every crate, in the order in which they may use each other.

use super::Violation;
use super::layers;
use crate::tree::Tree;

const PAGE: &str = "ARCHITECTURE.md";
const HEADING: &str = "## Crates";

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let text = tree.file(PAGE).map_or("", |file| &file.text);
    let listed = listed(text);
    let crates = tree
        .packages
        .iter()
        .filter(|package| package.manifest.starts_with("crates/"));
    let mut violations: Vec<Violation> = crates
        .filter(|package| listed.iter().all(|(_, name)| *name != package.name))
        .map(|package| {
            let message = format!("the list under `{HEADING}` is without `{}`", package.name);
            Violation::new(PAGE, 1, message)
        })
        .collect();
    for pair in listed.windows(2) {
        let [(_, before), (line, name)] = pair else {
            continue;
        };
        let level = |name| layers::level(name);
        if let (Some(first), Some(second)) = (level(before), level(name))
            && first > second
        {
            let message = format!("`{name}` comes before `{before}`, which may not be used by it");
            violations.push(Violation::new(PAGE, *line, message));
        }
    }
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
    use super::super::testing::places;
    use super::*;
    use crate::packages::Package;

    fn found(rows: &str) -> Vec<String> {
        let page =
            format!("# A\n## Crates\n| crate | what |\n{rows}## Else\n| `lowp-cli` | no |\n");
        let package = |name: &str| Package {
            name: name.into(),
            manifest: format!("crates/{name}/Cargo.toml"),
            dependencies: Vec::new(),
            publish: None,
        };
        let mut tree = Tree::of(&[(PAGE, &page)]);
        tree.packages = ["lowp-format", "lowp-cli"].map(package).into();
        places(&check(&tree))
    }

    #[test]
    fn a_crate_that_is_left_out_is_caught() {
        assert!(found("| `lowp-format` | a |\n| `lowp-cli` | b |\n").is_empty());
        assert_eq!(found("| `lowp-format` | a |\n"), ["ARCHITECTURE.md:1"]);
        assert_eq!(found("").len(), 2);
    }

    #[test]
    fn another_order_is_caught() {
        let found = found("| `lowp-cli` | b |\n| `lowp-format` | a |\n");
        assert_eq!(found, ["ARCHITECTURE.md:5"]);
    }
}

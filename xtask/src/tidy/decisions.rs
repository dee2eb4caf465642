//! Decision records are numbered 0001, 0002, .. without a gap, so that a number names one decision
//! for good.

use super::violation::Violation;
use crate::tree::Tree;

const FOLDER: &str = "docs/decisions/";

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut next = 1;
    // Files are sorted by path, so by number.
    for file in tree
        .files
        .iter()
        .filter(|file| file.path.starts_with(FOLDER))
    {
        match number(file.name()) {
            None => violations.push(Violation::new(
                &file.path,
                1,
                "the name must be NNNN-short-title.md",
            )),
            Some(number) => {
                if number != next {
                    violations.push(Violation::new(
                        &file.path,
                        1,
                        format!("the next free number is {next:04}"),
                    ));
                }
                next = number + 1;
            }
        }
    }
    violations
}

fn number(name: &str) -> Option<u32> {
    let (number, title) = name.strip_suffix(".md")?.split_once('-')?;
    let well_formed = number.len() == 4 && !title.is_empty();
    well_formed.then(|| number.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    fn found(names: &[&str]) -> Vec<String> {
        let paths: Vec<String> = names.iter().map(|name| format!("{FOLDER}{name}")).collect();
        let files: Vec<(&str, &str)> = paths.iter().map(|path| (path.as_str(), "")).collect();
        places(&check(&Tree::of(&files)))
    }

    #[test]
    fn gaps_doubles_and_malformed_names_are_caught() {
        assert!(found(&["0001-a.md", "0002-b.md"]).is_empty());
        assert_eq!(
            found(&["0001-a.md", "0003-c.md"]),
            ["docs/decisions/0003-c.md:1"]
        );
        assert_eq!(
            found(&["0001-a.md", "0001-b.md"]),
            ["docs/decisions/0001-b.md:1"]
        );
        assert_eq!(found(&["0002-b.md"]), ["docs/decisions/0002-b.md:1"]);
        assert_eq!(found(&["0001-a.md", "2-b.md", "notes.txt"]).len(), 2);
    }
}

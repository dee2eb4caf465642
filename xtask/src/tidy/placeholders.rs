//! No placeholder of a template, `@NAME@`, is left in a document.

use super::violation::Violation;
use crate::tree::Tree;

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let documents = tree.files.iter().filter(|file| file.path.ends_with(".md"));
    let lines = documents.flat_map(|file| {
        let lines = file.text.lines().enumerate();
        lines.filter_map(|(index, line)| Some((&file.path, index + 1, placeholder(line)?)))
    });
    lines
        .map(|(path, line, name)| {
            Violation::new(
                path,
                line,
                format!("write the value in the place of {name}"),
            )
        })
        .collect()
}

/// The first `@NAME@` of a line, in capitals.
fn placeholder(line: &str) -> Option<String> {
    let parts: Vec<&str> = line.split('@').collect();
    let inner = parts.get(1..parts.len().saturating_sub(1))?;
    let is_name = |part: &&&str| {
        let mut letters = part.bytes();
        !part.is_empty() && letters.all(|byte| byte.is_ascii_uppercase() || byte == b'_')
    };
    inner.iter().find(is_name).map(|name| format!("@{name}@"))
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    #[test]
    fn a_placeholder_is_caught_in_documents_alone() {
        let tree = Tree::of(&[
            (
                "docs/a.md",
                "fine\nspills @BYTES@ bytes\nuser@example.org and b@c\n",
            ),
            ("src/lib.rs", "//! `@NAME@`\n"),
        ]);
        assert_eq!(places(&check(&tree)), ["docs/a.md:2"]);
    }
}

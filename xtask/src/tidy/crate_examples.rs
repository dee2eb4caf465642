//! Each library crate is usable alone, and its crate doc shows how, in an example that runs as a
//! doctest.

use super::violation::Violation;
use crate::tree::Tree;

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    tree.with_extension("rs")
        .filter(|file| file.path.starts_with("crates/") && file.path.ends_with("/src/lib.rs"))
        .filter(|file| !has_example(&file.text))
        .map(|file| {
            Violation::new(
                &file.path,
                1,
                "the crate doc must contain a Rust example between ``` lines",
            )
        })
        .collect()
}

/// Whether the leading `//!` block opens a code block that rustdoc compiles.
fn has_example(text: &str) -> bool {
    let mut inside = false;
    for line in text.lines().map_while(|line| line.strip_prefix("//!")) {
        let Some(language) = line.trim().strip_prefix("```") else {
            continue;
        };
        if !inside && matches!(language.trim(), "" | "rust" | "no_run") {
            return true;
        }
        inside = !inside;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    #[test]
    fn a_crate_doc_without_an_example_is_caught() {
        let tree = Tree::of(&[
            (
                "crates/a/src/lib.rs",
                "//! A.\n//!\n//! ```\n//! use a;\n//! ```\n",
            ),
            ("crates/b/src/lib.rs", "//! B.\n"),
            (
                "crates/c/src/lib.rs",
                "//! C.\n//! ```text\n//! c\n//! ```\n",
            ),
            (
                "crates/d/src/lib.rs",
                "//! D.\n\n/// ```\n/// use d;\n/// ```\npub fn d() {}\n",
            ),
            ("crates/e/src/main.rs", "//! E.\n"),
            ("tests/src/lib.rs", "//! Tests.\n"),
        ]);
        assert_eq!(
            places(&check(&tree)),
            [
                "crates/b/src/lib.rs:1",
                "crates/c/src/lib.rs:1",
                "crates/d/src/lib.rs:1"
            ]
        );
    }
}

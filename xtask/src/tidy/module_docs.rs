//! Every Rust file begins with `//!` and says what it holds.

use super::violation::Violation;
use crate::tree::Tree;

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    tree.with_extension("rs")
        .filter(|file| {
            file.text
                .lines()
                .next()
                .is_none_or(|first| !says_something(first))
        })
        .map(|file| {
            Violation::new(
                &file.path,
                1,
                "the file must begin with `//!` and say what it holds",
            )
        })
        .collect()
}

fn says_something(first_line: &str) -> bool {
    first_line
        .strip_prefix("//!")
        .is_some_and(|text| !text.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    #[test]
    fn a_file_without_a_heading_is_caught() {
        let tree = Tree::of(&[
            ("a.rs", "//! Holds a.\nfn a() {}"),
            ("b.rs", "// b\n//! Holds b."),
            ("c.rs", ""),
            ("d.rs", "//!\n"),
            ("e.cu", "__global__ void e();"),
        ]);
        assert_eq!(places(&check(&tree)), ["b.rs:1", "c.rs:1", "d.rs:1"]);
    }
}

//! No toolchain file: the workspace builds with the compiler its user has, from `rust-version` on.

use super::violation::Violation;
use crate::tree::Tree;

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    tree.files
        .iter()
        .filter(|file| matches!(file.name(), "rust-toolchain" | "rust-toolchain.toml"))
        .map(|file| {
            Violation::new(
                &file.path,
                1,
                "delete the toolchain file; `rust-version` in Cargo.toml says enough",
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    #[test]
    fn both_names_are_caught_anywhere() {
        let tree = Tree::of(&[
            ("rust-toolchain.toml", ""),
            ("tests/rust-toolchain", ""),
            ("Cargo.toml", ""),
        ]);
        assert_eq!(
            places(&check(&tree)),
            ["rust-toolchain.toml:1", "tests/rust-toolchain:1"]
        );
    }
}

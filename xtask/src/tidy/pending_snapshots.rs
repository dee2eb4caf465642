//! No snapshot waits for review: git ignores `.snap.new` files, so one left behind would never be
//! seen again.

use super::violation::Violation;
use crate::tree::Tree;

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    tree.files
        .iter()
        .filter(|file| file.name().ends_with(".snap.new") || file.name().ends_with(".pending-snap"))
        .map(|file| {
            Violation::new(
                &file.path,
                1,
                "a changed snapshot; compare it, then rename it to .snap or delete it",
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    #[test]
    fn a_pending_snapshot_is_caught() {
        let new = "tests/tests/snapshots/plan__layout.snap.new";
        let tree = Tree::of(&[(new, ""), ("tests/tests/snapshots/plan__layout.snap", "")]);
        assert_eq!(places(&check(&tree)), [format!("{new}:1")]);
    }
}

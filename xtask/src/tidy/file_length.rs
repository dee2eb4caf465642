//! No source file over 600 lines: a longer one holds two ideas.

use super::violation::Violation;
use crate::tree::Tree;

const MOST_LINES: usize = 600;

pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    tree.sources()
        .map(|file| (file, file.text.lines().count()))
        .filter(|&(_, lines)| lines > MOST_LINES)
        .map(|(file, lines)| {
            let message = format!("{lines} lines; split the file, the limit is {MOST_LINES}");
            Violation::new(&file.path, MOST_LINES + 1, message)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::violation::testing::places;
    use super::*;

    #[test]
    fn the_line_after_the_limit_is_caught() {
        let (full, over) = ("x\n".repeat(600), "x\n".repeat(601));
        let tree = Tree::of(&[
            ("a.rs", &full),
            ("b.rs", &over),
            ("c.cu", &over),
            ("d.cuh", &over),
            ("e.md", &over),
        ]);
        assert_eq!(places(&check(&tree)), ["b.rs:601", "c.cu:601", "d.cuh:601"]);
    }
}

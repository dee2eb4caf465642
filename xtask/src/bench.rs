//! `cargo xtask bench`: the benchmarks of every crate.

use anyhow::{Result, bail};

use crate::command::{cargo, run, workspace_root};
use crate::tree::Tree;

/// Runs every benchmark, passing `args` to each.
pub(crate) fn bench(args: &[String]) -> Result<()> {
    if !has_benches(&Tree::load(&workspace_root()?)?) {
        bail!(
            "the workspace has no benchmarks: no crate has a benches/ folder with a .rs file in it"
        );
    }
    // Bench targets only: the unit test harness does not know criterion's options.
    let mut command = cargo(&["bench", "--workspace", "--bench", "*", "--"])?;
    command.args(args);
    run(command)
}

fn has_benches(tree: &Tree) -> bool {
    tree.with_extension("rs")
        .any(|file| file.path.contains("/benches/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benches_are_found_by_their_folder() {
        assert!(!has_benches(&Tree::of(&[("crates/a/src/bench.rs", "")])));
        assert!(has_benches(&Tree::of(&[(
            "crates/a/benches/encode.rs",
            ""
        )])));
    }
}

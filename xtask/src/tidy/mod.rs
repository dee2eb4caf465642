//! `cargo xtask tidy`: the invariants of ARCHITECTURE.md as checks, each a function of the tree or of one file.

mod circles;
mod crate_list;
mod decisions;
mod files;
mod imports;
mod lex;
mod links;
mod lints;
mod recipe_names;
mod violation;

use std::panic::resume_unwind;
use std::thread;

use anyhow::{Result, bail};

use crate::command::workspace_root;
use crate::tree::Tree;
use violation::Violation;

/// Every check. A new one is a file here and a line in this list, or a rule of `files`.
const CHECKS: &[fn(&Tree) -> Vec<Violation>] = &[
    circles::check,
    crate_list::check,
    decisions::check,
    files::check,
    links::check,
    lints::check,
    recipe_names::check,
];

/// Prints every violation in the workspace and fails if there is one.
pub(crate) fn tidy() -> Result<()> {
    let tree = Tree::load(&workspace_root()?)?;
    let mut violations: Vec<Violation> = thread::scope(|scope| {
        let run = |check: &fn(&Tree) -> Vec<Violation>| {
            scope.spawn({
                let (check, tree) = (*check, &tree);
                move || check(tree)
            })
        };
        // All begin before the first is waited for.
        let running: Vec<_> = CHECKS.iter().map(run).collect();
        let found = running.into_iter().map(|check| check.join());
        found
            .flat_map(|found| found.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    violations.sort();
    for violation in &violations {
        eprintln!("{violation}");
    }
    if !violations.is_empty() {
        bail!("tidy found violations: {}", violations.len());
    }
    eprintln!(
        "{} checks, {} files, no violations",
        CHECKS.len(),
        tree.files.len()
    );
    Ok(())
}

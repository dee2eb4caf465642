//! `cargo xtask tidy`: the invariants of ARCHITECTURE.md as checks. One file per check, each a
//! function of the tree.

mod circles;
mod crate_examples;
mod crate_list;
mod decisions;
mod file_length;
mod imports;
mod layers;
mod leftovers;
mod lex;
mod links;
mod lints;
mod module_docs;
mod pending_snapshots;
mod placeholders;
mod recipe_names;
mod release_profile;
mod toolchain;
mod violation;

use anyhow::{Result, bail};

use crate::command::workspace_root;
use crate::tree::Tree;
use violation::Violation;

/// Every check. A new one is a file here and a line in this list.
const CHECKS: &[fn(&Tree) -> Vec<Violation>] = &[
    circles::check,
    crate_examples::check,
    crate_list::check,
    decisions::check,
    file_length::check,
    layers::check,
    leftovers::check,
    links::check,
    lints::check,
    module_docs::check,
    pending_snapshots::check,
    placeholders::check,
    recipe_names::check,
    release_profile::check,
    toolchain::check,
];

/// Prints every violation in the workspace and fails if there is one.
pub(crate) fn tidy() -> Result<()> {
    let tree = Tree::load(&workspace_root()?)?;
    let mut violations: Vec<Violation> = CHECKS.iter().flat_map(|check| check(&tree)).collect();
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

//! `cargo xtask tidy`: the invariants of ARCHITECTURE.md as checks. One file per check, each a
//! function of the tree.

mod crate_examples;
mod crate_list;
mod decisions;
mod file_length;
mod layers;
mod leftovers;
mod lex;
mod links;
mod lints;
mod module_docs;
mod modules;
mod pending_snapshots;
mod placeholders;
mod recipe_names;
mod release_profile;
mod toolchain;

use std::fmt;

use anyhow::{Result, bail};

use crate::command::workspace_root;
use crate::tree::Tree;

/// A place that breaks an invariant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    path: String,
    /// Counted from 1. A violation of the whole file is at 1.
    line: usize,
    message: String,
}

impl Violation {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            line,
            message: message.into(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.message)
    }
}

/// Every check. A new one is a file here and a line in this list.
const CHECKS: &[fn(&Tree) -> Vec<Violation>] = &[
    crate_examples::check,
    crate_list::check,
    decisions::check,
    file_length::check,
    layers::check,
    leftovers::check,
    links::check,
    lints::check,
    module_docs::check,
    modules::check,
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

/// What the tests of the checks share.
#[cfg(test)]
mod testing {
    use super::Violation;

    /// `path:line` of each violation: what a test of a check compares.
    pub(super) fn places(violations: &[Violation]) -> Vec<String> {
        violations
            .iter()
            .map(|v| format!("{}:{}", v.path, v.line))
            .collect()
    }
}

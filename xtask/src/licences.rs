//! The licences of everything that is built in: each must leave a choice that goes with lowp's own, MIT or Apache-2.0.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::command::{answer, cargo};
use crate::packages;

/// What may be combined with a program under MIT or Apache-2.0 without terms for the rest of it.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// A package, as `cargo metadata` describes it.
#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
}

/// Checks the lockfile's packages, with all features and for all systems.
pub(crate) fn check() -> Result<()> {
    let metadata = || cargo(&["metadata", "--format-version", "1", "--all-features"]);
    // What the workspace was built with is there; packages of other systems need not have been downloaded.
    let mut offline = metadata()?;
    let output = offline.arg("--offline").output();
    match output.context("cannot start cargo")? {
        output if output.status.success() => check_answer(&output.stdout),
        _ => check_answer(&answer(metadata()?)?),
    }
}

fn check_answer(answer: &[u8]) -> Result<()> {
    let packages: Vec<Package> = packages::read(answer)?;
    let refused: Vec<String> = packages.iter().filter_map(refused).collect();
    ensure!(
        refused.is_empty(),
        "packages whose licences are not in xtask/src/licences.rs: {}; choose other packages, or add a licence that goes with \
         MIT and Apache-2.0",
        refused.join(", ")
    );
    eprintln!(
        "{} packages, all under licences that go with lowp's",
        packages.len()
    );
    Ok(())
}

/// The package with its licence, unless that leaves an allowed choice.
fn refused(package: &Package) -> Option<String> {
    let license = package.license.as_deref().unwrap_or("no licence");
    let Package { name, version, .. } = package;
    (!allowed(license)).then(|| format!("{name} {version} ({license})"))
}

/// Whether an SPDX expression has an allowed choice. AND binds closer than OR; `/` is an old way to write OR.
fn allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    let expression = expression.trim();
    // Parentheses around alternatives within an AND, which is how they are used: each side by itself.
    if let Some(rest) = expression.strip_prefix('(')
        && let Some((inner, rest)) = rest.split_once(')')
    {
        return match rest.trim().split_once(' ') {
            None => allowed(inner),
            Some(("AND", rest)) => allowed(inner) && allowed(rest),
            Some(("OR", rest)) => allowed(inner) || allowed(rest),
            Some(_) => false,
        };
    }
    if let Some((left, right)) = expression.split_once(" OR ") {
        return allowed(left) || allowed(right);
    }
    if let Some((left, right)) = expression.split_once(" AND ") {
        return allowed(left) && allowed(right);
    }
    ALLOWED.contains(&expression.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        for yes in [
            "MIT",
            "MIT/Apache-2.0",
            "Apache-2.0 / MIT",
            "MIT OR Apache-2.0 OR LGPL-2.1-or-later",
            "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
            "(MIT OR GPL-2.0) AND Unicode-3.0",
            "(MIT OR Apache-2.0)",
        ] {
            assert!(allowed(yes), "{yes}");
        }
        for no in [
            "",
            "no licence",
            "GPL-3.0-only",
            "MIT AND GPL-3.0-only",
            "(MIT OR Apache-2.0) AND MPL-2.0",
            "(GPL-2.0 OR LGPL-3.0)",
            "(MIT) WITH something",
        ] {
            assert!(!allowed(no), "{no}");
        }
    }

    #[test]
    fn packages_without_a_choice_are_named() {
        let answer = br#"{"packages": [
            {"name": "good", "version": "1.0.0", "license": "MIT"},
            {"name": "bad", "version": "2.0.0", "license": "AGPL-3.0"},
            {"name": "mute", "version": "3.0.0", "license": null}
        ]}"#;
        let error = check_answer(answer).unwrap_err().to_string();
        assert!(
            error.contains("bad 2.0.0 (AGPL-3.0), mute 3.0.0 (no licence)"),
            "{error}"
        );
        assert!(!error.contains("good"), "{error}");
    }
}

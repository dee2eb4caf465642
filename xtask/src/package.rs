//! The crates as the archives that cargo would publish.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};

use crate::command::{answer, cargo, run, workspace_root};
use crate::tree::Tree;

/// What the build script of lowp-kernels reads: nothing that is built without the CUDA backend needs it.
const KERNELS: &str = "crates/lowp-kernels/";
const READ_BY_BUILD: &[&str] = &["build.rs", "build/", "cuda/"];

/// Packages every crate; with `build`, also builds each from its archive alone.
pub(crate) fn package(build: bool) -> Result<()> {
    let tree = Tree::load(&workspace_root()?)?;
    // Offline: what the workspace was built with is there.
    let mut command = cargo(&["package", "--quiet", "--allow-dirty", "--offline"])?;
    if !build {
        command.arg("--no-verify");
    }
    let published = || {
        tree.packages
            .iter()
            .filter(|package| package.is_published())
    };
    for package in published() {
        command.args(["--package", &package.name]);
    }
    run(command)?;
    let missing = missing(&tree, &list("lowp-kernels")?);
    ensure!(
        missing.is_empty(),
        "the package of lowp-kernels is without {}; add it to `include` in its Cargo.toml",
        missing.join(", ")
    );
    let count = published().count();
    eprintln!(
        "{count} crates packaged{}",
        if build { " and built" } else { "" }
    );
    Ok(())
}

/// The files that a package would have, from its folder.
fn list(package: &str) -> Result<BTreeSet<String>> {
    let command = cargo(&[
        "package",
        "--quiet",
        "--list",
        "--allow-dirty",
        "--package",
        package,
    ])?;
    let text = String::from_utf8_lossy(&answer(command)?).replace('\\', "/");
    Ok(text.lines().map(str::to_owned).collect())
}

/// What the build script reads and `listed` lacks.
fn missing(tree: &Tree, listed: &BTreeSet<String>) -> Vec<String> {
    tree.files
        .iter()
        .filter_map(|file| file.path.strip_prefix(KERNELS))
        .filter(|path| READ_BY_BUILD.iter().any(|part| path.starts_with(part)))
        .filter(|&path| !listed.contains(path))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_source_that_is_left_out_is_found() {
        let tree = Tree::of(&[
            ("crates/lowp-kernels/build.rs", ""),
            ("crates/lowp-kernels/build/headers.rs", ""),
            ("crates/lowp-kernels/cuda/amax.cu", ""),
            ("crates/lowp-kernels/resources.txt", ""),
            ("crates/lowp-shard/build.rs", ""),
        ]);
        let listed = BTreeSet::from(["build.rs", "src/lib.rs"].map(str::to_owned));
        assert_eq!(
            missing(&tree, &listed),
            ["build/headers.rs", "cuda/amax.cu"]
        );
    }
}

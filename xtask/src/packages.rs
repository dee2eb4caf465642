//! The packages of the workspace, as `cargo metadata` describes them.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::command::{answer, cargo, workspace_root};

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Its Cargo.toml, from the workspace root, with `/` between the parts.
    #[serde(rename = "manifest_path")]
    pub(crate) manifest: String,
    pub(crate) dependencies: Vec<Dependency>,
    /// The registries that it may go to; any where there is no list.
    pub(crate) publish: Option<Vec<String>>,
}

impl Package {
    /// Whether it may go to a registry.
    pub(crate) fn is_published(&self) -> bool {
        self.publish.as_ref().is_none_or(|to| !to.is_empty())
    }
}

/// A package that another one names in its Cargo.toml.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Dependency {
    /// The name of the package, whatever the manifest calls it.
    pub(crate) name: String,
    pub(crate) kind: Option<Kind>,
}

/// What a dependency is for, other than the package itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Build,
    Dev,
}

/// The packages of the workspace, sorted by name.
pub(crate) fn packages() -> Result<Vec<Package>> {
    let command = cargo(&["metadata", "--no-deps", "--format-version", "1"])?;
    parse(&answer(command)?, &workspace_root()?)
}

/// The packages that cargo answers with, each with the part that is read.
pub(crate) fn read<P: DeserializeOwned>(answer: &[u8]) -> Result<Vec<P>> {
    #[derive(Deserialize)]
    struct Metadata<P> {
        packages: Vec<P>,
    }
    let metadata: Metadata<P> =
        serde_json::from_slice(answer).context("reading the answer of `cargo metadata`")?;
    Ok(metadata.packages)
}

fn parse(answer: &[u8], root: &Path) -> Result<Vec<Package>> {
    let mut packages: Vec<Package> = read(answer)?;
    for package in &mut packages {
        // Paths outside the root stay as they are.
        if let Ok(path) = Path::new(&package.manifest).strip_prefix(root) {
            package.manifest = path.to_string_lossy().replace('\\', "/");
        }
    }
    packages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_workspace_is_read() {
        let packages = packages().unwrap();
        let find = |name: &str| packages.iter().find(|package| package.name == name);
        let kernels = find("lowp-kernels").unwrap();
        assert_eq!(kernels.manifest, "crates/lowp-kernels/Cargo.toml");
        let kind = |name: &str| {
            let dependency = kernels.dependencies.iter().find(|d| d.name == name);
            dependency.unwrap().kind
        };
        assert_eq!(kind("lowp-format"), None);
        assert_eq!(kind("criterion"), Some(Kind::Dev));
        assert!(find("serde_json").is_none());
        assert!(kernels.is_published());
        assert!(!find("xtask").unwrap().is_published());
    }
}

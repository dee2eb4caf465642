//! The files and packages of the workspace, read once, so that a check is a function of values.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::packages::{Package, packages};

/// Folders of the workspace root whose files belong to the project. Everything else there is a
/// build result or local.
const FOLDERS: &[&str] = &["crates", "docs", "tests", "xtask"];

/// Files whose text is read. Others are known by their path only.
const TEXT: &[&str] = &["cu", "cuh", "md", "rs", "toml"];

#[derive(Debug, Clone)]
pub(crate) struct SourceFile {
    /// From the workspace root, with `/` between the parts.
    pub(crate) path: String,
    /// Empty for files that are not text.
    pub(crate) text: String,
}

impl SourceFile {
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    pub(crate) fn extension(&self) -> &str {
        self.name()
            .rsplit_once('.')
            .map_or("", |(_, extension)| extension)
    }

    pub(crate) fn is_source(&self) -> bool {
        matches!(self.extension(), "rs" | "cu" | "cuh")
    }
}

/// All files of the workspace, sorted by path, and its packages.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    pub(crate) files: Vec<SourceFile>,
    pub(crate) packages: Vec<Package>,
}

impl Tree {
    /// Reads the files in the workspace root and below its source folders.
    pub(crate) fn load(root: &Path) -> Result<Self> {
        let mut files = Vec::new();
        read_folder(root, "", &mut files)?;
        for folder in FOLDERS.iter().filter(|folder| root.join(folder).is_dir()) {
            read_folder(root, folder, &mut files)?;
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let packages = packages()?;
        Ok(Self { files, packages })
    }

    /// A tree made up for a test.
    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        let file = |&(path, text): &(&str, &str)| SourceFile {
            path: path.into(),
            text: text.into(),
        };
        Self {
            files: files.iter().map(file).collect(),
            packages: Vec::new(),
        }
    }

    /// The files that end in `.extension`.
    pub(crate) fn with_extension(&self, extension: &str) -> impl Iterator<Item = &SourceFile> {
        self.files
            .iter()
            .filter(move |file| file.extension() == extension)
    }

    pub(crate) fn sources(&self) -> impl Iterator<Item = &SourceFile> {
        self.files.iter().filter(|file| file.is_source())
    }

    pub(crate) fn file(&self, path: &str) -> Option<&SourceFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

/// Reads `folder` and what is below it; of the root (`""`) only the files.
fn read_folder(root: &Path, folder: &str, files: &mut Vec<SourceFile>) -> Result<()> {
    let entries =
        fs::read_dir(root.join(folder)).with_context(|| format!("cannot read {folder}/"))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if folder.is_empty() {
            name.clone()
        } else {
            format!("{folder}/{name}")
        };
        let kind = entry.file_type()?;
        if kind.is_dir() {
            if !folder.is_empty() && name != "target" && !name.starts_with('.') {
                read_folder(root, &path, files)?;
            }
        } else if kind.is_file() {
            let mut file = SourceFile {
                path,
                text: String::new(),
            };
            if TEXT.contains(&file.extension()) {
                file.text = fs::read_to_string(entry.path())
                    .with_context(|| format!("cannot read {} as text", file.path))?;
            }
            files.push(file);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_workspace_is_read() {
        let tree = Tree::load(&crate::command::workspace_root().unwrap()).unwrap();
        assert!(tree.file("Cargo.toml").is_some());
        assert!(
            tree.file("xtask/src/tree.rs")
                .unwrap()
                .text
                .starts_with("//!")
        );
        assert!(
            tree.files
                .iter()
                .all(|file| !file.path.contains("/target/"))
        );
    }
}

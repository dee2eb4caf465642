//! Snapshot files that no test uses any more.
//!
//! insta appends the path of every snapshot it compares to the file that the variable
//! `INSTA_SNAPSHOT_REFERENCES_FILE` names. After a run of the whole suite, a snapshot in the tree
//! that is not in that list belongs to no test.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::workspace_root;
use crate::tree::Tree;

/// The list of snapshots that one test run compared. The file goes when this value goes.
#[derive(Debug)]
pub(crate) struct References {
    list: PathBuf,
}

impl References {
    /// An empty list in `folder`.
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        // Tests run in other folders, so the path must be absolute.
        let folder = folder.canonicalize()?;
        let list = folder.join(format!("snapshot-references-{}.txt", std::process::id()));
        match fs::remove_file(&list) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot empty {}", list.display()))
            }
            _ => Ok(Self { list }),
        }
    }

    /// Makes the tests that `command` runs write to this list.
    pub(crate) fn record(&self, command: &mut Command) {
        command.env("INSTA_SNAPSHOT_REFERENCES_FILE", &self.list);
    }

    /// Fails if the workspace holds a snapshot that is not in the list.
    pub(crate) fn reject_unreferenced(&self) -> Result<()> {
        let root = workspace_root()?;
        let snapshots = snapshots_in(&Tree::load(&root)?);
        let unused = self.unreferenced(&root, &snapshots)?;
        if !unused.is_empty() {
            bail!(
                "no test uses these snapshots; delete them:\n  {}",
                unused.join("\n  ")
            );
        }
        eprintln!("{} snapshots, each used by a test", snapshots.len());
        Ok(())
    }

    fn unreferenced(&self, root: &Path, snapshots: &[String]) -> Result<Vec<String>> {
        let text = match fs::read_to_string(&self.list) {
            // No test compared a snapshot.
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            read => read.with_context(|| format!("cannot read {}", self.list.display()))?,
        };
        // insta writes paths such as `tests/tests/../tests/snapshots/a.snap`.
        let used: BTreeSet<PathBuf> = text
            .lines()
            .filter_map(|line| Path::new(line).canonicalize().ok())
            .collect();
        let mut unused = Vec::new();
        for path in snapshots {
            if !used.contains(&root.join(path).canonicalize()?) {
                unused.push(path.clone());
            }
        }
        Ok(unused)
    }
}

impl Drop for References {
    fn drop(&mut self) {
        // A file left behind in target/ does no harm.
        let _ = fs::remove_file(&self.list);
    }
}

fn snapshots_in(tree: &Tree) -> Vec<String> {
    tree.with_extension("snap")
        .map(|file| file.path.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_no_test_used_is_found() {
        let root =
            std::env::temp_dir().join(format!("lowp-xtask-snapshots-{}", std::process::id()));
        fs::create_dir_all(root.join("snapshots")).unwrap();
        for name in ["used.snap", "stale.snap"] {
            fs::write(root.join("snapshots").join(name), "").unwrap();
        }
        let references = References::new(&root).unwrap();
        let snapshots = [
            "snapshots/used.snap".to_owned(),
            "snapshots/stale.snap".to_owned(),
        ];
        assert_eq!(
            references.unreferenced(&root, &snapshots).unwrap(),
            snapshots
        );

        // A path as insta writes it: not normalised, and once per comparison.
        let line = format!("{}/snapshots/../snapshots/used.snap\n", root.display());
        fs::write(&references.list, line.repeat(2)).unwrap();
        assert_eq!(
            references.unreferenced(&root, &snapshots).unwrap(),
            ["snapshots/stale.snap"]
        );
        drop(references);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn the_run_writes_to_an_absolute_path() {
        let references = References::new(Path::new(".")).unwrap();
        let mut command = Command::new("true");
        references.record(&mut command);
        let (name, value) = command.get_envs().next().unwrap();
        assert_eq!(name, "INSTA_SNAPSHOT_REFERENCES_FILE");
        assert!(Path::new(value.unwrap()).is_absolute());
    }
}

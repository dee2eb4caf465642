//! [`Group`]: what criterion measured, read from its files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};
use serde_json::Value;

/// Seconds by function (memcpy, 1 thread, 2 threads), and the bytes of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Group {
    pub(super) bytes: f64,
    pub(super) seconds: BTreeMap<String, f64>,
}

impl Group {
    pub(super) fn seconds(&self, function: &str) -> Option<f64> {
        self.seconds.get(function).copied()
    }

    /// The speed of one thread as a part of memcpy's.
    pub(super) fn ratio(&self) -> Option<f64> {
        let one = self.seconds("1 thread")?;
        self.seconds("memcpy").map(|memcpy| memcpy / one)
    }
}

pub(super) fn read(folder: &Path, start: SystemTime) -> Result<BTreeMap<String, Group>> {
    let mut groups = BTreeMap::<String, Group>::new();
    for group in folders(folder)? {
        for function in folders(&group)? {
            let estimates = function.join("new/estimates.json");
            let fresh = std::fs::metadata(&estimates)
                .and_then(|file| file.modified())
                .is_ok_and(|time| time >= start);
            if !fresh {
                continue;
            }
            let benchmark = json(&function.join("new/benchmark.json"))?;
            let text = |key: &str| benchmark[key].as_str().unwrap_or_default().to_owned();
            let group = groups.entry(text("group_id")).or_default();
            group.bytes = benchmark["throughput"]["Bytes"].as_f64().unwrap_or(0.0);
            let median = &json(&estimates)?["median"]["point_estimate"];
            let nanoseconds = median
                .as_f64()
                .with_context(|| format!("{} has no median", estimates.display()))?;
            group.seconds.insert(text("function_id"), nanoseconds / 1e9);
        }
    }
    Ok(groups)
}

fn folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Ok(Vec::new());
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            paths.push(path);
        }
    }
    Ok(paths)
}

fn json(path: &Path) -> Result<Value> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))
}

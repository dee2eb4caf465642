//! [`checkpoint_of`]: the checkpoint of a training run that a path of a command means.

use crate::output::shown;
use crate::usage::input_error;
use anyhow::Result;
use lowp_file::checkpoint;
use std::path::{Path, PathBuf};

/// The checkpoint that `input` is or has, where it is one, a run's folder, or a folder of --save with one run and no model of its own.
pub(super) fn checkpoint_of(input: &Path) -> Result<Option<PathBuf>> {
    if checkpoint::is_checkpoint(input) {
        return Ok(Some(input.to_owned()));
    }
    let Ok(entries) = std::fs::read_dir(input) else {
        return Ok(None);
    };
    let entries: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    let is_of_model = |path: &PathBuf| path.to_string_lossy().contains(".safetensors");
    if entries.iter().any(is_of_model) {
        return Ok(None);
    }
    let runs = entries.into_iter();
    let mut runs: Vec<PathBuf> = runs
        .filter(|path| checkpoint::is_checkpoint(path))
        .collect();
    runs.sort();
    match &runs[..] {
        [] => Ok(None),
        [run] => Ok(Some(run.clone())),
        runs => {
            let names = runs
                .iter()
                .map(|run| shown(&run.display().to_string()).to_string());
            Err(input_error(format!(
                "{} has checkpoints of {} runs; give one of {}",
                shown(&input.display().to_string()),
                runs.len(),
                names.collect::<Vec<_>>().join(", ")
            )))
        }
    }
}

//! Checkpoints, as `lowp train --save` writes them: what they hold, and whether two are the same.

use crate::difference::Equal;
use crate::error::{FileError, Result};
use crate::text::shown;
use lowp_checkpoint::{Checkpoint, CheckpointError, Dtype, TensorInfo};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Whether `path` is a checkpoint or a folder of such, be it damaged.
pub fn is_checkpoint(path: &Path) -> bool {
    lowp_checkpoint::is_of_checkpoints(path)
}

fn open(path: &Path) -> Result<Checkpoint> {
    in_file(path, Checkpoint::latest(path))
}

fn in_file<T>(path: &Path, done: Result<T, CheckpointError>) -> Result<T> {
    done.map_err(|error| FileError::in_file(path, error))
}

/// What a checkpoint holds; the keys are those of JSON.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The path of its folder.
    pub path: String,
    /// The step that it was saved after.
    pub step: u64,
    /// Ranks that saved it.
    pub ranks: usize,
    /// The recipe that it was trained in, by its name.
    pub recipe: Value,
    /// What the run was.
    pub config: Value,
    /// Bytes of all that it holds.
    pub bytes: usize,
    /// Sorted by name.
    pub tensors: Vec<TensorReport>,
}

/// A tensor of a checkpoint.
#[derive(Debug, Serialize)]
pub struct TensorReport {
    /// Its name.
    pub name: String,
    /// The dtype.
    pub dtype: &'static str,
    /// Rows and columns; a vector is one row.
    pub shape: [usize; 2],
    /// Bytes of all that it holds.
    pub bytes: usize,
    /// Parts that it was saved in.
    pub pieces: usize,
}

fn bytes(tensor: &TensorInfo<'_>) -> usize {
    tensor.shape[0] * tensor.shape[1] * tensor.dtype.bytes()
}

/// The report of the checkpoint at `path`, whose bytes are all read and checked.
///
/// # Errors
/// It cannot be read, or is damaged.
pub fn inspect(path: &Path) -> Result<Report> {
    let checkpoint = open(path)?;
    in_file(path, checkpoint.verify())?;
    let about = checkpoint.about();
    Ok(Report {
        path: checkpoint.folder().display().to_string(),
        step: checkpoint.step(),
        ranks: checkpoint.ranks(),
        recipe: about["recipe"].clone(),
        config: about["config"].clone(),
        bytes: checkpoint.tensors().map(|tensor| bytes(&tensor)).sum(),
        tensors: checkpoint
            .tensors()
            .map(|tensor| TensorReport {
                name: tensor.name.to_owned(),
                dtype: match tensor.dtype {
                    Dtype::F32 => "F32",
                    Dtype::Bf16 => "BF16",
                    Dtype::U8 => "U8",
                },
                shape: tensor.shape,
                bytes: bytes(&tensor),
                pieces: tensor.pieces,
            })
            .collect(),
    })
}

/// Compares two checkpoints tensor by tensor, whatever ranks saved them.
///
/// # Errors
/// They differ, or cannot be read.
pub fn verify(path_a: &Path, path_b: &Path) -> Result<Equal> {
    let (a, b) = (open(path_a)?, open(path_b)?);
    let [name_a, name_b] = [&a, &b].map(|checkpoint| checkpoint.folder().display().to_string());
    if a.step() != b.step() {
        return Err(FileError::Differ(format!(
            "{name_a} is of step {}, and {name_b} is of step {}",
            a.step(),
            b.step()
        )));
    }
    let names: BTreeSet<&str> = a.tensors().chain(b.tensors()).map(|t| t.name).collect();
    let mut sum = 0;
    for name in &names {
        let shown = shown(name);
        let (Some(info), Some(info_b)) = (a.info(name), b.info(name)) else {
            let lacks = if a.has(name) { &name_b } else { &name_a };
            return Err(FileError::Differ(format!("'{shown}' is not in {lacks}")));
        };
        let [of_a, of_b] = [info, info_b].map(|info| (info.dtype, info.shape));
        if of_a != of_b {
            return Err(FileError::Differ(format!(
                "'{shown}' is {of_a:?} in {name_a} and {of_b:?} in {name_b}"
            )));
        }
        if let Some((byte, [in_a, in_b])) = first_difference(path_a, &a, path_b, &b, &info)? {
            let (entry, cols) = (byte / info.dtype.bytes(), info.shape[1]);
            return Err(FileError::Differ(format!(
                "'{shown}' differs first in row {}, column {}: byte {byte} is 0x{in_a:02X} in {name_a} and 0x{in_b:02X} in {name_b}",
                entry / cols,
                entry % cols,
            )));
        }
        sum += bytes(&info);
    }
    Ok(Equal {
        tensors: names.len(),
        bytes: sum,
    })
}

/// The first byte of a tensor that is another one in `b` than in `a`, row by row, and both: compared by the pieces of `a`, one at a time.
fn first_difference(
    path_a: &Path,
    a: &Checkpoint,
    path_b: &Path,
    b: &Checkpoint,
    info: &TensorInfo<'_>,
) -> Result<Option<(usize, [u8; 2])>> {
    let TensorInfo {
        name, dtype, shape, ..
    } = *info;
    let mut first = None;
    for block in in_file(path_a, a.blocks(name))? {
        let read_a = in_file(path_a, a.read(name, dtype, shape, block))?;
        let read_b = in_file(path_b, b.read(name, dtype, shape, block))?;
        let Some(at) = read_a.iter().zip(&read_b).position(|(x, y)| x != y) else {
            continue;
        };
        // Rows of a block are in order, so that its first difference is that of the least byte of the tensor.
        let (entry, part) = (at / dtype.bytes(), at % dtype.bytes());
        let row = block.start[0] + entry / block.shape[1];
        let col = block.start[1] + entry % block.shape[1];
        let byte = (row * shape[1] + col) * dtype.bytes() + part;
        if first.is_none_or(|(known, _)| byte < known) {
            first = Some((byte, [read_a[at], read_b[at]]));
        }
    }
    Ok(first)
}

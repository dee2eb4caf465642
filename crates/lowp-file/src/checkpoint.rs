//! Checkpoints, as `lowp train --save` writes them: what they hold, and whether two are the same.

use crate::difference::Equal;
use crate::error::{FileError, Result, file_error};
use crate::text::shown;
use lowp_checkpoint::{Block, Checkpoint, Dtype, TensorInfo};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Whether `path` is a checkpoint or a folder of such, be it damaged.
pub fn is_checkpoint(path: &Path) -> bool {
    lowp_checkpoint::is_of_checkpoints(path)
}

fn open(path: &Path) -> Result<Checkpoint> {
    // The message names the file.
    let opened = Checkpoint::latest(path);
    opened.map_err(|error| file_error(path, error.to_string()))
}

/// What a checkpoint holds; the keys are those of JSON.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Where it is.
    pub path: String,
    /// The step that it was saved after.
    pub step: u64,
    /// Ranks that saved it.
    pub ranks: usize,
    /// The recipe.
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
    /// The dimensions.
    pub shape: [usize; 2],
    /// Bytes of all that it holds.
    pub bytes: usize,
    /// Parts that it was saved in.
    pub pieces: usize,
}

/// Bytes of a whole tensor.
fn bytes(tensor: &TensorInfo<'_>) -> usize {
    tensor.shape[0] * tensor.shape[1] * tensor.dtype.bytes()
}

/// The report of the checkpoint at `path`, whose bytes are all read and checked.
///
/// # Errors
/// It cannot be read, or is damaged.
pub fn inspect(path: &Path) -> Result<Report> {
    let checkpoint = open(path)?;
    let verified = checkpoint.verify();
    verified.map_err(|error| file_error(path, error.to_string()))?;
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
            "{name_a} is behind step {} and {name_b} behind step {}",
            a.step(),
            b.step()
        )));
    }
    let names: BTreeSet<&str> = a.tensors().chain(b.tensors()).map(|t| t.name).collect();
    let find = |checkpoint: &Checkpoint, name: &str| {
        let mut tensors = checkpoint.tensors();
        let found = tensors.find(|tensor| tensor.name == name);
        found.map(|tensor| (tensor.dtype, tensor.shape))
    };
    let mut sum = 0;
    for name in &names {
        let shown = shown(name);
        let (Some(of_a), Some(of_b)) = (find(&a, name), find(&b, name)) else {
            let lacks = if a.has(name) { &name_b } else { &name_a };
            return Err(FileError::Differ(format!("'{shown}' is not in {lacks}")));
        };
        if of_a != of_b {
            return Err(FileError::Differ(format!(
                "'{shown}' is {of_a:?} in {name_a} and {of_b:?} in {name_b}"
            )));
        }
        let (dtype, shape) = of_a;
        let read =
            |checkpoint: &Checkpoint| checkpoint.read(name, dtype, shape, Block::whole(shape));
        let read_a = read(&a).map_err(|error| file_error(path_a, error.to_string()))?;
        let read_b = read(&b).map_err(|error| file_error(path_b, error.to_string()))?;
        let differs = read_a.iter().zip(&read_b).position(|(x, y)| x != y);
        if let Some(byte) = differs {
            let entry = byte / dtype.bytes();
            return Err(FileError::Differ(format!(
                "'{shown}' differs first in row {}, column {}: byte {byte} is 0x{:02X} in {name_a} and 0x{:02X} in {name_b}",
                entry / shape[1],
                entry % shape[1],
                read_a[byte],
                read_b[byte]
            )));
        }
        sum += read_a.len();
    }
    Ok(Equal {
        tensors: names.len(),
        bytes: sum,
    })
}

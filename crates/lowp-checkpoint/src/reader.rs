//! [`Checkpoint`]: blocks of tensors, put together of the pieces that ranks saved.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use crate::folder::{is_checkpoint, latest, of_step, step_in, steps};
use crate::index::{Held, INDEX, Index, Kind, MAX_INDEX, file_name};
use crate::rank_file::{Handles, Named, Place, RankFile, check_length};
use crate::spans::{meeting, pieces};
use crate::{Block, CheckpointError, Dtype};

/// A checkpoint that was opened: its index is read and makes sense.
///
/// Entries are read when they are asked for, with the checksums of the parts of pieces that they lie in. The file of a rank is opened when
/// the first of its entries is asked for; its header is compared with the index then.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    index: Index,
    held: Vec<Held>,
    /// The number of each tensor in the index.
    numbers: HashMap<String, usize>,
    state: Mutex<State>,
}

/// What was opened and read so far.
#[derive(Debug, Default)]
struct State {
    files: HashMap<usize, Arc<RankFile>>,
    handles: Handles,
    reads: Reads,
    last: Option<Last>,
}

/// What was read of the files of ranks so far, but for their headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// How often a file was opened.
    pub opens: usize,
    /// Bytes of pieces that were read.
    pub bytes: usize,
    /// How often they were read at another offset than the end of the previous read.
    pub seeks: usize,
    /// Where that was: the rank, and the byte of its file.
    end: (usize, u64),
}

impl Reads {
    fn add(&mut self, rank: usize, start: u64, bytes: usize) {
        self.seeks += usize::from(self.end != (rank, start));
        self.bytes += bytes;
        self.end = (rank, start + bytes as u64);
    }
}

/// The part of a piece that was read last.
#[derive(Debug)]
struct Last {
    rank: usize,
    tensor: String,
    block: Block,
    range: Range<usize>,
    bytes: Vec<u8>,
}

/// What a checkpoint says of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Its name.
    pub name: &'a str,
    /// What its entries are.
    pub dtype: Dtype,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Number of pieces that ranks saved of it.
    pub pieces: usize,
}

impl<'a> TensorInfo<'a> {
    fn of(name: &'a str, kind: &Kind) -> Self {
        Self {
            name,
            dtype: kind.dtype,
            shape: kind.shape,
            pieces: kind.pieces(),
        }
    }
}

impl Checkpoint {
    /// Opens the latest checkpoint of `folder`, which may be a checkpoint itself.
    ///
    /// # Errors
    /// There is none, or as [`Checkpoint::open`].
    pub fn latest(folder: &Path) -> Result<Self, CheckpointError> {
        Self::open(&latest(folder)?)
    }

    /// Opens the checkpoint of `step` in `folder`, which may be this checkpoint itself.
    ///
    /// # Errors
    /// There is none, or as [`Checkpoint::open`].
    pub fn of_step(folder: &Path, step: u64) -> Result<Self, CheckpointError> {
        let place = match is_checkpoint(folder) {
            true => Some(folder.to_owned()),
            false => of_step(folder, step)?,
        };
        let found = place.map(|place| Self::open(&place)).transpose()?;
        let found = found.filter(|found| found.step() == step);
        found.ok_or_else(|| CheckpointError::NoCheckpoint {
            path: folder.to_owned(),
            why: format!("it has no checkpoint of step {step}"),
        })
    }

    /// The newest checkpoint of `folder` before step `before` whose files are all there ([`Checkpoint::check_files`]), and what is wrong with
    /// those that are newer. None is newer than the one that the folder calls the latest.
    ///
    /// # Errors
    /// None is whole: the error of the newest; or what is no damage, as a file that cannot be read or another version.
    pub fn newest_whole(
        folder: &Path,
        before: u64,
    ) -> Result<(Self, Vec<CheckpointError>), CheckpointError> {
        let whole = |place: &Path| {
            let checkpoint = Self::open(place)?;
            checkpoint.check_files().map(|()| checkpoint)
        };
        let latest = latest(folder);
        let name = |place: &PathBuf| place.file_name()?.to_str().and_then(step_in);
        let last = latest.as_ref().map_or(None, name);
        let newest = match &latest {
            Ok(place) if last.is_none_or(|last| last < before) => Some(place.clone()),
            _ => None,
        };
        let mut damaged = Vec::new();
        if let Err(error) = latest {
            leave_out(error, &mut damaged)?;
        }
        let older = last.map_or(before, |last| last.min(before));
        let older = steps(folder)?
            .into_iter()
            .rev()
            .filter(|step| *step < older);
        let older = older.map(|step| of_step(folder, step));
        for place in newest.map(|place| Ok(Some(place))).into_iter().chain(older) {
            // A folder without an index is what was left of one that is being removed.
            let Some(place) = place? else { continue };
            match whole(&place) {
                Ok(checkpoint) => return Ok((checkpoint, damaged)),
                Err(error) => leave_out(error, &mut damaged)?,
            }
        }
        Err(damaged.into_iter().next().unwrap_or_else(|| {
            let path = folder.to_owned();
            let why = format!("it has no whole checkpoint before step {before}");
            CheckpointError::NoCheckpoint { path, why }
        }))
    }

    /// Opens the checkpoint `folder`.
    ///
    /// # Errors
    /// An index that is missing, of another version, or damaged. The files of ranks are opened when they are read.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(INDEX);
        let found = fs::metadata(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => CheckpointError::NoCheckpoint {
                path: folder.to_owned(),
                why: format!("it has no {INDEX}"),
            },
            _ => CheckpointError::io(&path, "read")(error),
        })?;
        // A pipe may have no writer.
        if !found.is_file() || found.len() > MAX_INDEX {
            let why = match found.is_file() {
                true => format!(
                    "it has {} bytes, and an index at most {MAX_INDEX}",
                    found.len()
                ),
                false => "it is no file".to_owned(),
            };
            return Err(CheckpointError::damaged(&path, why));
        }
        let bytes = fs::read(&path).map_err(CheckpointError::io(&path, "read"))?;
        let text = String::from_utf8(bytes);
        let text = text.map_err(|why| CheckpointError::damaged(&path, why.to_string()))?;
        let index = Index::parse(&text, &path)?;
        let held = index.held();
        let held = held.map_err(|why| CheckpointError::damaged(&path, why))?;
        let numbers = index.tensors.keys().cloned().zip(0..).collect();
        Ok(Self {
            folder: folder.to_owned(),
            index,
            held,
            numbers,
            state: Mutex::default(),
        })
    }

    /// Checks that the files of all ranks are there and as long as they are to be; none is opened.
    ///
    /// # Errors
    /// A file that is missing or of another length.
    pub fn check_files(&self) -> Result<(), CheckpointError> {
        let mut files = self.index.files.iter().enumerate();
        files.try_for_each(|(rank, file)| {
            check_length(&self.folder.join(file_name(rank)), file.bytes)
        })
    }

    /// What was read of the files of ranks so far.
    pub fn reads(&self) -> Reads {
        self.state().reads
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What no other checkpoint is called.
    pub fn id(&self) -> &str {
        &self.index.id
    }

    /// The step after which it was saved.
    pub fn step(&self) -> u64 {
        self.index.step
    }

    /// Number of ranks that saved it.
    pub fn ranks(&self) -> usize {
        self.index.files.len()
    }

    /// What the trainer wrote down.
    pub fn about(&self) -> &Value {
        &self.index.about
    }

    /// Its tensors, in the order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        let tensors = self.index.tensors.iter();
        tensors.map(|(name, &kind)| TensorInfo::of(name, &self.index.kinds[kind]))
    }

    /// Tensor `name`, if there is one.
    pub fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        let (name, &kind) = self.index.tensors.get_key_value(name)?;
        Some(TensorInfo::of(name, &self.index.kinds[kind]))
    }

    /// The blocks that ranks saved of tensor `name`, which make it up: whoever reads those holds one piece of it in memory, and reads each
    /// once.
    ///
    /// # Errors
    /// No such tensor.
    pub fn blocks(&self, name: &str) -> Result<impl Iterator<Item = Block>, CheckpointError> {
        Ok(pieces(&self.kind(name)?.spans).map(|(_, block)| block))
    }

    /// Whether there is a tensor called `name`.
    pub fn has(&self, name: &str) -> bool {
        self.index.tensors.contains_key(name)
    }

    /// The entries of `block` of tensor `name`, row by row, which has this dtype and shape.
    ///
    /// # Errors
    /// No such tensor, another dtype or shape, a block outside of it, or a piece that cannot be read or has another checksum.
    pub fn read(
        &self,
        name: &str,
        dtype: Dtype,
        shape: [usize; 2],
        block: Block,
    ) -> Result<Vec<u8>, CheckpointError> {
        let kind = self.kind(name)?;
        if (kind.dtype, kind.shape) != (dtype, shape) {
            let words = |dtype: Dtype, [rows, cols]: [usize; 2]| format!("{dtype:?} {rows}x{cols}");
            let (found, expected) = (words(kind.dtype, kind.shape), words(dtype, shape));
            let why = format!(
                "tensor '{name}' is {found}, but the model needs {expected}; was the checkpoint saved by the same model?"
            );
            return Err(CheckpointError::other(&self.folder, why));
        }
        if !block.lies_in(shape) {
            return Err(CheckpointError::no_block(name, shape, block));
        }
        // In the order of the files. All are opened before there is memory for what they should have.
        let mut places = Vec::new();
        let named = Named {
            name,
            number: self.numbers[name],
            kind: self.index.tensors[name],
        };
        for (rank, piece) in meeting(&kind.spans, block) {
            places.push((rank, self.file(rank)?.place(named, piece)?));
        }
        if let [(rank, place)] = places[..]
            && place.block == block
        {
            let file = self.file(rank)?;
            let whole = 0..block.bytes(dtype).unwrap_or_default();
            return self.read_part(rank, &file, name, place, whole);
        }
        let width = dtype.bytes();
        // Within the tensor, whose bytes were counted.
        let mut out = vec![0; block.shape[0] * block.shape[1] * width];
        for (rank, place) in places {
            let Some(common) = block.common(place.block) else {
                continue;
            };
            let at = |of: Block, row: usize| {
                let (row, col) = (row - of.start[0], common.start[1] - of.start[1]);
                (row * of.shape[1] + col) * width
            };
            let run = common.shape[1] * width;
            let rows = common.start[0]..common.start[0] + common.shape[0];
            let first = at(place.block, rows.start);
            let range = first..at(place.block, rows.end - 1) + run;
            self.with_part(rank, name, place, range, |bytes| {
                for row in rows {
                    let (from, to) = (at(place.block, row) - first, at(block, row));
                    out[to..to + run].copy_from_slice(&bytes[from..from + run]);
                }
            })?;
        }
        Ok(out)
    }

    /// bf16 of a tensor that is, else f32.
    pub fn float_dtype(&self, name: &str) -> Dtype {
        match self.info(name) {
            Some(TensorInfo {
                dtype: Dtype::Bf16, ..
            }) => Dtype::Bf16,
            _ => Dtype::F32,
        }
    }

    /// [`Checkpoint::read`] of f32 entries, or of bf16 ones, which are widened.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_f32(
        &self,
        name: &str,
        shape: [usize; 2],
        block: Block,
    ) -> Result<Vec<f32>, CheckpointError> {
        let dtype = self.float_dtype(name);
        Ok(dtype.widened(&self.read(name, dtype, shape, block)?))
    }

    /// Reads every piece and compares its checksums.
    ///
    /// # Errors
    /// A file that is missing or damaged.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.verify_part(0, 1)
    }

    /// [`Checkpoint::verify`] of every `parts`th file from that of rank `part` on: so many ranks read all of them together.
    ///
    /// # Errors
    /// As there.
    pub fn verify_part(&self, part: usize, parts: usize) -> Result<(), CheckpointError> {
        for rank in (part..self.ranks()).step_by(parts.max(1)) {
            let (file, handle) = self.open_file(rank)?;
            for (name, place) in file.all(&self.index) {
                let mut next = 0;
                while next < file.bytes(place) {
                    let part = file.cover(place, next..next + 1);
                    next = part.end;
                    file.read(&handle, name, place, part)?;
                }
            }
        }
        Ok(())
    }

    fn kind(&self, name: &str) -> Result<&Kind, CheckpointError> {
        self.index.kind(name).ok_or_else(|| {
            let why =
                format!("there is no tensor '{name}'; was the checkpoint saved by the same model?");
            CheckpointError::other(&self.folder, why)
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_file(&self, rank: usize) -> Result<(RankFile, File), CheckpointError> {
        let path = self.folder.join(file_name(rank));
        RankFile::open(&path, rank, self.held[rank], &self.index)
    }

    /// The file of `rank`, which is opened the first time.
    fn file(&self, rank: usize) -> Result<Arc<RankFile>, CheckpointError> {
        let mut state = self.state();
        if let Some(file) = state.files.get(&rank) {
            return Ok(file.clone());
        }
        let (file, handle) = self.open_file(rank)?;
        state.reads.opens += 1;
        state.handles.keep(rank, handle);
        let file = Arc::new(file);
        state.files.insert(rank, file.clone());
        Ok(file)
    }

    /// Reads `range` of a piece in the file of `rank`, which is opened again if others were read meanwhile. One call at a time.
    fn read_part(
        &self,
        rank: usize,
        file: &RankFile,
        name: &str,
        place: Place,
        range: Range<usize>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let mut state = self.state();
        let handle = match state.handles.get(rank) {
            Some(handle) => handle,
            None => {
                let path = self.folder.join(file_name(rank));
                let handle = File::open(&path).map_err(CheckpointError::io(&path, "open"))?;
                state.reads.opens += 1;
                state.handles.keep(rank, handle)
            }
        };
        let start = place.byte(range.start);
        state.reads.add(rank, start, range.len());
        file.read(&handle, name, place, range)
    }

    /// Calls `f` with the bytes `range` of a piece; what has checksums together with them is kept until something else is read.
    fn with_part(
        &self,
        rank: usize,
        name: &str,
        place: Place,
        range: Range<usize>,
        f: impl FnOnce(&[u8]),
    ) -> Result<(), CheckpointError> {
        let file = self.file(rank)?;
        let last = self.state().last.take();
        let kept = last.filter(|last| {
            let same = (last.rank, &*last.tensor, last.block) == (rank, name, place.block);
            same && last.range.start <= range.start && range.end <= last.range.end
        });
        let kept = match kept {
            Some(kept) => kept,
            None => {
                let cover = file.cover(place, range.clone());
                let bytes = self.read_part(rank, &file, name, place, cover.clone())?;
                Last {
                    rank,
                    tensor: name.to_owned(),
                    block: place.block,
                    range: cover,
                    bytes,
                }
            }
        };
        let from = range.start - kept.range.start;
        f(&kept.bytes[from..from + range.len()]);
        self.state().last = Some(kept);
        Ok(())
    }
}

/// Whether a file of the checkpoint `place` is missing, or of another length; not where that cannot be found out now.
pub(crate) fn lacks_files(place: &Path) -> bool {
    let found = Checkpoint::open(place).and_then(|found| found.check_files());
    found.is_err_and(|error| error.is_damage())
}

/// Adds an error of damage; any other is returned.
fn leave_out(
    error: CheckpointError,
    damaged: &mut Vec<CheckpointError>,
) -> Result<(), CheckpointError> {
    if !error.is_damage() {
        return Err(error);
    }
    damaged.push(error);
    Ok(())
}

#[cfg(test)]
#[path = "reader/tests.rs"]
mod tests;

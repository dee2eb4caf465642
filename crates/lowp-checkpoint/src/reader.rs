//! [`Checkpoint`]: blocks of tensors, put together of the pieces that ranks saved.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use safetensors::tensor::Metadata;
use serde_json::Value;

use crate::folder::latest;
use crate::index::{INDEX, Index, MAX_INDEX, PieceRecord, TensorRecord, checksum};
use crate::writer::{ID, MAX_HEADER, RANK, stored};
use crate::{Block, CheckpointError, Dtype};

/// A checkpoint that was opened: its index and the headers of its files are read and fit each other.
///
/// Entries are read when they are asked for, with the checksums of the pieces that they lie in; what is held in memory
/// is the block asked for and one piece.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    index: Index,
    files: Vec<RankFile>,
    /// The piece that was read last, by rank and tensor.
    last: Mutex<Option<(usize, String, Vec<u8>)>>,
}

/// The file of a rank, and where its tensors begin and end.
#[derive(Debug)]
struct RankFile {
    path: PathBuf,
    places: HashMap<String, (u64, u64)>,
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
    /// Number of pieces.
    pub pieces: usize,
}

impl<'a> TensorInfo<'a> {
    fn of((name, tensor): (&'a String, &TensorRecord)) -> Self {
        Self {
            name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            pieces: tensor.pieces.len(),
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

    /// Opens the checkpoint `folder`.
    ///
    /// # Errors
    /// Files that are missing, of other lengths, of another checkpoint or rank, or whose tensors are not those of the index; an index
    /// of another version, or that is damaged.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(INDEX);
        let length = fs::metadata(&path).map_err(|_| CheckpointError::NoCheckpoint {
            path: folder.to_owned(),
            why: format!("it has no {INDEX}"),
        })?;
        if length.len() > MAX_INDEX {
            return Err(CheckpointError::damaged(
                &path,
                format!(
                    "it has {} bytes, and an index at most {MAX_INDEX}",
                    length.len()
                ),
            ));
        }
        let text = fs::read_to_string(&path).map_err(CheckpointError::io(&path, "read"))?;
        let index = Index::parse(&text, &path)?;
        let mut expected: Vec<HashMap<&str, (Dtype, &PieceRecord)>> =
            vec![HashMap::new(); index.files.len()];
        for (name, tensor) in &index.tensors {
            for piece in &tensor.pieces {
                expected[piece.rank].insert(name, (tensor.dtype, piece));
            }
        }
        let mut files = Vec::new();
        for (rank, (file, expected)) in index.files.iter().zip(&expected).enumerate() {
            let path = folder.join(&file.name);
            files.push(open_file(&path, rank, (&index.id, file.bytes), expected)?);
        }
        Ok(Self {
            folder: folder.to_owned(),
            index,
            files,
            last: Mutex::default(),
        })
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What no other checkpoint is called.
    pub fn id(&self) -> &str {
        &self.index.id
    }

    /// The step behind which it was saved.
    pub fn step(&self) -> u64 {
        self.index.step
    }

    /// Number of ranks that saved it.
    pub fn ranks(&self) -> usize {
        self.files.len()
    }

    /// What the trainer wrote down.
    pub fn about(&self) -> &Value {
        &self.index.about
    }

    /// Its tensors, in the order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.index.tensors.iter().map(TensorInfo::of)
    }

    /// Tensor `name`, if there is one.
    pub fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        self.index.tensors.get_key_value(name).map(TensorInfo::of)
    }

    /// The blocks that ranks saved of tensor `name`, which make it up: whoever reads those holds one piece of it in memory, and reads each
    /// once.
    ///
    /// # Errors
    /// No such tensor.
    pub fn blocks(&self, name: &str) -> Result<impl Iterator<Item = Block>, CheckpointError> {
        let pieces = self.tensor(name)?.pieces.iter();
        Ok(pieces.map(|piece| piece.block))
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
        let tensor = self.tensor(name)?;
        if (tensor.dtype, tensor.shape) != (dtype, shape) {
            let words = |dtype: Dtype, [rows, cols]: [usize; 2]| format!("{dtype:?} {rows}x{cols}");
            let (found, expected) = (words(tensor.dtype, tensor.shape), words(dtype, shape));
            let why = format!(
                "tensor '{name}' is {found}, but the model needs {expected}; was the checkpoint saved by the same model?"
            );
            return Err(CheckpointError::other(&self.folder, why));
        }
        if !block.lies_in(shape) {
            return Err(CheckpointError::no_block(name, shape, block));
        }
        if let Some(piece) = tensor.pieces.iter().find(|piece| piece.block == block) {
            return self.piece(name, piece);
        }
        let width = dtype.bytes();
        // Within the tensor, whose bytes were counted.
        let mut out = vec![0; block.shape[0] * block.shape[1] * width];
        for piece in &tensor.pieces {
            let Some(common) = block.common(piece.block) else {
                continue;
            };
            self.with_piece(name, piece, |bytes| {
                let run = common.shape[1] * width;
                for row in common.start[0]..common.start[0] + common.shape[0] {
                    let at = |of: Block| {
                        let (row, col) = (row - of.start[0], common.start[1] - of.start[1]);
                        (row * of.shape[1] + col) * width
                    };
                    let (from, to) = (at(piece.block), at(block));
                    out[to..to + run].copy_from_slice(&bytes[from..from + run]);
                }
            })?;
        }
        Ok(out)
    }

    /// [`Checkpoint::read`] of f32 entries.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_f32(
        &self,
        name: &str,
        shape: [usize; 2],
        block: Block,
    ) -> Result<Vec<f32>, CheckpointError> {
        let bytes = self.read(name, Dtype::F32, shape, block)?;
        let (words, _) = bytes.as_chunks::<4>();
        Ok(words.iter().map(|&word| f32::from_le_bytes(word)).collect())
    }

    /// Reads every piece and compares its checksum.
    ///
    /// # Errors
    /// A piece that cannot be read or has another checksum.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        for (name, tensor) in &self.index.tensors {
            for piece in &tensor.pieces {
                self.with_piece(name, piece, |_| {})?;
            }
        }
        Ok(())
    }

    fn tensor(&self, name: &str) -> Result<&TensorRecord, CheckpointError> {
        let found = self.index.tensors.get(name);
        found.ok_or_else(|| {
            let why =
                format!("there is no tensor '{name}'; was the checkpoint saved by the same model?");
            CheckpointError::other(&self.folder, why)
        })
    }

    fn piece(&self, name: &str, piece: &PieceRecord) -> Result<Vec<u8>, CheckpointError> {
        let file = &self.files[piece.rank];
        let bytes = file.read(name)?;
        if checksum(&bytes) == piece.checksum {
            return Ok(bytes);
        }
        let why = format!("the checksum of tensor '{name}' is another one");
        Err(CheckpointError::damaged(&file.path, why))
    }

    /// Calls `f` with the bytes of a piece, which are kept until another one is read.
    fn with_piece(
        &self,
        name: &str,
        piece: &PieceRecord,
        f: impl FnOnce(&[u8]),
    ) -> Result<(), CheckpointError> {
        let mut last = self
            .last
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        match &*last {
            Some((rank, tensor, bytes)) if *rank == piece.rank && tensor == name => f(bytes),
            _ => {
                // Freed before the next one is read.
                *last = None;
                let bytes = self.piece(name, piece)?;
                f(&bytes);
                *last = Some((piece.rank, name.to_owned(), bytes));
            }
        }
        Ok(())
    }
}

impl RankFile {
    fn read(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let Some(&(start, end)) = self.places.get(name) else {
            let why = format!("tensor '{name}' is missing");
            return Err(CheckpointError::damaged(&self.path, why));
        };
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(start))?;
            let length = usize::try_from(end - start).map_err(std::io::Error::other)?;
            let mut bytes = vec![0; length];
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        read().map_err(CheckpointError::io(&self.path, "read"))
    }
}

/// Opens the file of `rank` and compares its header with the index.
fn open_file(
    path: &Path,
    rank: usize,
    (id, length): (&str, u64),
    expected: &HashMap<&str, (Dtype, &PieceRecord)>,
) -> Result<RankFile, CheckpointError> {
    let damaged = |why: String| CheckpointError::damaged(path, why);
    // A pipe may have no writer.
    let found = fs::metadata(path).map_err(CheckpointError::io(path, "open"))?;
    if !found.is_file() || found.len() != length {
        let found = found.len();
        return Err(damaged(format!("it has {found} bytes of {length}")));
    }
    let mut file = File::open(path).map_err(CheckpointError::io(path, "open"))?;
    let (start, metadata) = header(&mut file, length).map_err(damaged)?;
    let about = |key: &str| {
        let about = metadata.metadata().as_ref()?;
        about.get(key).map(String::as_str)
    };
    if about(ID) != Some(id) {
        return Err(damaged("it belongs to another checkpoint".to_owned()));
    }
    if about(RANK) != Some(&*rank.to_string()) {
        return Err(damaged(format!("it is not the file of rank {rank}")));
    }
    let tensors = metadata.tensors();
    if tensors.len() != expected.len() {
        let (found, needed) = (tensors.len(), expected.len());
        return Err(damaged(format!("it has {found} tensors of {needed}")));
    }
    let mut places = HashMap::new();
    for (name, info) in tensors {
        let Some((dtype, piece)) = expected.get(name.as_str()) else {
            return Err(damaged(format!("tensor '{name}' is not in the index")));
        };
        if info.dtype != stored(*dtype) || info.shape != piece.block.shape {
            return Err(damaged(format!(
                "tensor '{name}' has another shape or dtype"
            )));
        }
        let (from, to) = info.data_offsets;
        let needed = piece.block.entries().map(|n| n * dtype.bytes());
        if to.checked_sub(from) != needed || to as u64 > length - start {
            return Err(damaged(format!("tensor '{name}' lies outside of it")));
        }
        places.insert(name, (start + from as u64, start + to as u64));
    }
    Ok(RankFile {
        path: path.to_owned(),
        places,
    })
}

/// The header of a safetensors file of `length` bytes, and where the data begin.
fn header(file: &mut File, length: u64) -> Result<(u64, Metadata), String> {
    let failed = |error: std::io::Error| format!("its header cannot be read: {error}");
    let mut size = [0; 8];
    file.read_exact(&mut size).map_err(failed)?;
    let header = u64::from_le_bytes(size);
    if header > MAX_HEADER || header.saturating_add(8) > length {
        return Err(format!("its header of {header} bytes does not fit it"));
    }
    let mut text = Vec::new();
    let read = file.take(header).read_to_end(&mut text).map_err(failed)?;
    if read as u64 != header {
        return Err("its header is cut off".to_owned());
    }
    let metadata = serde_json::from_slice(&text).map_err(|error| format!("its header: {error}"))?;
    Ok((8 + header, metadata))
}

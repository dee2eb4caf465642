//! One rank's file: the header, the checksums of its pieces, and the pieces.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use safetensors::tensor::Dtype as Stored;
use twox_hash::XxHash3_64;

use crate::header::{HEADER_LENGTH, HeaderEntry, header};
use crate::index::{CHUNK, FileRecord, MAX_HEADER, checksum, chunks, file_name};
use crate::list::{Part, RankReport, Table, table_of};
use crate::spans::overlap;
use crate::{CheckpointError, Dtype, Late, Piece};

/// The key of a file's metadata that names its checkpoint.
pub(crate) const ID: &str = "lowp.checkpoint";
/// The key of a file's metadata that names its rank.
pub(crate) const RANK: &str = "lowp.rank";
/// The first tensor of a file: the checksums of its pieces, in the order of the file.
pub(crate) const CHECKSUMS: &str = "lowp.checksums";

/// The rank whose file of a checkpoint has these `metadata`; `None` of any other safetensors file.
pub fn rank_of_file(metadata: &HashMap<String, String>) -> Option<&str> {
    metadata.get(ID)?;
    metadata.get(RANK).map(String::as_str)
}

pub(crate) fn stored(dtype: Dtype) -> Stored {
    match dtype {
        Dtype::F32 => Stored::F32,
        Dtype::Bf16 => Stored::BF16,
        Dtype::U8 => Stored::U8,
    }
}

/// What the file has of a tensor: the shape of its only piece, or the entries of several, which follow each other.
pub(crate) fn shape_in_file(blocks: &[crate::Block]) -> Vec<usize> {
    match blocks {
        [only] => only.shape.to_vec(),
        several => vec![several.iter().filter_map(|block| block.entries()).sum()],
    }
}

/// Checks pieces before anything is written, and puts them in the order of the file: wide entries first, so that every tensor is aligned; else
/// tensors in the given order, and the pieces of one by their blocks.
pub(crate) fn arrange(mut pieces: Vec<Piece<Late>>) -> Result<Vec<Piece<Late>>, CheckpointError> {
    for piece in &pieces {
        let Piece {
            name,
            dtype,
            full,
            block,
            bytes,
        } = piece;
        if name == CHECKSUMS {
            return Err(CheckpointError::Invalid(format!(
                "a tensor is called '{name}', as the checksums of the pieces are; give it another name"
            )));
        }
        if !block.lies_in(*full) {
            return Err(CheckpointError::no_block(name, *full, *block));
        }
        let needed = block.bytes(*dtype);
        if needed != Some(bytes.len()) {
            let (found, needed) = (bytes.len(), needed.unwrap_or(usize::MAX));
            return Err(CheckpointError::Invalid(format!(
                "tensor '{name}': {found} bytes for a block of {needed}"
            )));
        }
    }
    let mut first = HashMap::new();
    for (number, piece) in pieces.iter().enumerate() {
        first.entry(piece.name.clone()).or_insert(number);
    }
    pieces.sort_by_key(|piece| {
        (
            Reverse(piece.dtype.bytes()),
            first.get(&piece.name).copied(),
            piece.block,
        )
    });
    for of_tensor in pieces.chunk_by(|a, b| a.name == b.name) {
        let [one, others @ ..] = of_tensor else {
            continue;
        };
        let wrong = |what| {
            let name = &one.name;
            CheckpointError::Invalid(format!("tensor '{name}' has {what} on one rank"))
        };
        if others.iter().any(|other| other.full != one.full) {
            return Err(wrong("several shapes"));
        }
        if !others.is_empty() && overlap(of_tensor.iter().map(|piece| piece.block)) {
            return Err(wrong("pieces that overlap"));
        }
    }
    let mut last = HashMap::new();
    let mixed = pieces.iter().find(|piece| {
        let before = last.insert(&piece.name, piece.dtype);
        before.is_some_and(|before| before != piece.dtype)
    });
    if let Some(Piece { name, .. }) = mixed {
        return Err(CheckpointError::Invalid(format!(
            "tensor '{name}' has several dtypes on one rank"
        )));
    }
    Ok(pieces)
}

/// Writes the file of `rank` with `pieces`, which [`arrange`] gave, into `folder`, and waits until it is on the disk. What the first rank
/// is to know, and the table, if that asks for it.
pub(crate) fn write(
    folder: &Path,
    rank: usize,
    id: &str,
    pieces: Vec<Piece<Late>>,
    progress: Arc<Progress>,
    disk: Disk,
) -> Result<(RankReport, Vec<u8>), CheckpointError> {
    let path = folder.join(file_name(rank));
    let (table, blocks) = table(&pieces);
    let head = Head::new(&path, rank, id, &pieces)?;
    let length = head.length;
    let file = File::create(&path).map_err(CheckpointError::io(&path, "create"))?;
    let counted = Counted {
        file,
        progress,
        disk,
        unsynced: 0,
    };
    let mut file = BufWriter::with_capacity(1 << 20, counted);
    let checksum = head.write(&path, &mut file, pieces)?;
    let synced = file.into_inner().map_err(|error| error.into_error());
    let synced = synced.and_then(|mut counted| counted.sync());
    synced.map_err(CheckpointError::write(&path, length))?;
    let table = table.to_bytes();
    let file = FileRecord {
        bytes: length,
        checksum,
    };
    Ok((RankReport::new(file, &table, blocks), table))
}

/// A file on its way to the disk, as the thread that writes it and whoever waits for it see it.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Bytes that are on the disk so far.
    pub(crate) on_disk: AtomicU64,
    /// Whether nobody wants the file any more.
    pub(crate) given_up: AtomicBool,
}

/// How a file is brought to the disk: in parts, so that bytes that are counted are there, and few wait in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Disk {
    /// Most bytes that are written before they are synced.
    pub(crate) part: u64,
    pub(crate) sync: fn(&File) -> io::Result<()>,
}

impl Default for Disk {
    fn default() -> Self {
        Self {
            part: 1 << 30,
            sync: File::sync_all,
        }
    }
}

/// A file whose bytes on the disk are counted.
struct Counted {
    file: File,
    progress: Arc<Progress>,
    disk: Disk,
    unsynced: u64,
}

impl Counted {
    fn sync(&mut self) -> io::Result<()> {
        (self.disk.sync)(&self.file)?;
        let on_disk = &self.progress.on_disk;
        on_disk.fetch_add(self.unsynced, Ordering::Relaxed);
        self.unsynced = 0;
        Ok(())
    }
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.progress.given_up.load(Ordering::Relaxed) {
            return Err(io::Error::other("its checkpoint was given up"));
        }
        // Before anything is written: a call that a signal interrupts is made again with the same bytes.
        if self.unsynced >= self.disk.part {
            self.sync()?;
        }
        let room = self.disk.part - self.unsynced;
        let len = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        let written = self.file.write(&bytes[..len])?;
        self.unsynced += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for Counted {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// The table of `pieces`, those of a tensor one after the other, and the blocks of its kinds.
fn table(pieces: &[Piece<Late>]) -> (Table, Vec<Vec<crate::Block>>) {
    table_of(pieces.chunk_by(|a, b| a.name == b.name).map(|pieces| {
        let Piece {
            name, dtype, full, ..
        } = &pieces[0];
        let blocks = pieces.iter().map(|piece| piece.block).collect();
        Part {
            name,
            dtype: *dtype,
            full: *full,
            blocks,
        }
    }))
}

/// What a file begins with.
pub(crate) struct Head {
    /// The header, and room for the checksums.
    bytes: Vec<u8>,
    /// Bytes of the header.
    header: usize,
    /// Bytes of the file.
    pub(crate) length: u64,
}

impl Head {
    pub(crate) fn new(
        path: &Path,
        rank: usize,
        id: &str,
        pieces: &[Piece<Late>],
    ) -> Result<Self, CheckpointError> {
        let about = [(ID, id.to_owned()), (RANK, rank.to_string())];
        let about = about.map(|(key, value)| (key.to_owned(), value)).into();
        let sums = [pieces.iter().map(|piece| chunks(piece.bytes.len())).sum()];
        let checksums = HeaderEntry {
            name: CHECKSUMS,
            dtype: Stored::U64,
            shape: &sums,
            bytes: 8 * sums[0],
        };
        let of_tensors = pieces.chunk_by(|a, b| a.name == b.name);
        let of_tensors = of_tensors.filter_map(|pieces| {
            let there = pieces.iter().map(|piece| piece.block);
            let blocks: Vec<_> = there.filter(|block| !block.is_empty()).collect();
            let bytes = pieces.iter().map(|piece| piece.bytes.len()).sum();
            let shape = shape_in_file(&blocks);
            (!blocks.is_empty()).then(|| (&pieces[0], shape, bytes))
        });
        let of_tensors: Vec<_> = of_tensors.collect();
        let entries = of_tensors.iter().map(|(piece, shape, bytes)| HeaderEntry {
            name: &piece.name,
            dtype: stored(piece.dtype),
            shape,
            bytes: *bytes,
        });
        let about: BTreeMap<String, String> = about;
        let header = header([checksums].into_iter().chain(entries), &about);
        let mut bytes = header
            .map_err(std::io::Error::other)
            .map_err(CheckpointError::io(path, "write"))?;
        let header = bytes.len();
        if (header - HEADER_LENGTH) as u64 > MAX_HEADER {
            return Err(CheckpointError::TooLong {
                path: path.to_owned(),
                what: "the header",
                pieces: pieces.len(),
                bytes: (header - HEADER_LENGTH) as u64,
                most: MAX_HEADER,
            });
        }
        bytes.resize(header + 8 * sums[0], 0);
        let data: usize = pieces.iter().map(|piece| piece.bytes.len()).sum();
        let length = (bytes.len() + data) as u64;
        Ok(Self {
            bytes,
            header,
            length,
        })
    }

    /// Writes it and `pieces` to `file`, and then the checksums of these. Returns the checksum of what it has then.
    pub(crate) fn write(
        self,
        path: &Path,
        file: &mut (impl Write + Seek),
        pieces: Vec<Piece<Late>>,
    ) -> Result<String, CheckpointError> {
        let failed = || CheckpointError::write(path, self.length);
        let mut head = self.bytes;
        file.write_all(&head).map_err(failed())?;
        let mut at = self.header;
        // One piece after the other, so that no more of them than that on its way is in memory twice.
        for piece in pieces {
            let name = piece.name;
            let bytes = match piece.bytes.wait() {
                Ok(bytes) => bytes,
                Err(why) => return Err(CheckpointError::NoBytes { name, why }),
            };
            file.write_all(&bytes).map_err(failed())?;
            for chunk in bytes.chunks(CHUNK) {
                head[at..at + 8].copy_from_slice(&XxHash3_64::oneshot(chunk).to_le_bytes());
                at += 8;
            }
        }
        let sums = &head[self.header..];
        file.seek(SeekFrom::Start(self.header as u64))
            .and_then(|_| file.write_all(sums))
            .and_then(|()| file.flush())
            .map_err(failed())?;
        Ok(checksum(&head))
    }
}

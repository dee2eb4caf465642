//! [`RankFile`]: where the pieces in the file of a rank begin and end, and their checksums.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::{Dtype as Stored, Metadata};
use twox_hash::XxHash3_64;

use crate::header::HEADER_LENGTH;
use crate::index::{CHUNK, Held, Index, checksum, chunks};
use crate::spans::of_rank;
use crate::writer::{CHECKSUMS, ID, RANK, shape_in_file, stored};
use crate::{Block, CheckpointError};

/// Where the pieces of a tensor begin in a file, after its header, and the first of their checksums.
type Start = (NonZeroU64, usize);

/// A tensor: its name, and its number and that of its kind in the index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named<'a> {
    pub(crate) name: &'a str,
    pub(crate) number: usize,
    pub(crate) kind: usize,
}

/// The file of a rank, whose header was read and fits the index.
#[derive(Debug)]
pub(crate) struct RankFile {
    path: PathBuf,
    /// By the number of the tensor, of which the rank may have nothing.
    starts: Vec<Option<Start>>,
    /// The pieces of a tensor of each kind, and the bytes of each.
    blocks: Vec<Vec<(Block, usize)>>,
    /// Of all chunks of all pieces, in the order of the file.
    checksums: Vec<u64>,
    /// Bytes that have one checksum.
    chunk: usize,
}

/// Where a piece lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) block: Block,
    start: u64,
    bytes: usize,
    /// The first of its checksums.
    checksum: usize,
}

impl Place {
    /// Where in the file byte `at` of the piece lies.
    pub(crate) const fn byte(self, at: usize) -> u64 {
        self.start + at as u64
    }
}

/// The length of the file at `path`, if it is one.
pub(crate) fn check_length(path: &Path, length: u64) -> Result<(), CheckpointError> {
    // A pipe may have no writer.
    let found = fs::metadata(path).map_err(CheckpointError::io(path, "open"))?;
    if !found.is_file() || found.len() != length {
        let found = found.len();
        let why = format!("it has {found} bytes of {length}");
        return Err(CheckpointError::damaged(path, why));
    }
    Ok(())
}

impl RankFile {
    /// Opens the file `path` of `rank`, whose pieces are as long as `held` says, and compares its header with the index.
    pub(crate) fn open(
        path: &Path,
        rank: usize,
        held: Held,
        index: &Index,
    ) -> Result<(Self, File), CheckpointError> {
        check_length(path, index.files[rank].bytes)?;
        let mut file = File::open(path).map_err(CheckpointError::io(path, "open"))?;
        let blocks = index.kinds.iter().map(|kind| {
            let blocks = of_rank(&kind.spans, rank).into_iter();
            let bytes = |block: Block| block.bytes(kind.dtype).unwrap_or(usize::MAX);
            blocks.map(|block| (block, bytes(block))).collect()
        });
        let blocks: Vec<_> = blocks.collect();
        let opened = Self::read_head(&mut file, rank, held, index, &blocks);
        let (starts, checksums) = opened.map_err(|why| CheckpointError::damaged(path, why))?;
        let chunk = match index.checksums {
            Some(_) => usize::MAX,
            None => CHUNK,
        };
        let opened = Self {
            path: path.to_owned(),
            starts,
            blocks,
            checksums,
            chunk,
        };
        Ok((opened, file))
    }

    fn read_head(
        file: &mut File,
        rank: usize,
        held: Held,
        index: &Index,
        blocks: &[Vec<(Block, usize)>],
    ) -> Result<(Vec<Option<Start>>, Vec<u64>), String> {
        let old = index.checksums.as_ref().map(|old| &old[rank]);
        let head = index.head_bytes(rank, held).ok_or("its length cannot be")?;
        let mut bytes = Vec::new();
        let read = file.take(head).read_to_end(&mut bytes);
        read.map_err(|error| format!("its header cannot be read: {error}"))?;
        let (length, rest) = bytes.split_first_chunk().ok_or("its header is cut off")?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok();
        let parts = length.and_then(|length| rest.split_at_checked(length));
        let Some((header, checksums)) = parts else {
            return Err("its header does not fit it".to_owned());
        };
        if old.is_some() && !checksums.is_empty() {
            return Err("its header does not fit it".to_owned());
        }
        let metadata: Metadata =
            serde_json::from_slice(header).map_err(|error| format!("its header: {error}"))?;
        let about = |key: &str| {
            let about = metadata.metadata().as_ref()?;
            about.get(key).map(String::as_str)
        };
        if about(ID) != Some(&index.id) {
            return Err("it belongs to another checkpoint".to_owned());
        }
        if about(RANK) != Some(&*rank.to_string()) {
            return Err(format!("it is not the file of rank {rank}"));
        }
        if old.is_none() && checksum(&bytes) != index.files[rank].checksum {
            return Err("the checksum of its header is another one".to_owned());
        }
        let (words, _) = checksums.as_chunks::<8>();
        let mut sums: Vec<u64> = words.iter().map(|&word| u64::from_le_bytes(word)).collect();
        let tensors = metadata.tensors();
        if old.is_none() {
            let found = tensors.get(CHECKSUMS);
            let fits = found.is_some_and(|found| {
                found.dtype == Stored::U64 && found.data_offsets == (0, checksums.len())
            });
            if !fits {
                return Err(format!("it has no '{CHECKSUMS}' in front"));
            }
        }
        // In the order of the file.
        let mut order: Vec<_> = tensors
            .iter()
            .filter(|(name, _)| *name != CHECKSUMS)
            .collect();
        // Those without entries have no place; only version 1 has them.
        order.retain(|(_, info)| old.is_none() || !info.shape.contains(&0));
        order.sort_by_key(|(_, info)| info.data_offsets.0);
        let needed = index
            .tensors
            .values()
            .filter(|&&kind| !blocks[kind].is_empty())
            .count();
        if order.len() != needed {
            return Err(format!("it has {} tensors of {needed}", order.len()));
        }
        let begin = (HEADER_LENGTH + header.len()) as u64;
        let numbers = index.tensors.keys().enumerate();
        let numbers: HashMap<&str, usize> = numbers
            .map(|(number, name)| (name.as_str(), number))
            .collect();
        let (mut starts, mut next) = (vec![None; numbers.len()], 0);
        for (name, info) in order {
            let (Some(&kind), Some(&number)) = (index.tensors.get(name), numbers.get(&**name))
            else {
                return Err(format!("tensor '{name}' is not in the index"));
            };
            let (kind, blocks) = (&index.kinds[kind], &blocks[kind]);
            let there: Vec<Block> = blocks.iter().map(|(block, _)| *block).collect();
            if info.dtype != stored(kind.dtype) || info.shape != shape_in_file(&there) {
                return Err(format!("tensor '{name}' has another shape or dtype"));
            }
            let mut at = info.data_offsets.0 as u64;
            starts[number] = NonZeroU64::new(begin + at).map(|start| (start, next));
            for &(_, bytes) in blocks {
                at += bytes as u64;
                match old {
                    Some(old) => {
                        sums.push(*old.get(name).ok_or("a checksum is missing")?);
                        next += 1;
                    }
                    None => next += chunks(bytes),
                }
            }
            let fits = begin + at <= index.files[rank].bytes;
            if at != info.data_offsets.1 as u64 || !fits {
                return Err(format!("tensor '{name}' lies outside of it"));
            }
        }
        match sums.len() == next {
            true => Ok((starts, sums)),
            false => Err(format!("it has {} checksums of {next}", sums.len())),
        }
    }

    /// The places of the pieces of a tensor, in the order of the file.
    fn places(&self, of: Named<'_>) -> impl Iterator<Item = Place> {
        let start = self.starts[of.number].into_iter();
        start.flat_map(move |(start, checksum)| {
            let (mut start, mut checksum) = (start.get(), checksum);
            self.blocks[of.kind].iter().map(move |&(block, bytes)| {
                let place = Place {
                    block,
                    start,
                    bytes,
                    checksum,
                };
                start += bytes as u64;
                checksum += bytes.div_ceil(self.chunk);
                place
            })
        })
    }

    /// The place of the piece `block` of a tensor.
    pub(crate) fn place(&self, of: Named<'_>, block: Block) -> Result<Place, CheckpointError> {
        let found = self.places(of).find(|place| place.block == block);
        found.ok_or_else(|| {
            CheckpointError::damaged(&self.path, format!("tensor '{}' is missing", of.name))
        })
    }

    /// All pieces with the names of their tensors, in the order of the file.
    pub(crate) fn all<'a>(&self, index: &'a Index) -> Vec<(&'a str, Place)> {
        let tensors = index.tensors.iter().enumerate();
        let places = tensors.flat_map(|(number, (name, &kind))| {
            let places = self.places(Named { name, number, kind });
            places.map(|place| (name.as_str(), place))
        });
        let mut all: Vec<_> = places.collect();
        all.sort_by_key(|(_, place)| place.start);
        all
    }

    /// The number of bytes of a piece.
    pub(crate) const fn bytes(&self, place: Place) -> usize {
        place.bytes
    }

    /// The bytes of a piece whose checksums are needed for those of `range`.
    pub(crate) fn cover(&self, place: Place, range: Range<usize>) -> Range<usize> {
        let start = range.start / self.chunk * self.chunk;
        let end = range.end.div_ceil(self.chunk).saturating_mul(self.chunk);
        start..end.min(place.bytes)
    }

    /// The bytes `range` of a piece, which [`RankFile::cover`] gave, of the open `file`.
    pub(crate) fn read(
        &self,
        mut file: &File,
        name: &str,
        place: Place,
        range: Range<usize>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = vec![0; range.len()];
        file.seek(SeekFrom::Start(place.byte(range.start)))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(CheckpointError::io(&self.path, "read"))?;
        let first = place.checksum + range.start / self.chunk;
        for (number, chunk) in bytes.chunks(self.chunk).enumerate() {
            if self.checksums.get(first + number) != Some(&XxHash3_64::oneshot(chunk)) {
                let why = format!("the checksum of tensor '{name}' is another one");
                return Err(CheckpointError::damaged(&self.path, why));
            }
        }
        Ok(bytes)
    }
}

/// Open files of ranks. Where there are too many, the one that was read last makes room: who reads all files
/// one after the other, again and again, finds most of them open.
#[derive(Debug, Default)]
pub(crate) struct Handles(Vec<(usize, Arc<File>)>);

impl Handles {
    /// Most of them: processes may have a thousand files open.
    const MOST: usize = 64;

    pub(crate) fn keep(&mut self, rank: usize, file: File) -> Arc<File> {
        let file = Arc::new(file);
        if self.0.len() == Self::MOST {
            self.0.pop();
        }
        self.0.push((rank, file.clone()));
        file
    }

    pub(crate) fn get(&mut self, rank: usize) -> Option<Arc<File>> {
        let at = self.0.iter().position(|(other, _)| *other == rank)?;
        let found = self.0.remove(at);
        let file = found.1.clone();
        self.0.push(found);
        Some(file)
    }
}

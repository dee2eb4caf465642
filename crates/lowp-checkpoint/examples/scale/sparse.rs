//! Files whose zeros take no room on the disk.

use std::fs::File;
use std::io::{Error, Result, Seek, SeekFrom, Write};
use std::path::Path;

use crate::block::{Block, Late, Piece};
use crate::index::{FileRecord, file_name};
use crate::model::Tensor;
use crate::writer::{Head, arrange};

/// Writes no zeros.
struct Sparse(File);

impl Write for Sparse {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        match bytes.iter().all(|byte| *byte == 0) {
            true => {
                let skipped = i64::try_from(bytes.len()).map_err(Error::other)?;
                self.0.seek_relative(skipped).map(|()| bytes.len())
            }
            false => self.0.write(bytes),
        }
    }

    fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }
}

impl Seek for Sparse {
    fn seek(&mut self, to: SeekFrom) -> Result<u64> {
        self.0.seek(to)
    }
}

/// Writes the file of `rank` with `parts`, all of them zeros; its record, and the bytes in front of its pieces.
pub(crate) fn write(
    folder: &Path,
    (rank, id): (usize, &str),
    parts: &[(Tensor, Block)],
) -> (FileRecord, usize) {
    let pieces = parts.iter().map(|(tensor, block)| {
        let bytes = block.bytes(tensor.dtype).expect("a size");
        Piece {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            full: tensor.full,
            block: *block,
            bytes: Late::new(bytes, move || Ok(vec![0; bytes])),
        }
    });
    let pieces = arrange(pieces.collect()).expect("pieces");
    let data: usize = pieces.iter().map(|piece| piece.bytes.len()).sum();
    let path = folder.join(file_name(rank));
    let head = Head::new(&path, rank, id, &pieces).expect("a header");
    let bytes = head.length;
    let file = File::create(&path).expect("a file");
    file.set_len(bytes).expect("a sparse file");
    let checksum = head
        .write(&path, &mut Sparse(file), pieces)
        .expect("a file");
    (FileRecord { bytes, checksum }, bytes as usize - data)
}

//! The stored buffers of a weight as pieces of checkpoints.

use std::ops::Range;

use lowp_checkpoint::{Block, Checkpoint, Dtype, Late, Piece};
use lowp_format::{Axis, BufferSpec, Origin, QuantizedTensor, Recipe, Shape, ShardTiles, Usage};
use lowp_kernels::Backend;
use lowp_shard::ShardError;

use crate::error::ModelError;
use crate::tile_pieces::TileLayout;

/// Where `rows` of a matrix of shape `full` lie in the buffer of `spec`, in bytes: of the whole buffer, and of the rows.
fn place(spec: &BufferSpec, full: Shape, rows: Range<usize>) -> ([usize; 2], Block) {
    let bytes = |shape: Shape| [spec.entries(shape)[0], spec.row_bytes(shape)];
    let whole = bytes(full);
    let mut block = Block::whole(whole);
    if spec.origin != Origin::Replicated {
        let axis = usize::from(spec.axes[0] != Axis::Rows);
        block.start[axis] = match rows.start {
            0 => 0,
            start => bytes(full.with_rows(start))[axis],
        };
        block.shape[axis] = match rows.len() {
            0 => 0,
            len => bytes(full.with_rows(len))[axis],
        };
    }
    (whole, block)
}

/// The pieces of the tiles that a rank has in `tensor`, those of these rows of the tall matrix.
pub(crate) fn weight_tiles<B: Backend, R: Recipe>(
    stream: &B,
    name: &str,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    tiles: &ShardTiles,
    rows: Range<usize>,
    first: bool,
) -> Result<Vec<Piece<Late>>, ShardError> {
    let mut pieces = Vec::new();
    for spec in &tensor.recipe().stored(Usage::BOTH) {
        let storage = &tensor.buffer(spec.key)?.storage;
        let bytes = stream.start_read_bytes(storage, 0..stream.len(storage))?;
        let arrive = move || bytes.wait().map_err(|e| e.to_string());
        let name = format!("{name}.{}", spec.key);
        if spec.origin != Origin::Replicated {
            let layout = TileLayout::of_buffer(tiles, spec);
            pieces.extend(layout.pieces(&name, tiles, owned(tiles, &rows), arrive));
        } else if first {
            let (full, block) = place(spec, tiles.full(), 0..tiles.full().rows);
            pieces.push(Piece {
                name,
                dtype: Dtype::U8,
                full,
                block,
                bytes: Late::new(full[0] * full[1], arrive),
            });
        }
    }
    Ok(pieces)
}

/// Fills the stored buffers of `tensor`, which holds tiles as [`weight_tiles`] takes them.
pub(crate) fn restore_tiles<B: Backend, R: Recipe>(
    backend: &B,
    name: &str,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    tiles: &ShardTiles,
    rows: Range<usize>,
    checkpoint: &Checkpoint,
) -> Result<(), ModelError> {
    for spec in &tensor.recipe().stored(Usage::BOTH) {
        let name = format!("{name}.{}", spec.key);
        let bytes = if spec.origin == Origin::Replicated {
            let (whole, block) = place(spec, tiles.full(), 0..tiles.full().rows);
            checkpoint.read(&name, Dtype::U8, whole, block)?
        } else {
            let layout = TileLayout::of_buffer(tiles, spec);
            layout.read(&name, tiles, owned(tiles, &rows), checkpoint)?
        };
        let buffer = &tensor.buffer(spec.key)?.storage;
        backend.write(buffer, 0, &bytes)?;
    }
    Ok(())
}

/// The tiles that lie in these rows of the tall matrix.
fn owned(tiles: &ShardTiles, rows: &Range<usize>) -> Range<usize> {
    let height = tiles.tile().rows;
    rows.start / height..rows.end / height
}

/// The pieces of `rows` of a weight of shape `full`. `tensor` holds these rows, or all: then `of_whole`. What all ranks have is a piece
/// of the `first`.
pub(crate) fn weight_pieces<B: Backend, R: Recipe>(
    stream: &B,
    name: &str,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    full: Shape,
    rows: Range<usize>,
    of_whole: bool,
    first: bool,
) -> Result<Vec<Piece<Late>>, ShardError> {
    let mut pieces = Vec::new();
    for spec in &tensor.recipe().stored(Usage::BOTH) {
        if spec.origin == Origin::Replicated && !first {
            continue;
        }
        let (whole, block) = place(spec, full, rows.clone());
        let storage = &tensor.buffer(spec.key)?.storage;
        let (all, len) = (stream.len(storage), block.shape[0] * block.shape[1]);
        let is_part = of_whole && block.shape != whole;
        let bytes = match is_part && block.shape[1] < whole[1] {
            // Parts of rows.
            true => {
                let bytes = stream.start_read_bytes(storage, 0..all)?;
                Late::new(len, move || {
                    let bytes = bytes.wait().map_err(|e| e.to_string())?;
                    Ok(cut(&bytes, whole[1], block))
                })
            }
            false => {
                let start = if is_part {
                    block.start[0] * whole[1]
                } else {
                    0
                };
                let bytes = stream.start_read_bytes(storage, start..start + len)?;
                Late::new(len, || bytes.wait().map_err(|e| e.to_string()))
            }
        };
        pieces.push(Piece {
            name: format!("{name}.{}", spec.key),
            dtype: Dtype::U8,
            full: whole,
            block,
            bytes,
        });
    }
    Ok(pieces)
}

/// The bytes of `block` of rows of `width` bytes.
fn cut(bytes: &[u8], width: usize, block: Block) -> Vec<u8> {
    let rows = block.start[0]..block.start[0] + block.shape[0];
    let row = |row: usize| {
        let from = row * width + block.start[1];
        &bytes[from..from + block.shape[1]]
    };
    rows.flat_map(row).copied().collect()
}

/// Fills the stored buffers of `tensor`, which holds `rows` of a weight of shape `full`.
pub(crate) fn restore_weight<B: Backend, R: Recipe>(
    backend: &B,
    name: &str,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    full: Shape,
    rows: Range<usize>,
    checkpoint: &Checkpoint,
) -> Result<(), ModelError> {
    for spec in &tensor.recipe().stored(Usage::BOTH) {
        let (whole, block) = place(spec, full, rows.clone());
        let name = format!("{name}.{}", spec.key);
        let bytes = checkpoint.read(&name, Dtype::U8, whole, block)?;
        let buffer = &tensor.buffer(spec.key)?.storage;
        backend.write(buffer, 0, &bytes)?;
    }
    Ok(())
}

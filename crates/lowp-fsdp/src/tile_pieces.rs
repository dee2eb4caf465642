//! Tiles that a rank owns, as pieces of checkpoints: at most three rectangles of a tensor.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use lowp_checkpoint::{Block, Checkpoint, CheckpointError, Dtype, Late, Piece};
use lowp_format::{Axis, BufferSpec, Shape, ShardTiles, TileRange};

/// How the tiles of a rank lie in a tensor and in the rank's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileLayout {
    /// Rows and columns of the tensor.
    full: [usize; 2],
    /// Rows and columns of a tile.
    tile: [usize; 2],
    /// The axis of the tensor along which bands follow each other, and tiles in memory: 0 or 1.
    bands: usize,
    /// What entries are.
    dtype: Dtype,
}

type Arrived =
    LazyLock<Result<Vec<u8>, String>, Box<dyn FnOnce() -> Result<Vec<u8>, String> + Send>>;

impl TileLayout {
    /// The layout of values, one for each element.
    pub(crate) fn of_elements(tiles: &ShardTiles, dtype: Dtype) -> Self {
        let sides = |shape: Shape| [shape.rows, shape.cols];
        Self {
            full: sides(tiles.full()),
            tile: sides(tiles.tile()),
            bands: 0,
            dtype,
        }
    }

    /// The layout of the bytes of a buffer.
    pub(crate) fn of_buffer(tiles: &ShardTiles, spec: &BufferSpec) -> Self {
        let bytes = |shape: Shape| [spec.entries(shape)[0], spec.row_bytes(shape)];
        Self {
            full: bytes(tiles.full()),
            tile: bytes(tiles.tile()),
            bands: usize::from(spec.axes[0] != Axis::Rows),
            dtype: Dtype::U8,
        }
    }

    /// Where a rectangle of tiles lies.
    fn block(&self, of: &TileRange) -> Block {
        let mut block = Block::whole(self.tile);
        let (bands, tiles) = (self.bands, 1 - self.bands);
        block.start[bands] = of.band * self.tile[bands];
        block.shape[bands] = of.bands * self.tile[bands];
        block.start[tiles] = of.place * self.tile[tiles];
        block.shape[tiles] = of.tiles * self.tile[tiles];
        block
    }

    /// Bytes of a run: its place in the memory of a rank with `all` tiles, and in the rectangle, whose tiles begin with number `first` there.
    fn runs(
        self,
        of: TileRange,
        first: usize,
        all: usize,
    ) -> impl Iterator<Item = [Range<usize>; 2]> {
        let [height, width] = self.tile;
        let beside = self.bands == 1;
        let pitch = self.block(&of).shape[1];
        let bytes = self.dtype.bytes();
        let places =
            (0..of.bands).flat_map(move |band| (0..of.tiles).map(move |tile| (band, tile)));
        let places = places.flat_map(move |(band, tile)| (0..height).map(move |i| (band, tile, i)));
        places.map(move |(band, tile, i)| {
            let number = first + band * of.tiles + tile;
            let (memory, piece) = match beside {
                true => (
                    (i * all + number) * width,
                    (tile * height + i) * pitch + band * width,
                ),
                false => (
                    (number * height + i) * width,
                    (band * height + i) * pitch + tile * width,
                ),
            };
            [memory, piece].map(|start| start * bytes..(start + width) * bytes)
        })
    }

    /// The pieces of `owned` tiles, whose bytes arrive late.
    pub(crate) fn pieces(
        self,
        name: &str,
        tiles: &ShardTiles,
        owned: Range<usize>,
        arrive: impl FnOnce() -> Result<Vec<u8>, String> + Send + 'static,
    ) -> Vec<Piece<Late>> {
        let arrived: Arc<Arrived> = Arc::new(LazyLock::new(Box::new(arrive)));
        let all = owned.len();
        let mut first = 0;
        let piece = |of: TileRange| {
            let block = self.block(&of);
            let len = block.shape[0] * block.shape[1] * self.dtype.bytes();
            let (begin, arrived) = (first, Arc::clone(&arrived));
            first += of.bands * of.tiles;
            let bytes = Late::new(len, move || {
                let bytes = arrived.as_ref().as_ref().map_err(Clone::clone)?;
                let mut piece = vec![0; len];
                for [from, to] in self.runs(of, begin, all) {
                    piece[to].copy_from_slice(&bytes[from]);
                }
                Ok(piece)
            });
            Piece {
                name: name.to_owned(),
                dtype: self.dtype,
                full: self.full,
                block,
                bytes,
            }
        };
        tiles.ranges(owned).map(piece).collect()
    }

    /// The bytes of `owned` tiles as they lie in the memory of their rank.
    pub(crate) fn read(
        self,
        name: &str,
        tiles: &ShardTiles,
        owned: Range<usize>,
        checkpoint: &Checkpoint,
    ) -> Result<Vec<u8>, CheckpointError> {
        let all = owned.len();
        let mut memory = vec![0; all * self.tile[0] * self.tile[1] * self.dtype.bytes()];
        let mut first = 0;
        for of in tiles.ranges(owned) {
            let piece = checkpoint.read(name, self.dtype, self.full, self.block(&of))?;
            for [to, from] in self.runs(of, first, all) {
                memory[to].copy_from_slice(&piece[from]);
            }
            first += of.bands * of.tiles;
        }
        Ok(memory)
    }
}

/// `elements` of the flattened tall matrix of `tiles`, of the matrix `name` of f32 or bf16, which was saved as it is or flattened
/// as one row.
pub(crate) fn read_values(
    checkpoint: &Checkpoint,
    name: &str,
    tiles: &ShardTiles,
    elements: Range<usize>,
) -> Result<Vec<f32>, CheckpointError> {
    let Shape { rows, cols } = tiles.full();
    let full = [rows, cols];
    if tiles.are_in_order() {
        return checkpoint.read_elements(name, full, elements);
    }
    if checkpoint.info(name).is_none_or(|info| info.shape != full) {
        let bands = tiles.bands(&elements);
        let values = checkpoint.read_elements(name, full, bands.clone())?;
        return Ok(tiles.of_bands(&values, bands.start, elements));
    }
    let each = tiles.tile().elements();
    let owned = elements.start / each..elements.end / each;
    let dtype = checkpoint.float_dtype(name);
    let layout = TileLayout::of_elements(tiles, dtype);
    Ok(dtype.widened(&layout.read(name, tiles, owned, checkpoint)?))
}

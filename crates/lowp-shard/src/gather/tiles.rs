//! Where the tiles of a gathered buffer go.

use lowp_format::{BufferSpec, GatherPlan, GatherStep, PieceLayout, Shape, ShardTiles, TileRange};
use lowp_kernels::Runs;

/// The copy of the tall matrix of `tiles` to the matrix, in elements.
pub fn tall_to_matrix(tiles: &ShardTiles) -> Runs {
    let (full, tile) = (tiles.full(), tiles.tile());
    below(tiles, [tile.rows, tile.cols], full.cols)
}

/// The copy of tiles that lie one below another, of `height` rows of `width`, to rows of `pitch`.
fn below(tiles: &ShardTiles, [height, width]: [usize; 2], pitch: usize) -> Runs {
    let (full, rows, across) = (tiles.full(), tiles.tile().rows, tiles.across());
    Runs {
        len: width,
        counts: [full.rows.div_ceil(rows), across, height],
        from: 0,
        from_pitch: [across * height * width, height * width, width],
        to: 0,
        to_pitch: [height * pitch, width, pitch],
    }
}

/// The copies that put the tiles of all ranks, one piece after the other, to their places in the buffer of `spec`.
pub(super) fn tile_copies(plan: &GatherPlan, spec: &BufferSpec, step: &GatherStep) -> Vec<Runs> {
    let tiles = &plan.tiles;
    let tile = tiles.tile();
    // Of a tile, then of the buffer.
    let [height, width] = [spec.entries(tile)[0], spec.row_bytes(tile)];
    let pitch = spec.row_bytes(plan.full);
    let across = tiles.across();
    if tile.elements() == 0 {
        return Vec::new();
    }
    let GatherStep::Concat { layout, .. } = step else {
        return Vec::new();
    };
    if *layout == PieceLayout::TilesBelow {
        return vec![below(tiles, [height, width], pitch)];
    }
    let mut copies = Vec::new();
    for (rows, bytes) in plan.cuts.ranges().zip(step.piece_ranges()) {
        let piece = Shape::new(rows.len(), tile.cols);
        let from_pitch = spec.row_bytes(piece);
        let mut first = bytes.start;
        for TileRange {
            band,
            place,
            bands,
            tiles,
        } in tiles.ranges(rows.start / tile.rows..rows.end / tile.rows)
        {
            copies.push(Runs {
                len: width,
                counts: [height, bands, tiles],
                from: first,
                from_pitch: [from_pitch, across * width, width],
                to: place * height * pitch + band * width,
                to_pitch: [pitch, width, height * pitch],
            });
            first += bands * tiles * width;
        }
    }
    copies
}

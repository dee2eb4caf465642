//! [`ShardTiles`]: a matrix as tiles that ranks own, where shards are finer than whole rows.

use std::ops::Range;

use crate::{Axis, BufferSpec, FormatError, Orientation, Recipe, Shape, Usage, lcm};

/// A matrix as tiles of `rows` x `cols`: band after band of `rows` rows, and tile after tile within a band. The *tall matrix* has the tiles
/// one below another; where a tile is as wide as the matrix, it is the matrix. No block crosses a tile, so that the tall matrix
/// is quantized to the codes and scales of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShardTiles {
    full: Shape,
    rows: usize,
    cols: usize,
}

/// Tiles of a rank that make a rectangle: whole bands, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileRange {
    /// The first band.
    pub band: usize,
    /// The first tile within the band.
    pub place: usize,
    /// How many bands.
    pub bands: usize,
    /// How many tiles of each.
    pub tiles: usize,
}

impl ShardTiles {
    /// Tiles of `full` as wide as the matrix, of as many rows as the recipe's quantum for `usage`.
    pub fn of_rows(recipe: &impl Recipe, full: Shape, usage: Usage) -> Self {
        Self {
            full,
            rows: recipe.row_quantum(usage),
            cols: full.cols,
        }
    }

    /// Tiles of `full` that are `cols` wide.
    ///
    /// # Errors
    /// [`FormatError::ShardTiles`]: tiles that do not divide the matrix, or that cut what has one scale; a width that no matrix of the recipe
    /// has.
    pub fn new(
        recipe: &impl Recipe,
        full: Shape,
        usage: Usage,
        cols: usize,
    ) -> Result<Self, FormatError> {
        let tiles = Self {
            cols,
            ..Self::of_rows(recipe, full, usage)
        };
        if tiles.are_rows() {
            return Ok(tiles);
        }
        let refuse = |why: String| {
            let recipe = recipe.name();
            Err(FormatError::ShardTiles {
                recipe,
                full,
                cols,
                why,
            })
        };
        let Some(quantum) = col_quantum(recipe) else {
            return refuse("a scale is one of a whole row or column".to_owned());
        };
        if cols == 0 || !cols.is_multiple_of(quantum) || !full.cols.is_multiple_of(cols) {
            let of = full.cols;
            return refuse(format!(
                "their columns are a multiple of {quantum} that divides {of}"
            ));
        }
        if !full.rows.is_multiple_of(tiles.rows) {
            let (rows, of) = (tiles.rows, full.rows);
            return refuse(format!("{of} rows are no multiple of {rows}"));
        }
        recipe.check(tiles.tall())?;
        Ok(tiles)
    }

    /// The widest tiles of at most `most` columns, or else the narrowest that there are. Those that are narrower than the matrix have a multiple
    /// of `unit` columns.
    pub fn at_most(
        recipe: &impl Recipe,
        full: Shape,
        usage: Usage,
        most: usize,
        unit: usize,
    ) -> Self {
        let rows = Self::of_rows(recipe, full, usage);
        if most >= full.cols {
            return rows;
        }
        let widths = (1..=full.cols).map_while(|parts| {
            let cols = full.cols / parts;
            (cols > 0).then_some((parts, cols))
        });
        let divide = widths.filter(|&(parts, cols)| full.cols == parts * cols);
        let divide = divide.filter(|&(parts, cols)| parts == 1 || cols.is_multiple_of(unit));
        let tiles = |(_, cols)| Self::new(recipe, full, usage, cols).ok();
        let all = divide.filter_map(tiles);
        let fit = all.clone().filter(|tiles| tiles.cols <= most);
        let fit: Vec<Self> = fit.take(64).collect();
        // Kernels read whole vectors of tiles whose columns are a multiple of 128.
        let vectors = fit.iter().find(|tiles| tiles.cols.is_multiple_of(128));
        let found = vectors.or(fit.first()).copied();
        found.or_else(|| all.last()).unwrap_or(rows)
    }

    /// The matrix.
    pub fn full(&self) -> Shape {
        self.full
    }

    /// Rows and columns of a tile. The last band may have fewer rows, where tiles are as wide as the matrix.
    pub fn tile(&self) -> Shape {
        Shape::new(self.rows, self.cols)
    }

    /// Whether tiles are as wide as the matrix, so that the tall matrix is the matrix.
    pub fn are_rows(&self) -> bool {
        self.cols == self.full.cols
    }

    /// Whether the flattened tall matrix is the flattened matrix: tiles are as wide as the matrix, or of one row.
    pub fn are_in_order(&self) -> bool {
        self.are_rows() || self.rows == 1
    }

    /// Tiles of a band.
    pub fn across(&self) -> usize {
        match self.cols {
            0 => 1,
            cols => self.full.cols / cols,
        }
    }

    /// The tiles one below another.
    pub fn tall(&self) -> Shape {
        Shape::new(self.full.rows * self.across(), self.cols)
    }

    /// The tiles of `range`, which are numbered in the order of the tall matrix, as at most three rectangles.
    pub fn ranges(&self, range: Range<usize>) -> impl Iterator<Item = TileRange> + use<> {
        let across = self.across();
        let Range { mut start, end } = range;
        std::iter::from_fn(move || {
            let left = end.checked_sub(start).filter(|left| *left > 0)?;
            let (band, place) = (start / across, start % across);
            let [bands, tiles] = match place {
                0 if left >= across => [left / across, across],
                _ => [1, left.min(across - place)],
            };
            start += bands * tiles;
            Some(TileRange {
                band,
                place,
                bands,
                tiles,
            })
        })
    }

    /// Where `elements` of the flattened tall matrix lie in the flattened matrix, run by run in their order.
    pub fn runs(&self, elements: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let tiles = *self;
        let whole = self.are_in_order();
        let mut at = elements.start;
        std::iter::from_fn(move || {
            if at >= elements.end {
                return None;
            }
            let left = if whole {
                elements.end - at
            } else {
                tiles.cols - at % tiles.cols
            };
            let len = left.min(elements.end - at);
            let start = tiles.place(at);
            at += len;
            Some(start..start + len)
        })
    }

    /// Where element `at` of the flattened tall matrix lies in the flattened matrix.
    pub fn place(&self, at: usize) -> usize {
        if self.are_in_order() {
            return at;
        }
        let (line, col) = (at / self.cols, at % self.cols);
        let (tile, row) = (line / self.rows, line % self.rows);
        let (band, place) = (tile / self.across(), tile % self.across());
        (band * self.rows + row) * self.full.cols + place * self.cols + col
    }

    /// The elements of the flattened matrix from the first to the last band that have some of `elements` of the flattened tall matrix; where
    /// tiles are in order, these.
    pub fn bands(&self, elements: &Range<usize>) -> Range<usize> {
        let band = self.rows * self.full.cols;
        match self.are_in_order() || elements.is_empty() {
            true => elements.clone(),
            false => elements.start / band * band..elements.end.next_multiple_of(band),
        }
    }

    /// `elements` of the flattened tall matrix, of the values of the flattened matrix from element `start` on.
    pub fn of_bands<T: Copy>(&self, values: &[T], start: usize, elements: Range<usize>) -> Vec<T> {
        let runs = self.runs(elements);
        let runs = runs.map(|run| &values[run.start - start..run.end - start]);
        runs.flatten().copied().collect()
    }

    /// `elements` of the flattened tall matrix, of the values of the matrix.
    pub fn gather<T: Copy>(&self, values: &[T], elements: Range<usize>) -> Vec<T> {
        self.of_bands(values, 0, elements)
    }

    /// The values of the matrix, of those of the tall matrix.
    pub fn scatter<T: Copy + Default>(&self, tall: &[T]) -> Vec<T> {
        let mut values = vec![T::default(); tall.len()];
        let mut at = 0;
        for run in self.runs(0..tall.len()) {
            let len = run.len();
            values[run].copy_from_slice(&tall[at..at + len]);
            at += len;
        }
        values
    }
}

/// The multiple that the columns of tiles are, so that no block and no byte crosses a tile: `None` where something has one scale
/// that all tiles of a row or column share.
fn col_quantum(recipe: &impl Recipe) -> Option<usize> {
    if Orientation::ALL.iter().any(|&o| recipe.kernel(o).hadamard) {
        return None;
    }
    let of = |spec: &BufferSpec| {
        let [_, cols] = spec.block();
        let byte = match spec.axes[1] {
            Axis::Cols => spec.code.entries_per_byte(),
            Axis::Rows => 1,
        };
        (!spec.tile.contains(&BufferSpec::WHOLE)).then_some(cols * byte)
    };
    let buffers = recipe.buffers(Usage::BOTH);
    let stored = recipe.stored(Usage::BOTH);
    let mut all = buffers.iter().chain(&stored).filter(|b| !b.is_scalar());
    all.try_fold(1, |quantum, spec| Some(lcm(quantum, of(spec)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AnyRecipe;

    /// What is quantized without blocks may be cut at any column, what has a scale by row at none.
    #[test]
    fn columns_of_tiles() {
        let quanta: Vec<String> = AnyRecipe::all()
            .iter()
            .map(|r| {
                let rows = r.row_quantum(Usage::BOTH);
                format!("{} {rows} x {:?}", r.name(), col_quantum(r))
            })
            .collect();
        insta::assert_snapshot!(quanta.join("\n"));
    }
}

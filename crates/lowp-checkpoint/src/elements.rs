//! [`Checkpoint::read_elements`]: values of a matrix, whichever way it was saved.

use std::ops::Range;

use crate::{Block, Checkpoint, CheckpointError};

impl Checkpoint {
    /// `elements` of the flattened matrix `name`, of f32 or of bf16 that is widened, of these rows and columns, which was saved as it is, or flattened as one row.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_elements(
        &self,
        name: &str,
        full: [usize; 2],
        elements: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        if elements.is_empty() {
            return Ok(Vec::new());
        }
        let [rows, cols] = full;
        if rows == 1 || self.info(name).is_none_or(|info| info.shape != full) {
            let block = Block::of_row(elements.start, elements.len());
            return self.read_f32(name, [1, rows.saturating_mul(cols)], block);
        }
        // A matrix without columns has no elements.
        let width = cols.max(1);
        let first = elements.start / width;
        let block = Block {
            start: [first, 0],
            shape: [elements.end.div_ceil(width) - first, cols],
        };
        let values = self.read_f32(name, full, block)?;
        let before = elements.start - first * width;
        let found = values.get(before..before + elements.len());
        let found = found.ok_or_else(|| CheckpointError::no_block(name, full, block))?;
        Ok(found.to_vec())
    }
}

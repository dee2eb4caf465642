//! [`Band`]: a column range of every row of a byte matrix, written by one thread while others
//! write other ranges. Row tiles of a transposed output are such column ranges.

#![expect(unsafe_code, reason = "threads write disjoint bands of one buffer")]

use std::marker::PhantomData;

/// Columns `start..start + width` of every row of a matrix of `rows` rows, `stride` bytes apart.
#[derive(Debug)]
pub(crate) struct Band<'a> {
    base: *mut u8,
    rows: usize,
    stride: usize,
    start: usize,
    width: usize,
    owner: PhantomData<&'a mut [u8]>,
}

// SAFETY: a band is an exclusive borrow of its byte ranges (`split` makes the bands of one buffer
// disjoint and holds the buffer's only borrow for 'a), and `&mut [u8]` may be sent.
unsafe impl Send for Band<'_> {}

/// Cuts `bytes`, a matrix of `rows` rows of equal length, at the ascending column byte positions
/// `cuts`: band `i` covers `cuts[i]..cuts[i + 1]`.
///
/// # Panics
/// If `bytes` is no such matrix, or the cuts do not ascend within a row.
pub(crate) fn split<'a>(bytes: &'a mut [u8], rows: usize, cuts: &[usize]) -> Vec<Band<'a>> {
    let stride = bytes.len().checked_div(rows).unwrap_or(0);
    assert_eq!(rows * stride, bytes.len(), "bands of a ragged matrix");
    assert!(cuts.is_sorted() && cuts.last().is_none_or(|&end| end <= stride || rows == 0));
    let base = bytes.as_mut_ptr();
    cuts.windows(2)
        .map(|cut| Band {
            base,
            rows,
            stride,
            start: cut[0],
            width: cut[1] - cut[0],
            owner: PhantomData,
        })
        .collect()
}

impl Band<'_> {
    /// The band's bytes of row `row`.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [u8] {
        assert!(row < self.rows, "row {row} of a band of {} rows", self.rows);
        // SAFETY: `split` checked that `rows * stride` bytes exist and that `start + width` lies
        // within a row, so the range is in bounds. Bands of one buffer cover disjoint columns, and
        // the returned slice borrows this band exclusively, so no other reference to these bytes
        // exists. The buffer outlives 'a, and with it this borrow.
        unsafe {
            let start = self.base.add(row * self.stride + self.start);
            std::slice::from_raw_parts_mut(start, self.width)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_cover_a_matrix_once() {
        let mut bytes = vec![0u8; 3 * 7];
        for (i, mut band) in split(&mut bytes, 3, &[0, 2, 2, 7]).into_iter().enumerate() {
            for row in 0..3 {
                band.row_mut(row).iter_mut().for_each(|b| *b += 1 + i as u8);
            }
        }
        assert_eq!(bytes, [1, 1, 3, 3, 3, 3, 3].repeat(3));
    }

    #[test]
    #[should_panic(expected = "row 3")]
    fn rows_are_checked() {
        let mut bytes = vec![0u8; 21];
        split(&mut bytes, 3, &[0, 7])[0].row_mut(3);
    }
}

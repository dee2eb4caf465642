//! [`RowCuts`]: where the rows of a tensor are cut for the ranks.

use std::ops::Range;

use crate::FormatError;

/// Contiguous row ranges, one per rank, in rank order. Ranges may be empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RowCuts {
    /// `starts[r]..starts[r + 1]` are the rows of rank `r`.
    starts: Vec<usize>,
}

impl RowCuts {
    /// Cuts `rows` for `world` ranks at multiples of `quantum`: every rank but the last non-empty
    /// one gets `ceil(rows / world)` rows, rounded up to a multiple of `quantum`; trailing ranks may get fewer, or none.
    ///
    /// # Errors
    /// A world of no ranks.
    pub fn new(rows: usize, world: usize, quantum: usize) -> Result<Self, FormatError> {
        if world == 0 {
            return Err(FormatError::EmptyWorld);
        }
        let chunk = rows.div_ceil(world).next_multiple_of(quantum.max(1));
        let starts = (0..=world)
            .map(|r| r.saturating_mul(chunk).min(rows))
            .collect();
        Ok(Self { starts })
    }

    /// Cuts at the given ranges.
    ///
    /// # Errors
    /// No ranges, or ranges that do not cover the rows from 0 in order.
    pub fn from_ranges(ranges: &[Range<usize>]) -> Result<Self, FormatError> {
        let rows = ranges.last().ok_or(FormatError::EmptyWorld)?.end;
        let mut starts = vec![0];
        for (rank, range) in ranges.iter().enumerate() {
            let expected = starts[rank];
            if range.start != expected || range.end < range.start {
                let Range { start, end } = *range;
                return Err(FormatError::NotATiling {
                    rows,
                    rank,
                    start,
                    end,
                    expected,
                });
            }
            starts.push(range.end);
        }
        Ok(Self { starts })
    }

    /// Cuts where each rank starts, with the end of the last one: from 0 on, in order.
    pub(crate) fn from_starts(starts: Vec<usize>) -> Self {
        Self { starts }
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.starts.len() - 1
    }

    /// Rows of the full tensor.
    pub fn rows(&self) -> usize {
        self.starts[self.world()]
    }

    /// The rows of `rank`.
    ///
    /// # Panics
    /// If `rank` is not below the world size.
    pub fn range(&self, rank: usize) -> Range<usize> {
        self.starts[rank]..self.starts[rank + 1]
    }

    /// The ranges of all ranks, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.starts.windows(2).map(|w| w[0]..w[1])
    }

    /// The first non-empty rank whose range begins off a multiple of `quantum`, with its start.
    pub fn off_quantum(&self, quantum: usize) -> Option<(usize, usize)> {
        let quantum = quantum.max(1);
        // A division for each of many ranks takes as long as all else of a plan.
        let is_off = |start: usize| match quantum.is_power_of_two() {
            true => start & (quantum - 1) != 0,
            false => !start.is_multiple_of(quantum),
        };
        self.ranges()
            .enumerate()
            .find(|(_, range)| !range.is_empty() && is_off(range.start))
            .map(|(rank, range)| (rank, range.start))
    }
}

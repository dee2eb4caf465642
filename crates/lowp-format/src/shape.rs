//! [`Shape`]: every tensor is a row-major matrix.

use std::fmt;

use crate::FormatError;

/// The shape of a matrix: rows (M, the product of all leading dimensions) by columns (K, the last dimension).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shape {
    /// M: rows.
    pub rows: usize,
    /// K: columns.
    pub cols: usize,
}

impl Shape {
    /// A shape of `rows` by `cols`.
    pub const fn new(rows: usize, cols: usize) -> Self {
        Self { rows, cols }
    }

    /// Flattens the leading dimensions of `dims` to rows.
    ///
    /// # Errors
    /// Fewer than two dimensions, or more elements than `usize` counts.
    pub fn from_dims(dims: &[usize]) -> Result<Self, FormatError> {
        let [leading @ .., cols] = dims else {
            return Err(FormatError::NotAMatrix {
                dims: dims.to_vec(),
            });
        };
        if leading.is_empty() {
            return Err(FormatError::NotAMatrix {
                dims: dims.to_vec(),
            });
        }
        let too_large = || FormatError::TooLarge {
            dims: dims.to_vec(),
        };
        let rows = leading
            .iter()
            .try_fold(1usize, |a, &b| a.checked_mul(b))
            .ok_or_else(too_large)?;
        // Four bytes per element must still be addressable.
        rows.checked_mul(*cols)
            .and_then(|n| n.checked_mul(4))
            .ok_or_else(too_large)?;
        Ok(Self::new(rows, *cols))
    }

    /// Most elements of a matrix that is laid out: any sum or product of its sides, entries and
    /// bytes still fits in `usize`.
    pub const MAX_ELEMENTS: usize = (usize::MAX >> 16) + 1;

    /// Whether it has at most [`Shape::MAX_ELEMENTS`]; a side of 0 counts as 1, so that neither
    /// side alone is larger.
    ///
    /// # Errors
    /// [`FormatError::TooLarge`].
    pub fn check(self) -> Result<(), FormatError> {
        match self.rows.max(1).checked_mul(self.cols.max(1)) {
            Some(most) if most <= Self::MAX_ELEMENTS => Ok(()),
            _ => Err(FormatError::TooLarge {
                dims: vec![self.rows, self.cols],
            }),
        }
    }

    /// Number of elements.
    pub const fn elements(self) -> usize {
        self.rows * self.cols
    }

    /// The same columns with another number of rows.
    pub const fn with_rows(self, rows: usize) -> Self {
        Self { rows, ..self }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}x{}", self.rows, self.cols))
    }
}

impl std::str::FromStr for Shape {
    type Err = FormatError;

    /// Parses `MxK`, for example `4096x1024`; more than two dimensions flatten to rows.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let dims: Option<Vec<usize>> = text
            .split(['x', 'X'])
            .map(|d| d.trim().parse().ok())
            .collect();
        match dims {
            Some(dims) => Self::from_dims(&dims),
            None => Err(FormatError::BadShape {
                text: text.to_owned(),
            }),
        }
    }
}

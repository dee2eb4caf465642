//! [`Scales`]: what the scales of an operand belong to, and how many of them a product reads.

use lowp_gemm::ScaleMode;
use pyo3::pyfunction;

use crate::error::Error;

/// For codes of `rows` x `cols` values: where scales of columnwise codes begin, and how many both directions have with the gap between them.
#[pyfunction]
pub(crate) fn scale_places(
    scales: &str,
    rows: usize,
    cols: usize,
) -> Result<(usize, usize), Error> {
    let scales = Scales::of(scales)?;
    Ok((scales.begin(rows, cols), scales.both(rows, cols)))
}

/// Entries along the contracted axis that share a scale.
const GROUP: usize = 128;
/// Scales of columnwise codes begin at a multiple of so many.
const ALIGNED: usize = 64;

/// What scales belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scales(pub(crate) ScaleMode);

impl Scales {
    /// By the name that Python has for it.
    pub(crate) fn of(name: &str) -> Result<Self, Error> {
        Ok(Self(match name {
            "tensor" => ScaleMode::Tensor,
            "rows" => ScaleMode::Rows,
            "1x128" => ScaleMode::Vec128,
            "128x128" => ScaleMode::Square128,
            other => {
                return Err(Error::new(format!(
                    "scales of {other}; products take those of tensor, rows, 1x128 and 128x128"
                )));
            }
        }))
    }

    /// Whether there is but one.
    pub(crate) fn is_one(self) -> bool {
        self.0 == ScaleMode::Tensor
    }

    /// How many there are for codes of `outer` rows that are contracted over `depth`.
    pub(crate) fn count(self, outer: usize, depth: usize) -> usize {
        let groups = depth.div_ceil(GROUP);
        match self.0 {
            ScaleMode::Rows => outer,
            ScaleMode::Vec128 => groups * outer,
            ScaleMode::Square128 => outer.div_ceil(GROUP) * groups.next_multiple_of(4),
            ScaleMode::None | ScaleMode::Tensor | ScaleMode::Vec32 | ScaleMode::Vec16 => 1,
        }
    }

    /// How many scales both directions of `rows` x `cols` values have together, with the gap between them.
    pub(crate) fn both(self, rows: usize, cols: usize) -> usize {
        match self.is_one() {
            true => 1,
            false => self.begin(rows, cols) + self.count(cols, rows),
        }
    }

    /// Where, in the scales of both directions of `rows` x `cols` values, those of columnwise codes begin.
    pub(crate) fn begin(self, rows: usize, cols: usize) -> usize {
        match self.is_one() {
            true => 0,
            false => self.count(rows, cols).next_multiple_of(ALIGNED),
        }
    }
}

//! [`Piece`]: a part of a tensor, and [`Block`], where it lies.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What the entries of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Dtype {
    /// f32, little endian.
    F32,
    /// bf16, little endian.
    Bf16,
    /// Bytes: codes and scales as a device has them.
    U8,
}

impl Dtype {
    /// Bytes of one entry.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
            Dtype::U8 => 1,
        }
    }

    /// The values of entries, as f32.
    pub fn widened(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Dtype::F32 => {
                let (words, _) = bytes.as_chunks();
                words.iter().map(|&word| f32::from_le_bytes(word)).collect()
            }
            Dtype::Bf16 => {
                // The upper half of an f32.
                let (halves, _) = bytes.as_chunks();
                let wide = |&half| f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16);
                halves.iter().map(wide).collect()
            }
            Dtype::U8 => bytes.iter().map(|&byte| f32::from(byte)).collect(),
        }
    }
}

/// Rows and columns of a tensor of two axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Block {
    /// First row and first column.
    pub start: [usize; 2],
    /// Rows and columns.
    pub shape: [usize; 2],
}

impl Block {
    /// All of a tensor of `shape`.
    pub const fn whole(shape: [usize; 2]) -> Self {
        Self {
            start: [0, 0],
            shape,
        }
    }

    /// Entries `start..start + len` of a tensor of one row.
    pub const fn of_row(start: usize, len: usize) -> Self {
        Self {
            start: [0, start],
            shape: [1, len],
        }
    }

    /// Number of entries; `None` beyond what can be counted.
    pub fn entries(self) -> Option<usize> {
        self.shape[0].checked_mul(self.shape[1])
    }

    /// Whether it has no entries.
    pub(crate) const fn is_empty(self) -> bool {
        self.shape[0] == 0 || self.shape[1] == 0
    }

    /// Bytes of its entries of `dtype`; `None` beyond what can be counted.
    pub(crate) fn bytes(self, dtype: Dtype) -> Option<usize> {
        self.entries()?.checked_mul(dtype.bytes())
    }

    /// Whether it lies in a tensor of shape `full`.
    pub fn lies_in(self, full: [usize; 2]) -> bool {
        let fits = |axis: usize| {
            let end = self.start[axis].checked_add(self.shape[axis]);
            end.is_some_and(|end| end <= full[axis])
        };
        fits(0) && fits(1)
    }

    /// What both have, unless it is nothing.
    pub fn common(self, other: Self) -> Option<Self> {
        let mut common = Self::whole([0, 0]);
        for axis in [0, 1] {
            let start = self.start[axis].max(other.start[axis]);
            let end = |block: Self| block.start[axis] + block.shape[axis];
            let end = end(self).min(end(other));
            if start >= end {
                return None;
            }
            (common.start[axis], common.shape[axis]) = (start, end - start);
        }
        Some(common)
    }
}

/// The part of a tensor that one rank has. Its bytes are there, or [`Late`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece<T = Vec<u8>> {
    /// The tensor's name, the same on every rank that has a part of it.
    pub name: String,
    /// What its entries are.
    pub dtype: Dtype,
    /// Rows and columns of the whole tensor.
    pub full: [usize; 2],
    /// Where this part lies in it.
    pub block: Block,
    /// The entries, row by row.
    pub bytes: T,
}

impl From<Piece> for Piece<Late> {
    fn from(piece: Piece) -> Self {
        Self {
            name: piece.name,
            dtype: piece.dtype,
            full: piece.full,
            block: piece.block,
            bytes: piece.bytes.into(),
        }
    }
}

/// Bytes that are on their way from a device, for example; the thread that writes a checkpoint waits for them.
pub struct Late {
    len: usize,
    arrive: Arrive,
}

type Arrive = Box<dyn FnOnce() -> Result<Vec<u8>, String> + Send>;

impl Late {
    /// `len` bytes, which `arrive` waits for, or says why they do not come.
    pub fn new(
        len: usize,
        arrive: impl FnOnce() -> Result<Vec<u8>, String> + Send + 'static,
    ) -> Self {
        Self {
            len,
            arrive: Box::new(arrive),
        }
    }

    /// Number of bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes. Waits for them.
    ///
    /// # Errors
    /// They do not come, or are more or fewer.
    pub fn wait(self) -> Result<Vec<u8>, String> {
        let bytes = (self.arrive)()?;
        match bytes.len() == self.len {
            true => Ok(bytes),
            false => Err(format!("{} bytes arrived, not {}", bytes.len(), self.len)),
        }
    }
}

impl From<Vec<u8>> for Late {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(bytes.len(), || Ok(bytes))
    }
}

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Late({} bytes)", self.len)
    }
}

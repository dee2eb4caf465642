//! [`BufferKey`]: the name of a buffer within its tensor.

use std::fmt;

use crate::{Orientation, Usage};

/// What the entries of a buffer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Element codes.
    Data,
    /// One scale per block.
    BlockScale,
    /// The decode scale of the tensor or of each line, in f32: it multiplies codes.
    DecodeScale,
    /// The amax of the tensor or of each line, in f32, from which a two-level rule makes its scales.
    Amax,
}

impl Part {
    /// Whether it stands above block scales, or alone: f32 entries of the tensor or of its lines. The scale rule says
    /// which ([`ScaleRule::outer`](crate::ScaleRule::outer)).
    pub const fn is_outer(self) -> bool {
        matches!(self, Part::DecodeScale | Part::Amax)
    }
}

/// The name of a buffer within its tensor: which orientations it serves, and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferKey {
    /// The orientations served; both where one copy serves both.
    pub usage: Usage,
    /// What the buffer holds.
    pub part: Part,
}

impl BufferKey {
    /// The key of the buffer that holds `part` for `usage`.
    pub const fn new(usage: Usage, part: Part) -> Self {
        Self { usage, part }
    }

    /// Whether this is the buffer that holds `part` for `orientation`.
    pub fn serves(self, orientation: Orientation, part: Part) -> bool {
        self.part == part && self.usage.contains(orientation.usage())
    }
}

impl fmt::Display for BufferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = match self.part {
            Part::Data => "data",
            Part::BlockScale | Part::DecodeScale => "scale_inv",
            Part::Amax => "amax",
        };
        let name = match (self.usage, self.part) {
            (Usage::ROWWISE | Usage::COLUMNWISE, _) => format!("{}_{part}", self.usage),
            // One name in tables and plans; only the parts tell them apart.
            (_, Part::DecodeScale | Part::Amax) => "tensor_scale".to_owned(),
            _ => format!("shared_{part}"),
        };
        f.pad(&name)
    }
}

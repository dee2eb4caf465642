//! [`Usage`] and [`Orientation`]: which GEMM operands a tensor can serve.

use std::fmt;

use bitflags::bitflags;

bitflags! {
    /// The set of orientations that a tensor or a buffer serves.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct Usage: u8 {
        /// Blocks run along K: the operand of the forward GEMM.
        const ROWWISE = 1;
        /// Blocks run along M: the operand of the backward GEMMs.
        const COLUMNWISE = 2;
        /// Both orientations.
        const BOTH = 3;
    }
}

impl Usage {
    /// The orientations in the set, rowwise first.
    pub fn orientations(self) -> impl Iterator<Item = Orientation> {
        Orientation::ALL
            .into_iter()
            .filter(move |o| self.contains(o.usage()))
    }

    /// `rowwise`, `columnwise`, `both` or `none`.
    pub fn label(self) -> &'static str {
        match (
            self.contains(Usage::ROWWISE),
            self.contains(Usage::COLUMNWISE),
        ) {
            (true, true) => "both",
            (true, false) => "rowwise",
            (false, true) => "columnwise",
            (false, false) => "none",
        }
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

/// The direction in which blocks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Orientation {
    /// Blocks run along K.
    Rowwise,
    /// Blocks run along M.
    Columnwise,
}

impl Orientation {
    /// Both orientations, rowwise first.
    pub const ALL: [Orientation; 2] = [Orientation::Rowwise, Orientation::Columnwise];

    /// The set that holds only this orientation.
    pub const fn usage(self) -> Usage {
        match self {
            Orientation::Rowwise => Usage::ROWWISE,
            Orientation::Columnwise => Usage::COLUMNWISE,
        }
    }
}

impl fmt::Display for Orientation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.usage().label())
    }
}

//! [`Runs`]: entries that are copied in another order.

/// Runs of entries in three nested orders, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Entries of each run.
    pub len: usize,
    /// How many there are of each order.
    pub counts: [usize; 3],
    /// The first entry in the source.
    pub from: usize,
    /// Entries from one to the next there, by order.
    pub from_pitch: [usize; 3],
    /// The first entry in the destination.
    pub to: usize,
    /// Entries from one to the next there, by order.
    pub to_pitch: [usize; 3],
}

impl Runs {
    /// Entries of all runs; `None` if their number overflows.
    pub(crate) fn entries(&self) -> Option<usize> {
        let mut counts = self.counts.iter();
        counts.try_fold(self.len, |all, &n| all.checked_mul(n))
    }

    /// The end of the entries of runs that begin at `first` and are `pitch` apart; `None` if it overflows.
    fn end(&self, first: usize, pitch: [usize; 3]) -> Option<usize> {
        if self.entries() == Some(0) {
            return Some(0);
        }
        let mut orders = self.counts.iter().zip(pitch);
        let last = orders.try_fold(first, |at, (&count, pitch)| {
            at.checked_add((count - 1).checked_mul(pitch)?)
        })?;
        last.checked_add(self.len)
    }

    /// The ends of the entries in the source and in the destination.
    pub(crate) fn ends(&self) -> [Option<usize>; 2] {
        [
            self.end(self.from, self.from_pitch),
            self.end(self.to, self.to_pitch),
        ]
    }

    /// The same runs back.
    #[must_use]
    pub const fn reversed(self) -> Self {
        Self {
            from: self.to,
            from_pitch: self.to_pitch,
            to: self.from,
            to_pitch: self.from_pitch,
            ..self
        }
    }
}

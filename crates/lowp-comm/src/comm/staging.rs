//! [`ReduceStaging`]: memory of a device between the gradients that arrive and their sums.

use std::iter::Sum;
use std::ops::Range;

use lowp_kernels::FloatDtype;

use super::{Adds, UnevenRun, spanned};
use crate::GradWire;

/// Elements that the device of a rank holds while it reduces gradients: of one gradient, or of a batch together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReduceStaging {
    /// Parts of all ranks that arrive to be added, in f32 and in bf16.
    pub arrivals: [usize; 2],
    /// Gradients in f32 that travel in bf16.
    pub narrow: usize,
    /// Sums in f32 that are added to earlier ones.
    pub added: usize,
    /// Sums in f32 of even parts, on their way to the ranks that own uneven ones.
    pub even: usize,
}

impl ReduceStaging {
    /// Of a gradient of `len` elements in `dtype`, which travels as `wire` to `world` ranks, if the parts of this rank's `own` are added
    /// there.
    pub fn of_parts(
        (dtype, wire): (FloatDtype, GradWire),
        (len, own): (usize, usize),
        world: usize,
    ) -> Self {
        // Nothing arrives at a rank that is alone.
        let arrive = if world > 1 { room(world * own) } else { 0 };
        let as_f32 = (dtype, wire) == (FloatDtype::F32, GradWire::F32);
        let narrow = (dtype, wire) == (FloatDtype::F32, GradWire::Bf16);
        Self {
            arrivals: if as_f32 { [arrive, 0] } else { [0, arrive] },
            narrow: if narrow { room(len) } else { 0 },
            ..Self::default()
        }
    }

    /// Of a gradient whose sums, of this rank's `own` elements, are made on the way and added to earlier ones.
    pub fn of_sums(own: usize) -> Self {
        Self {
            added: room(own),
            ..Self::default()
        }
    }

    /// Of a run of which this rank gets the sums of a part and of the rest behind all parts ([`UnevenRun`]).
    pub fn of_run(part: usize, rest: usize) -> Self {
        Self {
            even: room(part) + room(rest),
            ..Self::default()
        }
    }

    /// Of gradients that follow each other in one memory, each with the elements that ranks own there in rank order: as rank `rank` reduces
    /// them, and adds the sums to earlier ones if it `accumulates`.
    pub fn of_bucket(
        ranges: &[&[Range<usize>]],
        (dtype, wire): (FloatDtype, GradWire),
        (adds, accumulates): (Adds, bool),
        rank: usize,
    ) -> Self {
        let batch: Vec<_> = ranges.iter().map(|&ranges| ((), ranges)).collect();
        let world = ranges.first().map_or(1, |ranges| ranges.len());
        let runs = UnevenRun::find(&batch, world, adds);
        let parts = |len, own| match adds {
            Adds::Library => Self::default(),
            Adds::Receiver => Self::of_parts((dtype, wire), (len, own), world),
        };
        let in_run = |item: usize| runs.iter().any(|run| run.items.contains(&item));
        // What is added of runs and of other gradients takes turns.
        let (mut all, mut added) = (Self::default(), [0; 2]);
        for (item, ranges) in ranges.iter().enumerate() {
            let own = ranges[rank].len();
            match (in_run(item), adds) {
                (true, _) => added[0] += Self::of_sums(own).added,
                (false, Adds::Library) => added[1] += Self::of_sums(own).added,
                (false, Adds::Receiver) => {
                    all = [all, parts(spanned(ranges).len(), own)].into_iter().sum();
                }
            }
        }
        for run in &runs {
            let own = run.parts[rank].len();
            let staged = [all, parts(run.len(), own), run.staging(rank)];
            all = staged.into_iter().sum();
        }
        all.added = if accumulates {
            added[0].max(added[1])
        } else {
            0
        };
        all
    }

    /// What holds either.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let [[wide, narrow], [other_wide, other_narrow]] = [self.arrivals, other.arrivals];
        Self {
            arrivals: [wide.max(other_wide), narrow.max(other_narrow)],
            narrow: self.narrow.max(other.narrow),
            added: self.added.max(other.added),
            even: self.even.max(other.even),
        }
    }

    /// Bytes of all of it.
    pub fn bytes(self) -> usize {
        let [wide, narrow] = self.arrivals;
        FloatDtype::F32.bytes() * (wide + self.added + self.even)
            + FloatDtype::Bf16.bytes() * (narrow + self.narrow)
    }
}

impl Sum for ReduceStaging {
    /// Of a batch.
    fn sum<I: Iterator<Item = Self>>(items: I) -> Self {
        items.fold(Self::default(), |sum, item| Self {
            arrivals: [0, 1].map(|dtype| sum.arrivals[dtype] + item.arrivals[dtype]),
            narrow: sum.narrow + item.narrow,
            added: sum.added + item.added,
            even: sum.even + item.even,
        })
    }
}

/// Elements of a gradient in memory that others share: each begins at a whole number of 16-byte words.
fn room(len: usize) -> usize {
    len.next_multiple_of(16)
}

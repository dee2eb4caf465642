//! [`ReduceStaging`]: memory of a device between the gradients that arrive and their sums.

use std::iter::Sum;

use lowp_kernels::FloatDtype;

use super::{Adder, UnevenRun};
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
    pub passed_on: usize,
}

/// What a rank stages of a gradient follows from this.
#[derive(Clone, Copy, Debug)]
pub struct StagedGrad {
    /// Its dtype.
    pub dtype: FloatDtype,
    /// The dtype in which f32 travels.
    pub wire: GradWire,
    /// Its elements.
    pub len: usize,
    /// Those that the rank owns.
    pub own: usize,
    /// Whether its sum is added to an earlier one.
    pub accumulate: bool,
}

impl ReduceStaging {
    /// Of a gradient of `len` elements in `dtype`, which travels as `wire` to `world` ranks, if the parts of this rank's `own` are added
    /// there.
    pub fn of_parts(
        dtype: FloatDtype,
        wire: GradWire,
        len: usize,
        own: usize,
        world: usize,
    ) -> Self {
        // Nothing arrives at a rank that is alone.
        let arrive = if world > 1 { room(world * own) } else { 0 };
        let as_f32 = (dtype, wire) == (FloatDtype::F32, GradWire::F32);
        Self {
            arrivals: if as_f32 { [arrive, 0] } else { [0, arrive] },
            ..Self::read_by_peers(dtype, wire, len)
        }
    }

    /// Of a gradient of `len` elements in `dtype` that other ranks read as `wire`.
    pub fn read_by_peers(dtype: FloatDtype, wire: GradWire, len: usize) -> Self {
        let narrow = (dtype, wire) == (FloatDtype::F32, GradWire::Bf16);
        Self {
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

    /// Of a run of which this rank gets the sums of a part and of the remainder after all parts ([`UnevenRun`]).
    pub fn of_run(part: usize, remainder: usize) -> Self {
        Self {
            passed_on: room(part) + room(remainder),
            ..Self::default()
        }
    }

    /// Of rank `rank` of `world` for a batch that is reduced in `runs`.
    pub fn of_batch(
        grads: &[StagedGrad],
        runs: &[UnevenRun],
        adder: Adder,
        rank: usize,
        world: usize,
    ) -> Self {
        let parts = |grad: &StagedGrad, len, own| match adder {
            Adder::Library => Self::default(),
            Adder::Receiver => Self::of_parts(grad.dtype, grad.wire, len, own, world),
            Adder::Reader => Self::read_by_peers(grad.dtype, grad.wire, len),
        };
        let of_run = |run: &UnevenRun| {
            let own = run.parts[rank].len();
            [
                parts(&grads[run.items.start], run.len(), own),
                run.staging(rank),
            ]
        };
        let sums = |grad: &StagedGrad| match grad.accumulate {
            true => Self::of_sums(grad.own).added,
            false => 0,
        };
        let others = || UnevenRun::others(runs, grads.len()).map(|item| &grads[item]);
        let others_parts = others().map(|grad| parts(grad, grad.len, grad.own));
        let all: Self = runs.iter().flat_map(of_run).chain(others_parts).sum();
        let in_runs = runs.iter().flat_map(|run| &grads[run.items.clone()]);
        let added = match adder {
            Adder::Library => others().map(sums).sum(),
            Adder::Receiver | Adder::Reader => 0,
        };
        // The same memory takes the sums of runs, after the others were added.
        let added = in_runs.map(sums).sum::<usize>().max(added);
        Self { added, ..all }
    }

    /// What holds either.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let [[wide, narrow], [other_wide, other_narrow]] = [self.arrivals, other.arrivals];
        Self {
            arrivals: [wide.max(other_wide), narrow.max(other_narrow)],
            narrow: self.narrow.max(other.narrow),
            added: self.added.max(other.added),
            passed_on: self.passed_on.max(other.passed_on),
        }
    }

    /// Bytes of all of it.
    pub fn bytes(self) -> usize {
        let [wide, narrow] = self.arrivals;
        FloatDtype::F32.bytes() * (wide + self.added + self.passed_on)
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
            passed_on: sum.passed_on + item.passed_on,
        })
    }
}

/// Elements of a gradient in memory that others share: each begins at a whole number of 16-byte words.
fn room(len: usize) -> usize {
    len.next_multiple_of(16)
}

//! [`GradParam`]: what is known of a parameter, and [`Param`]: where its gradient is.

use std::fmt::Write as _;
use std::ops::Range;

use lowp_kernels::{Backend, Source};

use super::GradBucketOptions;
use crate::ShardError;
use lowp_comm::{CommError, ReduceItem};

/// A parameter whose gradient is reduced.
#[derive(Clone, Debug)]
pub struct GradParam<B: Backend> {
    /// Its name, for errors.
    pub name: String,
    /// The elements of the flattened gradient that each rank of the shard group owns, in rank order. They tile it.
    pub ranges: Vec<Range<usize>>,
    /// The block of the network that it is of, if gradients of that may share a bucket which is larger than others ([`grad_bucket_ranges`](crate::grad_bucket_ranges)).
    pub block: Option<usize>,
    /// Receives the sum of this rank's elements.
    pub out: B::Buffer<f32>,
}

#[derive(Debug)]
pub(super) struct Param<B: Backend> {
    /// With its ranges as they lie in the bucket.
    pub(super) given: GradParam<B>,
    pub(super) bucket: usize,
    /// Elements of the bucket that are the parameter's.
    pub(super) place: Range<usize>,
    pub(super) state: GradState,
    /// The full gradient, from when memory is taken for it until it was sent or added to what is kept.
    pub(super) grad: Option<Source<B>>,
    /// Whether the gradient is written where it is kept.
    pub(super) in_place: bool,
    /// Contributions that are kept on this rank.
    pub(super) kept: usize,
    /// Contributions that were sent in this step.
    pub(super) arrived: usize,
}

impl<B: Backend> Param<B> {
    pub(super) fn new(mut given: GradParam<B>, bucket: usize, start: usize) -> Self {
        let place = start..start + given.len();
        for range in &mut given.ranges {
            *range = start + range.start..start + range.end;
        }
        Self {
            place,
            given,
            bucket,
            state: GradState::Idle,
            grad: None,
            in_place: false,
            kept: 0,
            arrived: 0,
        }
    }

    /// How its full gradient is sent, which is in `bucket`, the memory of number `memory`.
    pub(super) fn item<'a>(&'a self, memory: usize, bucket: &'a Source<B>) -> ReduceItem<'a, B> {
        ReduceItem {
            grad: bucket,
            memory,
            ranges: &self.given.ranges,
            out: &self.given.out,
            accumulate: self.arrived > 0,
        }
    }

    /// Says that its gradient is not there any more.
    pub(super) fn release(&mut self) {
        (self.state, self.grad, self.in_place) = (GradState::Idle, None, false);
    }

    /// Forgets all gradients of the step.
    pub(super) fn forget(&mut self) {
        self.release();
        (self.kept, self.arrived) = (0, 0);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GradState {
    Idle,
    Taken,
    Pushed,
}

impl<B: Backend> GradParam<B> {
    /// Elements of the full gradient.
    pub(super) fn len(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end)
    }

    pub(super) fn check(&self, backend: &B, rank: usize, world: usize) -> Result<(), ShardError> {
        if self.ranges.len() != world {
            return Err(CommError::World {
                what: format!("the gradient of '{}'", self.name),
                found: self.ranges.len(),
                world,
            }
            .into());
        }
        let mut next = 0;
        for (rank, range) in self.ranges.iter().enumerate() {
            if range.start != next || range.end < next {
                return Err(ShardError::GradRanges {
                    name: self.name.clone(),
                    rank,
                    range: range.clone(),
                    next,
                });
            }
            next = range.end;
        }
        let (needed, found) = (self.ranges[rank].len(), backend.len(&self.out));
        if needed != found {
            return Err(ShardError::GradLength {
                name: self.name.clone(),
                needed,
                found,
            });
        }
        Ok(())
    }
}

/// Everything that ranks must have in common, as text.
pub(super) fn describe<B: Backend>(params: &[GradParam<B>], options: GradBucketOptions) -> String {
    let mut text = format!("{options:?}");
    for GradParam {
        name,
        ranges,
        block,
        ..
    } in params
    {
        let ends: Vec<usize> = ranges.iter().map(|range| range.end).collect();
        // Writing to a String cannot fail.
        let _ = write!(text, "; {name} cut at {ends:?}");
        if let Some(block) = block {
            let _ = write!(text, " of block {block}");
        }
    }
    text
}

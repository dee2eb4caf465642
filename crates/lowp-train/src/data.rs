//! [`Data`]: the batches of a run, as a function of seed, step and sequence number.

use std::ops::Range;

use crate::error::TrainError;

/// What a network trains on, the same on all ranks: each rank takes its share of the sequences of a batch, and any number of ranks sees the same
/// ones.
pub trait Data: Sync {
    /// What the network takes of the data.
    type Batch;

    /// Sequences `range` of the batch of `step`, over all ranks.
    ///
    /// # Errors
    /// They cannot be read.
    fn train(&self, seed: u64, step: usize, range: Range<usize>)
    -> Result<Self::Batch, TrainError>;

    /// Sequences `range` of `total` that are spread evenly over the validation split.
    ///
    /// # Errors
    /// They cannot be read.
    fn validation(&self, total: usize, range: Range<usize>) -> Result<Self::Batch, TrainError>;

    /// Targets among `sequences` of the batch of `step` that count in the loss, over all ranks.
    ///
    /// # Errors
    /// They cannot be read.
    fn targets(&self, _seed: u64, _step: usize, sequences: usize) -> Result<usize, TrainError> {
        Ok(sequences * self.tokens())
    }

    /// The same among the first `total` of the validation split.
    ///
    /// # Errors
    /// They cannot be read.
    fn validation_targets(&self, total: usize) -> Result<usize, TrainError> {
        Ok(total * self.tokens())
    }

    /// Tokens of a sequence; 1 where the data are no text.
    fn tokens(&self) -> usize {
        1
    }

    /// What a loss is the mean of: `token`, `byte`, or `example` where the data are no text.
    fn unit(&self) -> &'static str {
        "example"
    }

    /// Sequences of the training split, if every sequence is seen once per epoch.
    fn sequences(&self) -> Option<u64> {
        None
    }

    /// What says that data are the same, for example a checksum: runs go on with the same data alone.
    fn digest(&self) -> String;
}

/// Data that a function makes of seed, step and sequence numbers. The validation split is a batch of the seed [`u64::MAX`].
#[derive(Clone, Copy, Debug)]
pub struct Sampler<'a, F> {
    name: &'a str,
    sample: F,
}

impl<'a, T, F: Fn(u64, usize, Range<usize>) -> T + Sync> Sampler<'a, F> {
    /// Data with a name that says that they are the same.
    pub fn new(name: &'a str, sample: F) -> Self {
        Self { name, sample }
    }
}

impl<T, F: Fn(u64, usize, Range<usize>) -> T + Sync> Data for Sampler<'_, F> {
    type Batch = T;

    fn train(&self, seed: u64, step: usize, range: Range<usize>) -> Result<T, TrainError> {
        Ok((self.sample)(seed, step, range))
    }

    fn validation(&self, _total: usize, range: Range<usize>) -> Result<T, TrainError> {
        Ok((self.sample)(u64::MAX, 0, range))
    }

    fn digest(&self) -> String {
        self.name.to_owned()
    }
}

/// The sequences of `total` that rank `rank` of `ranks` handles: consecutive, and at most one more than any other.
pub(crate) fn share(total: usize, ranks: usize, rank: usize) -> Range<usize> {
    let (each, extra) = (total / ranks, total % ranks);
    let start = rank * each + rank.min(extra);
    start..start + each + usize::from(rank < extra)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_batch() {
        let sizes: Vec<_> = (0..3).map(|r| share(16, 3, r)).collect();
        assert_eq!(sizes, [0..6, 6..11, 11..16]);
    }
}

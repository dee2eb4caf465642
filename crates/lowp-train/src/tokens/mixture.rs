//! [`Mixture`]: several sources of tokens, each with its share of the sequences.

use std::ops::Range;

use super::Tokens;
use crate::batch::Batch;
use crate::data::Data;
use crate::error::TrainError;

/// Shares are integers over this.
const ONE: u64 = 1 << 32;

/// Sources mixed by weight: of any number of sequences, counted from the first, each has its share, off by less than the number of sources. Every
/// source goes through its own sequences epoch by epoch.
#[derive(Debug)]
pub struct Mixture {
    /// Each source with its share of the sequences that earlier sources did not take.
    sources: Vec<(Tokens, u64)>,
    /// Shares of all sequences.
    shares: Vec<f64>,
}

impl Mixture {
    /// `sources` with their weights, which need not add up to 1.
    ///
    /// # Errors
    /// No source, a weight that is no positive number, or sources with different [`Packing`](super::Packing).
    pub fn new(sources: Vec<(Tokens, f64)>) -> Result<Self, TrainError> {
        if let Some((_, weight)) = sources
            .iter()
            .find(|(_, weight)| !(weight.is_finite() && *weight > 0.0))
        {
            return Err(TrainError::Data(format!(
                "`data`: the weight {weight:?} of a source: expected a positive number"
            )));
        }
        let Some((first, _)) = sources.first() else {
            return Err(TrainError::Data("`data`: no source of tokens".to_owned()));
        };
        let packing = first.packing;
        if sources.iter().any(|(tokens, _)| tokens.packing != packing) {
            return Err(TrainError::Data(
                "`data`: sources are cut into sequences of different kinds; give all the same"
                    .to_owned(),
            ));
        }
        // Of each source and those after it: sums of positive numbers cancel nothing.
        let mut left: Vec<f64> = Vec::new();
        for (_, weight) in sources.iter().rev() {
            left.push(weight + left.last().copied().unwrap_or(0.0));
        }
        left.reverse();
        let all = left[0];
        if !all.is_finite() {
            return Err(TrainError::Data(
                "`data`: the sum of the weights of sources is too large for a number; give smaller ones"
                    .to_owned(),
            ));
        }
        let shares = sources.iter().map(|(_, weight)| weight / all).collect();
        let last = sources.len() - 1;
        let sources = sources.into_iter().enumerate();
        let sources = sources.map(|(number, (tokens, weight))| {
            let share = match number == last {
                true => ONE,
                // Some sequences are left for those after it.
                false => part(weight / left[number]).min(ONE - 1),
            };
            (tokens, share)
        });
        Ok(Self {
            sources: sources.collect(),
            shares,
        })
    }

    /// The sources, and their shares of all sequences.
    pub fn sources(&self) -> impl Iterator<Item = (&Tokens, f64)> {
        let tokens = self.sources.iter().map(|(tokens, _)| tokens);
        tokens.zip(self.shares.iter().copied())
    }

    /// Whether some tokens do not count, or do not see all before them.
    pub fn is_masked(&self) -> bool {
        self.sources().any(|(tokens, _)| tokens.is_masked())
    }

    /// The source of sequence `number` of the mixture, and the sequence's number within the source.
    pub(super) fn place(&self, number: u64) -> (usize, u64) {
        let mut number = number;
        for (index, (_, share)) in self.sources.iter().enumerate() {
            let own = of(number, *share);
            if of(number + 1, *share) > own {
                return (index, own);
            }
            number -= own;
        }
        // The last one takes all that is left.
        (self.sources.len() - 1, number)
    }

    /// How many of the first `total` sequences source `index` has.
    pub(super) fn count(&self, index: usize, total: u64) -> u64 {
        let mut left = total;
        for (_, share) in &self.sources[..index] {
            left -= of(left, *share);
        }
        of(left, self.sources[index].1)
    }

    fn batch(
        &self,
        numbers: Range<u64>,
        sequence: impl Fn(usize, u64) -> u64,
    ) -> Result<Batch, TrainError> {
        let (mut inputs, mut targets, mut seen) = (Vec::new(), Vec::new(), Vec::new());
        for number in numbers {
            let (index, own) = self.place(number);
            let one = self.sources[index].0.batch(sequence(index, own))?;
            inputs.extend_from_slice(&one.inputs);
            targets.extend_from_slice(&one.targets);
            seen.extend(one.first_seen.iter().flat_map(|first| first.iter()));
        }
        Ok(Batch {
            first_seen: (!seen.is_empty()).then(|| seen.into()),
            ..Batch::new(inputs, targets)
        })
    }

    fn of_step(&self, seed: u64, step: usize, range: Range<usize>) -> Result<Batch, TrainError> {
        let first = step as u64 * self.sources[0].0.packing.batch as u64;
        let numbers = first + range.start as u64..first + range.end as u64;
        self.batch(numbers, |index, own| {
            self.sources[index].0.in_order(seed, index as u64, own)
        })
    }

    fn held_out(&self, total: usize, range: Range<usize>) -> Result<Batch, TrainError> {
        let all = total.max(1) as u64;
        self.batch(range.start as u64..range.end as u64, |index, own| {
            self.sources[index].0.held_out(self.count(index, all), own)
        })
    }

    fn targets_of(
        &self,
        sequences: usize,
        batch: impl FnOnce() -> Result<Batch, TrainError>,
    ) -> Result<usize, TrainError> {
        if !self.is_masked() {
            return Ok(sequences * self.tokens());
        }
        let counted = batch()?;
        let counted = counted.targets.iter().filter(|&&id| id != Batch::IGNORED);
        Ok(counted.count())
    }
}

impl From<Tokens> for Mixture {
    /// A mixture of one source.
    fn from(tokens: Tokens) -> Self {
        Self {
            sources: vec![(tokens, ONE)],
            shares: vec![1.0],
        }
    }
}

/// `share` of `number`, rounded down.
fn of(number: u64, share: u64) -> u64 {
    let product = u128::from(number) * u128::from(share) / u128::from(ONE);
    // At most `number`, as shares are at most one.
    u64::try_from(product).unwrap_or(number)
}

/// A share as a multiple of one over [`ONE`], above zero.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "from 0 to 1"
)]
fn part(share: f64) -> u64 {
    ((share * ONE as f64).round() as u64).clamp(1, ONE)
}

impl Data for Mixture {
    type Batch = Batch;

    fn train(&self, seed: u64, step: usize, range: Range<usize>) -> Result<Batch, TrainError> {
        self.of_step(seed, step, range)
    }

    fn validation(&self, total: usize, range: Range<usize>) -> Result<Batch, TrainError> {
        self.held_out(total, range)
    }

    fn targets(&self, seed: u64, step: usize, sequences: usize) -> Result<usize, TrainError> {
        self.targets_of(sequences, || self.of_step(seed, step, 0..sequences))
    }

    fn validation_targets(&self, total: usize) -> Result<usize, TrainError> {
        self.targets_of(total, || self.held_out(total, 0..total))
    }

    fn tokens(&self) -> usize {
        self.sources[0].0.packing.seq
    }

    fn unit(&self) -> &'static str {
        "token"
    }

    /// Sequences of all sources together.
    fn sequences(&self) -> Option<u64> {
        Some(self.sources().map(|(tokens, _)| tokens.split()[0]).sum())
    }

    fn digest(&self) -> String {
        let digests = self
            .sources
            .iter()
            .map(|(tokens, share)| match self.sources.len() {
                1 => tokens.digest.clone(),
                _ => format!("{share} of {ONE} of {}", tokens.digest),
            });
        digests.collect::<Vec<_>>().join("; ")
    }
}

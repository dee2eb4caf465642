//! [`Tokens`]: token ids in files, packed into sequences. They are read where they are asked for, so that memory does not grow with them.

mod folder;
mod megatron;
mod mixture;
mod npy;
mod order;
mod shard;

use std::ops::Range;
use std::path::Path;

use crate::batch::Batch;
use crate::error::TrainError;
use order::Order;
use shard::{Shard, unreadable};

pub use folder::{ShardIndex, TokenIds, TokenIndex, TokenWriter};
pub use mixture::Mixture;

/// Tokens of which the digest of data is made, spread over all of them.
const SAMPLED: u64 = 1 << 16;
/// Tokens whose masks are read at a time for it.
const MASKS: usize = 1 << 20;

/// How tokens are cut into sequences and batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Packing {
    /// Tokens of a sequence.
    pub seq: usize,
    /// Sequences of a step, over all ranks.
    pub batch: usize,
    /// The part of the sequences, the last ones, that is the validation split.
    pub held_out: f64,
    /// Whether tokens see their own document alone, and no loss is of the first token of a document.
    pub mask_documents: bool,
}

/// Token ids, one document after the other, cut into sequences that each epoch has in another order; data of one source or several are a
/// [`Mixture`] of them.
#[derive(Debug)]
pub struct Tokens {
    shards: Vec<Shard>,
    /// Where shards begin, and the number of all tokens.
    starts: Vec<u64>,
    packing: Packing,
    /// Sequences of the training split, and of the validation split.
    split: [u64; 2],
    masked: bool,
    largest: Option<u32>,
    digest: String,
}

impl Tokens {
    /// Whether `path` has token ids: a folder of `lowp tokenize`, a `.npy` file, or the `.bin` and `.idx` files of Megatron-LM, of which
    /// the path may leave the end out.
    pub fn are_at(path: &Path) -> bool {
        let npy = path.extension().is_some_and(|end| end == "npy");
        npy || path.join(folder::INDEX).is_file() || megatron::files(path).is_some()
    }

    /// Those at `path`.
    ///
    /// # Errors
    /// Files that cannot be read, or too few tokens for a sequence in each split.
    pub fn open(path: &Path, packing: Packing) -> Result<Self, TrainError> {
        let mut largest = None;
        let shards = if path.join(folder::INDEX).is_file() {
            let index = folder::index(path)?;
            largest = index.largest;
            folder::shards(path, &index)?
        } else if let Some(files) = megatron::files(path) {
            vec![megatron::read(&files)?]
        } else {
            vec![npy::read(path)?]
        };
        let mut starts = vec![0u64];
        for shard in &shards {
            starts.push(starts[starts.len() - 1] + shard.tokens);
        }
        let tokens = starts[starts.len() - 1];
        let Packing { seq, held_out, .. } = packing;
        if !(0.0..1.0).contains(&held_out) {
            return Err(TrainError::Data(format!(
                "`held_out` {held_out:?}: expected a part of the sequences, from 0 to below 1"
            )));
        }
        let sequences = tokens.saturating_sub(1) / seq.max(1) as u64;
        if seq == 0 || sequences < 2 {
            let needed = 2 * seq + 1;
            let why = format!(
                "its {tokens} tokens are too few for `seq` {seq}, a sequence to train on and one held out: at least {needed} are needed, \
                 or shorter sequences"
            );
            return Err(unreadable(path, why));
        }
        let held_out = part_of(sequences, held_out).clamp(1, sequences - 1);
        if packing.mask_documents && shards.iter().all(|shard| shard.ends.is_empty()) {
            return Err(unreadable(
                path,
                "it does not say where documents end, so they cannot be masked; use `lowp tokenize`, or leave `mask_documents` out",
            ));
        }
        let masked = packing.mask_documents || shards.iter().any(Shard::is_masked);
        let mut made = Self {
            shards,
            starts,
            packing,
            split: [sequences - held_out, held_out],
            masked,
            largest,
            digest: String::new(),
        };
        made.digest = made.digested(tokens)?;
        Ok(made)
    }

    /// Tokens of all shards.
    pub fn tokens(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Sequences of the training split, which are one epoch, and of the validation split.
    pub fn split(&self) -> [u64; 2] {
        self.split
    }

    /// The largest id, where the files say it.
    pub fn largest(&self) -> Option<u32> {
        self.largest
    }

    /// Whether some tokens do not count, or do not see all before them.
    pub fn is_masked(&self) -> bool {
        self.masked
    }

    /// A digest of all ids would read all of them: of some, with what the data are cut into, and of all masks and ends that are used.
    fn digested(&self, tokens: u64) -> Result<String, TrainError> {
        let part = (SAMPLED / 64).min(tokens);
        let mut bytes = Vec::new();
        for at in 0..64 {
            let start = (tokens - part) / 63 * at;
            let ids = self.ids(start..start + part)?;
            bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        }
        let checksum = lowp_checkpoint::checksum(&bytes);
        let [train, held_out] = self.split;
        let mut all = format!(
            "{tokens} tokens, digest {checksum}, {train} sequences and {held_out} held out"
        );
        if self.shards.iter().any(Shard::is_masked) {
            all += &format!(", masked, digest {}", self.digest_of_masks(tokens)?);
        }
        if self.packing.mask_documents {
            let shards = self.shards.iter().zip(&self.starts);
            let ends =
                shards.flat_map(|(shard, start)| shard.ends.iter().map(move |end| start + end));
            let ends: Vec<u8> = ends.flat_map(u64::to_le_bytes).collect();
            let checksum = lowp_checkpoint::checksum(&ends);
            all += &format!(", documents apart, digest {checksum}");
        }
        Ok(all)
    }

    /// Which tokens count, part by part.
    fn digest_of_masks(&self, tokens: u64) -> Result<String, TrainError> {
        let mut parts = String::new();
        for start in (0..tokens).step_by(MASKS) {
            let part = start..tokens.min(start + MASKS as u64);
            let counted = self.gathered(part, Shard::counted)?;
            let bytes: Vec<u8> = counted.into_iter().map(u8::from).collect();
            parts += &lowp_checkpoint::checksum(&bytes);
        }
        Ok(lowp_checkpoint::checksum(parts.as_bytes()))
    }

    /// What `of` has of each shard for its part of `tokens`, one after the other.
    fn gathered<T>(
        &self,
        tokens: Range<u64>,
        of: impl Fn(&Shard, Range<u64>) -> Result<Vec<T>, TrainError>,
    ) -> Result<Vec<T>, TrainError> {
        let mut all = Vec::new();
        let first = self.starts.partition_point(|&start| start <= tokens.start);
        for (shard, start) in self.shards.iter().zip(&self.starts).skip(first - 1) {
            let from = tokens.start.max(*start);
            let to = tokens.end.min(start + shard.tokens);
            if from < to {
                all.extend(of(shard, from - start..to - start)?);
            }
        }
        Ok(all)
    }

    fn ids(&self, tokens: Range<u64>) -> Result<Vec<u32>, TrainError> {
        self.gathered(tokens, Shard::ids)
    }

    /// For each of `tokens` where its document begins.
    fn document_starts(&self, tokens: Range<u64>) -> Vec<u64> {
        let start_of = |token: u64| {
            let shard = self.starts.partition_point(|&start| start <= token) - 1;
            let (begin, ends) = (self.starts[shard], &self.shards[shard].ends);
            let before = ends.partition_point(|&end| begin + end <= token);
            begin + before.checked_sub(1).map_or(0, |last| ends[last])
        };
        tokens.map(start_of).collect()
    }

    /// The targets of sequence `sequence`, whose ids are `ids`.
    fn targets_of(&self, sequence: u64, ids: &[u32]) -> Result<Vec<u32>, TrainError> {
        let seq = self.packing.seq as u64;
        let begin = sequence * seq + 1;
        let range = begin..begin + seq;
        let mut targets = ids[1..].to_vec();
        let counted = self.gathered(range.clone(), Shard::counted)?;
        for (target, _) in targets
            .iter_mut()
            .zip(counted)
            .filter(|(_, counted)| !counted)
        {
            *target = Batch::IGNORED;
        }
        if self.packing.mask_documents {
            let starts = self.document_starts(range.clone());
            let firsts = range.zip(starts).map(|(token, start)| token == start);
            for (target, _) in targets.iter_mut().zip(firsts).filter(|(_, first)| *first) {
                *target = Batch::IGNORED;
            }
        }
        Ok(targets)
    }

    /// The sequence as a batch.
    fn batch(&self, sequence: u64) -> Result<Batch, TrainError> {
        let seq = self.packing.seq as u64;
        let begin = sequence * seq;
        let mut inputs = self.ids(begin..begin + seq + 1)?;
        let targets = match self.masked {
            true => self.targets_of(sequence, &inputs)?,
            false => inputs[1..].to_vec(),
        };
        inputs.truncate(self.packing.seq);
        let mut batch = Batch::new(inputs, targets);
        if self.packing.mask_documents {
            let starts = self.document_starts(begin..begin + seq).into_iter();
            let first = |start: u64| u32::try_from(start.saturating_sub(begin)).unwrap_or(0);
            batch.first_seen = Some(starts.map(first).collect());
        }
        Ok(batch)
    }

    /// The sequence at place `number` of all epochs, of the source `source` in a run with this seed.
    fn in_order(&self, seed: u64, source: u64, number: u64) -> u64 {
        let [train, _] = self.split;
        Order::new(train, seed, source, number / train).get(number % train)
    }

    /// The sequence at place `at` of `total` that are spread over the validation split.
    fn held_out(&self, total: u64, at: u64) -> u64 {
        let [train, held_out] = self.split;
        train + at * held_out / total.max(1)
    }
}

/// `part` of `all`, to the nearest number.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "at most all, and not below zero"
)]
fn part_of(all: u64, part: f64) -> u64 {
    (all as f64 * part).round() as u64
}

#[cfg(test)]
mod tests;

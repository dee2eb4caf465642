//! [`AttentionSlice`]: what one call of cuDNN's attention takes, so that the memory for gradients of scores has a bound.

use crate::places::CudnnPasses;
use crate::sizes::{Block, Sizes};

/// Bytes for gradients of scores, but for one head of keys in one sequence, which is never cut.
const MOST_BYTES: usize = 4 << 30;

/// Several whole sequences, or some heads of one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AttentionSlice {
    pub(crate) sequences: usize,
    /// Heads of keys and values. Those of the queries that read them belong to the slice.
    pub(crate) kv_heads: usize,
    /// Heads of queries for each of keys.
    pub(crate) group: usize,
}

impl AttentionSlice {
    /// The largest slice of a batch of `tokens`. All slices of the batch are equal.
    pub(crate) fn new(sizes: &Sizes, tokens: usize, passes: CudnnPasses) -> Self {
        let kv_heads = match sizes.block {
            Block::Gpt => sizes.heads,
            Block::Llama(llama) => llama.kv_heads,
        };
        let group = sizes.heads / kv_heads.max(1);
        let of_head = size_of::<half::bf16>() * group * sizes.seq * sizes.seq;
        let most = (MOST_BYTES / of_head.max(1)).max(1);
        let sequences = tokens / sizes.seq.max(1);
        // Gradients of scores are in memory only for sums of one order.
        let (sequences, kv_heads) = if passes != CudnnPasses::Both {
            (sequences, kv_heads)
        } else if most < kv_heads {
            (1, largest_divisor(kv_heads, most))
        } else {
            (largest_divisor(sequences, most / kv_heads.max(1)), kv_heads)
        };
        Self {
            sequences,
            kv_heads,
            group,
        }
    }

    /// Heads of queries.
    pub(crate) fn heads(&self) -> usize {
        self.kv_heads * self.group
    }
}

fn largest_divisor(of: usize, most: usize) -> usize {
    let found = (1..=of.min(most)).rev().find(|n| of.is_multiple_of(*n));
    found.unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arch, GptConfig, Llama};

    fn slice(heads: usize, kv_heads: usize, seq: usize, sequences: usize) -> AttentionSlice {
        let model = GptConfig {
            arch: Arch::Llama(Llama::new(kv_heads)),
            dim: 64 * heads,
            heads,
            seq,
            ..GptConfig::default()
        };
        AttentionSlice::new(&model.sizes(), seq * sequences, CudnnPasses::Both)
    }

    #[test]
    fn slices_are_sequences_or_heads_of_one() {
        let cases = [
            ((32, 8, 2048, 16), (16, 8)),
            ((32, 8, 2048, 24), (12, 8)),
            ((32, 8, 2048, 23), (1, 8)),
            ((32, 8, 8192, 2), (1, 8)),
            ((32, 8, 16384, 2), (1, 2)),
            ((30, 6, 16384, 2), (1, 1)),
            ((32, 8, 32768, 1), (1, 1)),
            ((16, 16, 512, 1), (1, 16)),
        ];
        for ((heads, kv_heads, seq, sequences), (most, of_keys)) in cases {
            let slice = slice(heads, kv_heads, seq, sequences);
            assert_eq!(
                (slice.sequences, slice.kv_heads),
                (most, of_keys),
                "{heads} {kv_heads} {seq}"
            );
            assert_eq!(slice.heads(), of_keys * heads / kv_heads);
        }
    }
}

//! [`GptConfig`]: the sizes of a model and the parameters that follow, and [`Preset`], sizes by name.

use clap::ValueEnum;
use lowp_candle::{LinearSpec, VarSpec};
use lowp_shard::Init;

/// Bytes are the tokens: a vocabulary has at least as many.
pub(crate) const BYTES: usize = 256;

/// Standard deviation of the initial weights of a model of width `dim`: about half of `1 / sqrt(dim)`, at most 0.05. The customary
/// 0.02 is that of width 800; at width 128 it cost 2% of validation loss after 200 steps.
fn init_std(dim: usize) -> f32 {
    0.05 * (128.0 / dim.max(128) as f32).sqrt()
}

/// Sizes of a [`Gpt`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GptConfig {
    /// Width of the residual stream; a multiple of `heads`.
    pub(crate) dim: usize,
    /// Number of blocks.
    pub(crate) layers: usize,
    /// Attention heads per block.
    pub(crate) heads: usize,
    /// Tokens per sequence.
    pub(crate) seq: usize,
    /// Tokens that there are, at least [`BYTES`].
    pub(crate) vocab: usize,
}

/// Sizes by the customary name of a model's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// Width 384, 6 blocks of 6 heads, sequences of 256
    #[value(name = "10m")]
    P10m,
    /// Width 768, 12 blocks of 12 heads, sequences of 512
    #[value(name = "125m")]
    P125m,
    /// Width 1024, 24 blocks of 16 heads, sequences of 512
    #[value(name = "350m")]
    P350m,
    /// Width 2048, 24 blocks of 16 heads, sequences of 512
    #[value(name = "1b")]
    P1b,
}

impl Preset {
    /// The sizes; the vocabulary is that of bytes.
    pub(crate) fn config(self) -> GptConfig {
        let [dim, layers, heads, seq] = match self {
            Self::P10m => [384, 6, 6, 256],
            Self::P125m => [768, 12, 12, 512],
            Self::P350m => [1024, 24, 16, 512],
            Self::P1b => [2048, 24, 16, 512],
        };
        GptConfig {
            dim,
            layers,
            heads,
            seq,
            vocab: BYTES,
        }
    }
}

impl Default for GptConfig {
    /// A model that two cores train in a minute.
    fn default() -> Self {
        Self {
            dim: 128,
            layers: 4,
            heads: 4,
            seq: 128,
            vocab: BYTES,
        }
    }
}

impl GptConfig {
    /// The linear layers of all blocks: fused query-key-value, projection, and the two of the MLP.
    pub(crate) fn linears(&self) -> Vec<LinearSpec> {
        let d = self.dim;
        // Residual branches add up over 2 * layers outputs; their last weight starts smaller by that root.
        let residual = Init::Normal(init_std(d) / (2.0 * self.layers as f32).sqrt());
        let plain = Init::Normal(init_std(d));
        let kinds = [
            ("qkv", 3 * d, d, plain),
            ("proj", d, d, residual),
            ("fc", 4 * d, d, plain),
            ("out", d, 4 * d, residual),
        ];
        let of_block = |block: usize| {
            kinds.map(|(name, rows, cols, init)| LinearSpec {
                name: format!("block{block}.{name}"),
                block,
                rows,
                cols,
                init,
            })
        };
        (0..self.layers).flat_map(of_block).collect()
    }

    /// The parameters that stay in f32: embeddings, norms and the head.
    pub(crate) fn vars(&self) -> Vec<VarSpec> {
        let matrix = |name: &str, rows: usize| VarSpec {
            name: name.to_owned(),
            shape: vec![rows, self.dim],
            init: Init::Normal(init_std(self.dim)),
            decay: true,
        };
        let mut specs = vec![matrix("tokens", self.vocab), matrix("positions", self.seq)];
        let blocks = (0..self.layers).flat_map(|b| [1, 2].map(|i| format!("block{b}.norm{i}")));
        for norm in blocks.chain(["norm".to_owned()]) {
            for (part, value) in [("gamma", 1.0), ("beta", 0.0)] {
                specs.push(VarSpec {
                    name: format!("{norm}.{part}"),
                    shape: vec![self.dim],
                    init: Init::Constant(value),
                    decay: false,
                });
            }
        }
        specs.push(matrix("head", self.vocab));
        specs
    }

    /// Parameters in all, linear layers and variables.
    pub(crate) fn parameters(&self) -> usize {
        let linears: usize = self.linears().iter().map(|l| l.rows * l.cols).sum();
        let vars: usize = self
            .vars()
            .iter()
            .map(|v| v.shape.iter().product::<usize>())
            .sum();
        linears + vars
    }

    /// Floating-point operations of one token in forward and backward: two per weight of a product forward and four backward, and the
    /// same of attention's two products, of which causal masks leave half. What is computed again in backward does not count.
    pub(crate) fn flops_per_token(&self) -> f64 {
        let linears: usize = self.linears().iter().map(|l| l.rows * l.cols).sum();
        let head = self.vocab * self.dim;
        let attention = self.layers * self.seq * self.dim;
        6.0 * (linears + head + attention) as f64
    }
}

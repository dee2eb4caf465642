//! The model that `lowp train` trains: a decoder-only byte-level transformer with pre-norm blocks, learned positions and
//! an untied head.

mod ops;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor, Var, bail};
use lowp_candle::{Linear, LinearSpec, VarSpec};
use lowp_shard::Init;
use ops::{CausalAttention, CrossEntropy, Dense, Embedding, Gelu, LayerNorm};
use std::sync::Arc;

/// Bytes are the tokens.
pub(crate) const VOCABULARY: usize = 256;

/// Standard deviation of the initial weights: about half of `1 / sqrt(128)`. The customary 0.02 suits wider models; at
/// width 128 it cost 2% of validation loss after 200 steps.
const INIT_STD: f32 = 0.05;

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
}

/// Whole sequences with their next-token targets.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    /// `sequences * seq` input bytes.
    pub(crate) inputs: Arc<[u8]>,
    /// The byte that follows each input.
    pub(crate) targets: Arc<[u8]>,
}

impl GptConfig {
    /// The linear layers of all blocks: fused query-key-value, projection, and the two of the MLP.
    pub(crate) fn linears(&self) -> Vec<LinearSpec> {
        let d = self.dim;
        // Residual branches add up over 2 * layers outputs; their last weight starts smaller by that root.
        let residual = Init::Normal(INIT_STD / (2.0 * self.layers as f32).sqrt());
        let plain = Init::Normal(INIT_STD);
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
            init: Init::Normal(INIT_STD),
            decay: true,
        };
        let mut specs = vec![matrix("tokens", VOCABULARY), matrix("positions", self.seq)];
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
        specs.push(matrix("head", VOCABULARY));
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
}

/// The model: candle variables, and linear layers that fetch their weights.
#[derive(Debug)]
pub(crate) struct Gpt {
    config: GptConfig,
    vars: Vec<Var>,
    linears: Vec<Box<dyn Linear>>,
    threads: usize,
}

impl Gpt {
    /// Builds the model over `linears`, one per entry of [`GptConfig::linears`], and `vars`, one per
    /// entry of [`GptConfig::vars`]. Products of the head use at most `threads` threads.
    ///
    /// # Errors
    /// If the number of layers or variables is wrong or the heads do not divide the width.
    pub(crate) fn new(
        config: GptConfig,
        linears: Vec<Box<dyn Linear>>,
        vars: Vec<Var>,
        threads: usize,
    ) -> Result<Self> {
        let expected = config.linears().len();
        if linears.len() != expected {
            bail!(
                "{} linear layers for a model that has {expected}",
                linears.len()
            );
        }
        if config.heads == 0 || !config.dim.is_multiple_of(config.heads) {
            bail!(
                "{} heads do not divide a width of {}",
                config.heads,
                config.dim
            );
        }
        if vars.len() != config.vars().len() {
            bail!(
                "{} variables for a model that has {}",
                vars.len(),
                config.vars().len()
            );
        }
        Ok(Self {
            config,
            vars,
            linears,
            threads,
        })
    }

    /// Sum of the batch's token losses divided by `divisor`, the number of tokens over all ranks.
    ///
    /// # Errors
    /// A batch that is not whole sequences, or what a linear layer reports.
    pub(crate) fn loss(&self, batch: &Batch, divisor: usize) -> Result<Tensor> {
        let logits = self.logits(&batch.inputs)?;
        logits.apply_op1(CrossEntropy::new(batch.targets.clone(), divisor))
    }

    /// Next-byte logits, `[tokens, 256]`, for whole sequences of input bytes.
    ///
    /// # Errors
    /// An input that is not whole sequences, or what a linear layer reports.
    pub(crate) fn logits(&self, inputs: &Arc<[u8]>) -> Result<Tensor> {
        let GptConfig { heads, seq, .. } = self.config;
        if inputs.is_empty() || !inputs.len().is_multiple_of(seq) {
            bail!(
                "{} input bytes are not whole sequences of {seq}",
                inputs.len()
            );
        }
        let [tokens, positions, norms @ .., head] = self.vars.as_slice() else {
            bail!("a model without variables");
        };
        let embed = Embedding {
            ids: inputs.clone(),
            seq,
        };
        let mut x = tokens.apply_op2(positions, embed)?;
        let (block_norms, last_norm) = norms.split_at(4 * self.config.layers);
        for (linear, norm) in self
            .linears
            .chunks_exact(4)
            .zip(block_norms.chunks_exact(4))
        {
            let h = x.apply_op3(&norm[0], &norm[1], LayerNorm::default())?;
            let h = linear[0]
                .forward(&h)?
                .apply_op1(CausalAttention::new(heads, seq))?;
            x = (x + linear[1].forward(&h)?)?;
            let h = x.apply_op3(&norm[2], &norm[3], LayerNorm::default())?;
            let h = linear[2].forward(&h)?.apply_op1(Gelu)?;
            x = (x + linear[3].forward(&h)?)?;
        }
        let x = x.apply_op3(&last_norm[0], &last_norm[1], LayerNorm::default())?;
        x.apply_op2(
            head,
            Dense {
                threads: self.threads,
            },
        )
    }
}

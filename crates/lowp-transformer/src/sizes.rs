//! [`Sizes`]: the shape of a transformer.

/// Sizes of a decoder-only transformer with pre-norm blocks and an untied head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads per block.
    pub heads: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Tokens that there are.
    pub vocab: usize,
    /// What its blocks are.
    pub block: Block,
}

/// What the blocks are. The names are those of the linear layers, in their order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Block {
    /// As in GPT-2: layer norms with gamma and beta, learned positions, `qkv`, `proj`, `fc`, GELU, `out`.
    Gpt,
    /// As in Llama: norms by the root mean square with gamma, rotary positions, query, key, value, output, gate, up, SwiGLU, down.
    Llama {
        /// Heads of keys and values.
        kv_heads: usize,
        /// Width of the gated MLP.
        gated: usize,
        /// Base of the frequencies of rotary positions.
        theta: f32,
    },
}

impl Sizes {
    /// Values of one head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.heads
    }

    /// What [`crate::Transformer`] cannot take of these sizes, in words.
    ///
    /// # Errors
    /// Heads of a width that is no multiple of 16, a width above 8192 or that is no multiple of 8.
    pub fn check(&self) -> Result<(), String> {
        let Self {
            dim, heads, vocab, ..
        } = *self;
        if heads == 0 || !dim.is_multiple_of(heads) {
            return Err(format!("{heads} heads do not divide a width of {dim}"));
        }
        if !self.head_dim().is_multiple_of(16) {
            return Err(format!(
                "heads of {} values: on a GPU their width is a multiple of 16; take {dim} / (a multiple of 16) heads",
                self.head_dim()
            ));
        }
        if dim > 8192 {
            return Err(format!(
                "a width of {dim}: norms on a GPU take at most 8192"
            ));
        }
        if !vocab.is_multiple_of(8) {
            return Err(format!(
                "a vocabulary of {vocab}: on a GPU it is a multiple of 8; take {}",
                vocab.next_multiple_of(8)
            ));
        }
        Ok(())
    }
}

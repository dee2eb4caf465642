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

    /// What `Transformer` cannot take of these sizes, in words.
    ///
    /// # Errors
    /// A size of 0, heads that do not divide the width or are no multiple of 16 wide, a width above 8192, a vocabulary or gated MLP that is no
    /// multiple of 16, or heads of keys and values that do not divide the heads.
    pub fn check(&self) -> Result<(), String> {
        let Self {
            dim, heads, vocab, ..
        } = *self;
        if [dim, self.layers, heads, self.seq, vocab].contains(&0) {
            return Err(format!("sizes of 0: {self:?}"));
        }
        if !dim.is_multiple_of(heads) {
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
        if !vocab.is_multiple_of(16) {
            return Err(format!(
                "a vocabulary of {vocab}: on a GPU it is a multiple of 16; take {}",
                vocab.next_multiple_of(16)
            ));
        }
        if let Block::Llama {
            kv_heads, gated, ..
        } = self.block
        {
            if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
                return Err(format!(
                    "{kv_heads} heads of keys and values do not divide {heads} heads"
                ));
            }
            if gated == 0 || !gated.is_multiple_of(16) {
                return Err(format!(
                    "a gated MLP of {gated}: on a GPU it is a multiple of 16"
                ));
            }
        }
        Ok(())
    }

    /// Outputs and inputs of the linear layers, in their order.
    pub fn linears(&self) -> Vec<[usize; 2]> {
        let d = self.dim;
        let block = match self.block {
            Block::Gpt => vec![[3 * d, d], [d, d], [4 * d, d], [d, 4 * d]],
            Block::Llama {
                kv_heads, gated, ..
            } => {
                let kv = kv_heads * self.head_dim();
                vec![
                    [d, d],
                    [kv, d],
                    [kv, d],
                    [d, d],
                    [gated, d],
                    [gated, d],
                    [d, gated],
                ]
            }
        };
        block.repeat(self.layers)
    }

    /// Values of the parameters that stay in f32, in their order: the embedding, positions where they are learned, the norms of blocks and
    /// the last one, each with gamma and, where it has one, beta, and the head.
    pub fn vars(&self) -> Vec<usize> {
        let table = self.vocab * self.dim;
        let (first, of_norm) = match self.block {
            Block::Gpt => (vec![table, self.seq * self.dim], 2),
            Block::Llama { .. } => (vec![table], 1),
        };
        let norms = vec![self.dim; of_norm * (2 * self.layers + 1)];
        [first, norms, vec![table]].concat()
    }
}

//! [`Sizes`]: the shape of a transformer.

use crate::Rope;

/// Sizes of a decoder-only transformer with pre-norm blocks and an untied head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of transformer blocks.
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
    Llama(LlamaSizes),
}

/// What blocks like Llama's are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlamaSizes {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Values of one head.
    pub head_dim: usize,
    /// Width of the gated MLP.
    pub gated: usize,
    /// How queries and keys are turned by their positions.
    pub rope: Rope,
    /// What norms add to the mean of squares.
    pub eps: f32,
    /// Whether queries and keys have a norm each, over the values of a head.
    pub qk_norm: bool,
    /// Positions that a token sees, itself included; all before it where there is none.
    pub window: Option<usize>,
    /// Whether the head is the embedding.
    pub tied: bool,
}

impl Sizes {
    /// Values of one head.
    pub fn head_dim(&self) -> usize {
        match self.block {
            Block::Gpt => self.dim / self.heads.max(1),
            Block::Llama(LlamaSizes { head_dim, .. }) => head_dim,
        }
    }

    /// Values of all heads of queries: outputs of their layer, and inputs of the layer after attention.
    pub fn heads_width(&self) -> usize {
        self.heads * self.head_dim()
    }

    /// What norms add to the mean of squares.
    pub fn eps(&self) -> f32 {
        match self.block {
            Block::Gpt => 1e-5,
            Block::Llama(LlamaSizes { eps, .. }) => eps,
        }
    }

    /// Positions that a token sees, itself included, where they are fewer than those of a sequence.
    pub fn window(&self) -> Option<usize> {
        match self.block {
            Block::Gpt => None,
            Block::Llama(LlamaSizes { window, .. }) => window.filter(|window| *window < self.seq),
        }
    }

    /// Whether the head is the embedding.
    pub fn tied(&self) -> bool {
        matches!(self.block, Block::Llama(LlamaSizes { tied: true, .. }))
    }

    /// What `Transformer` cannot take of these sizes, in words.
    ///
    /// # Errors
    /// A size of 0, heads that do not divide the width or are no multiple of 16 wide, a width above 8192, a vocabulary or gated MLP that is no
    /// multiple of 16, heads of keys and values that do not divide the heads, or norms of heads of more than 512 values.
    pub fn check(&self) -> Result<(), String> {
        let Self {
            dim, heads, vocab, ..
        } = *self;
        if [dim, self.layers, heads, self.seq, vocab].contains(&0) {
            return Err(format!("sizes of 0: {self:?}"));
        }
        if self.block == Block::Gpt && !dim.is_multiple_of(heads) {
            return Err(format!("{heads} heads do not divide a width of {dim}"));
        }
        if !self.head_dim().is_multiple_of(16) {
            let remedy = match self.block {
                Block::Gpt => format!(
                    "; with {heads} heads a model {} wide fits",
                    dim.next_multiple_of(16 * heads)
                ),
                Block::Llama(_) => String::new(),
            };
            return Err(format!(
                "heads of {} values: on a GPU their width is a multiple of 16{remedy}",
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
        if let Block::Llama(LlamaSizes {
            kv_heads,
            gated,
            head_dim,
            qk_norm,
            ..
        }) = self.block
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
            if qk_norm && head_dim > 512 {
                return Err(format!(
                    "heads of {head_dim} values: their norms on a GPU take at most 512"
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
            Block::Llama(LlamaSizes {
                kv_heads, gated, ..
            }) => {
                let (q, kv) = (self.heads_width(), kv_heads * self.head_dim());
                vec![
                    [q, d],
                    [kv, d],
                    [kv, d],
                    [d, q],
                    [gated, d],
                    [gated, d],
                    [d, gated],
                ]
            }
        };
        block.repeat(self.layers)
    }

    /// Values of the parameters that stay in f32, in their order: the embedding, positions where they are learned, the norms of blocks and
    /// the last one, each with gamma and, where it has one, beta, and the head, unless it is the embedding. Norms of queries and keys
    /// follow the first norm of their block.
    pub fn vars(&self) -> Vec<usize> {
        let table = self.vocab * self.dim;
        let (mut vars, of_norm) = match self.block {
            Block::Gpt => (vec![table, self.seq * self.dim], 2),
            Block::Llama(_) => (vec![table], 1),
        };
        let norm = vec![self.dim; of_norm];
        for _ in 0..self.layers {
            vars.extend(&norm);
            if let Block::Llama(LlamaSizes { qk_norm: true, .. }) = self.block {
                vars.extend([self.head_dim(); 2]);
            }
            vars.extend(&norm);
        }
        vars.extend(&norm);
        if !self.tied() {
            vars.push(table);
        }
        vars
    }
}

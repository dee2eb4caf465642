//! [`Place`]: a buffer of a model on a GPU by its use. The model allocates the places that are listed here, and a plan adds them up.

use lowp_format::BufferSpec;

use crate::attention_slice::AttentionSlice;
use crate::sizes::{Block, LlamaSizes, Sizes};

/// Bytes of values and of sums.
pub(crate) const BF16: usize = 2;
pub(crate) const F32: usize = 4;
/// Bytes of a token.
const ID: usize = 4;

/// Bytes that products work in.
const PRODUCTS: usize = lowp_gemm::DEVICE_WORKSPACE;

/// Most bytes of the logits that are there at a time.
const LOGITS: usize = 512 << 20;

/// Tokens whose logits are there at a time, of `tokens`, a multiple of 128: all, or equal parts of as many as there is room for.
fn head_rows(tokens: usize, vocab: usize) -> usize {
    let most = (LOGITS / (F32 * vocab)).max(128);
    let parts = tokens.div_ceil(most);
    tokens.div_ceil(parts.max(1)).next_multiple_of(128)
}

/// Rows whose gradients of gamma and beta one block of threads adds up: at 8,192 tokens all blocks are on the multiprocessors of an H100 at
/// the same time, as many as these take.
pub(crate) const NORM_ROWS: usize = 16;

/// Length of the memory in which the gradients of a norm's gamma and beta are added up.
pub(crate) fn norm_sums(tokens: usize, dim: usize) -> usize {
    tokens.div_ceil(NORM_ROWS) * 2 * dim
}

/// Heads whose gradients of gamma one block of threads adds up.
pub(crate) const NORM_HEADS: usize = 256;

/// Length of the memory in which the gradients of gamma of a norm of `heads` heads are added up.
pub(crate) fn head_norm_sums(heads: usize, head_dim: usize) -> usize {
    heads.div_ceil(NORM_HEADS) * head_dim
}

/// What rows and columns of a rounded gradient are.
pub(crate) const DECODED_GRADIENT: [&str; 2] =
    ["decoded gradient", "decoded columns of a gradient"];

/// How long a buffer is what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stays {
    /// As long as the model.
    Own,
    /// The same, for products or attention to work in.
    Workspace,
    /// From the forward to the backward pass of a block: all blocks have the same where they run forward again, else each its own.
    Kept,
    /// While something runs: whoever names the same use and length has the same buffer.
    Lent,
}

/// A buffer by its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    what: &'static str,
    /// Of codes and scales.
    pub(crate) spec: Option<BufferSpec>,
    pub(crate) bytes: usize,
    pub(crate) stays: Stays,
}

impl Place {
    const fn new(what: &'static str, bytes: usize, stays: Stays) -> Self {
        Self {
            what,
            spec: None,
            bytes,
            stays,
        }
    }

    pub(crate) const fn own(what: &'static str, bytes: usize) -> Self {
        Self::new(what, bytes, Stays::Own)
    }

    pub(crate) const fn workspace(what: &'static str, bytes: usize) -> Self {
        Self::new(what, bytes, Stays::Workspace)
    }

    pub(crate) const fn kept(what: &'static str, bytes: usize) -> Self {
        Self::new(what, bytes, Stays::Kept)
    }

    pub(crate) const fn lent(what: &'static str, bytes: usize) -> Self {
        Self::new(what, bytes, Stays::Lent)
    }

    /// The same for a buffer of `spec`.
    pub(crate) const fn of_spec(self, spec: BufferSpec) -> Self {
        Self {
            spec: Some(spec),
            ..self
        }
    }
}

/// The buffers of a norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormPlaces {
    /// What it reads.
    pub(crate) x: Place,
    pub(crate) stats: Place,
}

/// The buffers of a model that are not those of its blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelPlaces {
    /// What products work in.
    pub(crate) products: Place,
    /// The batch.
    pub(crate) ids: Place,
    pub(crate) targets: Place,
    pub(crate) starts: Place,
    pub(crate) order: Place,
    /// The gradient of the residual stream.
    pub(crate) dx: Place,
    /// What a block adds to it.
    pub(crate) branch: Place,
    /// The last norm, and what it makes.
    pub(crate) norm: NormPlaces,
    pub(crate) last: Place,
    /// The head in bf16.
    pub(crate) head: Place,
    /// Tokens that have logits at a time.
    pub(crate) head_rows: usize,
    pub(crate) logits: Place,
    pub(crate) dlogits: Place,
    /// The head's gradient if head and embedding are one matrix; the embedding's own is added to it.
    pub(crate) tied_grad: Option<Place>,
    pub(crate) losses: Place,
    pub(crate) total: Place,
    /// The gradient of what a norm makes, and where those of its gamma and beta are added up.
    pub(crate) dh: Place,
    pub(crate) norm_sums: Place,
}

impl ModelPlaces {
    pub(crate) fn new(sizes: &Sizes, tokens: usize) -> Self {
        let Sizes { dim, vocab, .. } = *sizes;
        let stream = BF16 * tokens * dim;
        let head_rows = head_rows(tokens, vocab);
        let tied = matches!(sizes.block, Block::Llama(LlamaSizes { tied: true, .. }));
        Self {
            products: Place::workspace("products", PRODUCTS),
            ids: Place::own("tokens", ID * tokens),
            targets: Place::own("targets", ID * tokens),
            starts: Place::own("starts", ID * (vocab + 1)),
            order: Place::own("order", ID * tokens),
            dx: Place::own("dx", stream),
            branch: Place::own("branch", stream),
            norm: NormPlaces {
                x: Place::own("last x", stream),
                stats: Place::kept("last stats", F32 * 2 * tokens),
            },
            last: Place::lent("last", stream),
            head: Place::own("head", BF16 * vocab * dim),
            head_rows,
            logits: Place::lent("logits", F32 * head_rows * vocab),
            dlogits: Place::lent("logit gradients", BF16 * head_rows * vocab),
            tied_grad: tied.then(|| Place::own("tied head gradient", F32 * vocab * dim)),
            losses: Place::own("losses", F32 * tokens),
            total: Place::own("loss", F32),
            // Also the gradient of what the heads make.
            dh: Place::lent("dh", BF16 * tokens * dim.max(sizes.heads_width())),
            norm_sums: Place::lent("norm gradients", F32 * norm_sums(tokens, dim)),
        }
    }

    pub(crate) fn all(self) -> impl Iterator<Item = Place> {
        let Self {
            products,
            ids,
            targets,
            starts,
            order,
            dx,
            branch,
            norm: NormPlaces { x, stats },
            last,
            head,
            head_rows: _,
            logits,
            dlogits,
            tied_grad,
            losses,
            total,
            dh,
            norm_sums,
        } = self;
        let all = [
            products, ids, targets, starts, order, dx, branch, x, stats, last, head, logits,
            dlogits, losses, total, dh, norm_sums,
        ];
        all.into_iter().chain(tied_grad)
    }
}

/// What tokens see, where documents are apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DocumentPlaces {
    /// The first position of each token.
    pub(crate) first: Place,
    /// What cuDNN adds to scores.
    pub(crate) mask: Option<Place>,
}

impl DocumentPlaces {
    pub(crate) fn new(sizes: &Sizes, tokens: usize, cudnn: bool) -> Self {
        let mask = || Place::own("document mask", BF16 * tokens * sizes.seq);
        Self {
            first: Place::own("first positions", ID * tokens),
            mask: cudnn.then(mask),
        }
    }

    pub(crate) fn all(self) -> impl Iterator<Item = Place> {
        [self.first].into_iter().chain(self.mask)
    }
}

/// The buffers of a block beside those of its linear layers and of attention.
#[derive(Clone, Debug)]
pub(crate) struct BlockPlaces {
    pub(crate) norms: [NormPlaces; 2],
    /// The gradient of what each linear layer makes; none of those that add to the residual stream, whose gradient is there.
    pub(crate) gradients: Vec<Option<Place>>,
    /// The operands of each linear layer.
    pub(crate) operands: &'static [OperandNames],
    /// What `fc` makes; or gate, up, and the gradient of what is made of both.
    pub(crate) mlp: Vec<Place>,
    /// Queries, keys and values in their rows, where they stay until backward.
    rows: Vec<Place>,
    /// Of the norms of queries and keys.
    pub(crate) head_norms: Option<HeadNormPlaces>,
}

/// The buffers of the norms of queries and keys beside what they read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNormPlaces {
    /// What they make, where attention cannot have it in the place of gradients.
    made: [Place; 2],
    /// Where gradients of gamma are added up.
    pub(crate) sums: Place,
}

/// The operands of a linear layer, by the memory that they have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperandNames {
    /// The input: layers that read the same have the same here.
    pub(crate) reads: &'static str,
    /// Where codes of the input outlive it, and where not.
    pub(crate) input: [&'static str; 2],
    /// Whether an activation makes the input.
    pub(crate) activated: bool,
    /// Where the backward pass of an activation makes the gradient, and rounds it: rows and columns.
    pub(crate) gradient: Option<[&'static str; 2]>,
    /// The weight, decoded: those of a block are there at the same time.
    pub(crate) weight: &'static str,
}

impl OperandNames {
    pub(crate) const fn new(
        weight: &'static str,
        reads: &'static str,
        input: [&'static str; 2],
    ) -> Self {
        Self {
            reads,
            input,
            activated: false,
            gradient: None,
            weight,
        }
    }

    pub(crate) const fn activated(self) -> Self {
        Self {
            activated: true,
            ..self
        }
    }

    pub(crate) const fn before_activation(self, gradient: [&'static str; 2]) -> Self {
        Self {
            gradient: Some(gradient),
            ..self
        }
    }
}

const GPT_OPERANDS: &[OperandNames] = &[
    OperandNames::new("decoded qkv", "attention", ["h", "kept h"]),
    OperandNames::new("decoded proj", "proj", ["seen", "kept seen"]),
    // Its gradient is there at the same time as that of the next layer.
    OperandNames::new("decoded fc", "mlp", ["h", "kept second h"])
        .before_activation(["rounded da", "columns of da"]),
    OperandNames::new("decoded out", "out", ["g", "kept g"]).activated(),
];

const LLAMA_OPERANDS: &[OperandNames] = &[
    OperandNames::new("decoded query", "attention", ["h", "kept h of q"]),
    OperandNames::new("decoded key", "attention", ["h", "kept h of k"]),
    OperandNames::new("decoded value", "attention", ["h", "kept h of v"]),
    OperandNames::new("decoded output", "output", ["seen", "kept seen"]),
    // Both gradients are there at the same time.
    OperandNames::new("decoded gate", "mlp", ["h", "kept h of gate"])
        .before_activation(["dgate", "columns of dgate"]),
    OperandNames::new("decoded up", "mlp", ["h", "kept h of up"])
        .before_activation(["dup", "columns of dup"]),
    OperandNames::new("decoded down", "down", ["g", "kept g"]).activated(),
];

impl BlockPlaces {
    pub(crate) fn new(sizes: &Sizes, tokens: usize) -> Self {
        let dim = sizes.dim;
        let row = |width: usize| BF16 * tokens * width;
        let stats = |what| Place::kept(what, F32 * 2 * tokens);
        let norms = [
            // Forward runs again on what the first norm reads.
            NormPlaces {
                x: Place::own("x", row(dim)),
                stats: stats("kept stats"),
            },
            NormPlaces {
                x: Place::kept("kept x", row(dim)),
                stats: stats("kept second stats"),
            },
        ];
        let lent = |what, width| Some(Place::lent(what, row(width)));
        let kept = |what, width| Place::kept(what, row(width));
        match sizes.block {
            Block::Gpt => Self {
                norms,
                gradients: vec![lent("dqkv", 3 * dim), None, lent("da", 4 * dim), None],
                operands: GPT_OPERANDS,
                mlp: vec![kept("kept a", 4 * dim)],
                rows: vec![kept("kept q", 3 * dim)],
                head_norms: None,
            },
            Block::Llama(LlamaSizes {
                kv_heads,
                gated,
                qk_norm,
                ..
            }) => {
                let (q, kv) = (sizes.heads_width(), kv_heads * sizes.head_dim());
                Self {
                    norms,
                    gradients: vec![
                        lent("dq", q),
                        lent("dk", kv),
                        lent("dv", kv),
                        None,
                        lent("dgate", gated),
                        lent("dup", gated),
                        None,
                    ],
                    operands: LLAMA_OPERANDS,
                    mlp: vec![
                        kept("kept gate", gated),
                        kept("kept up", gated),
                        Place::lent("dg", row(gated)),
                    ],
                    rows: vec![kept("kept q", q), kept("kept k", kv), kept("kept v", kv)],
                    head_norms: qk_norm.then(|| {
                        let heads = tokens * sizes.heads.max(kv_heads);
                        let sums = head_norm_sums(heads, sizes.head_dim());
                        HeadNormPlaces {
                            made: [
                                Place::lent("normed q", row(q)),
                                Place::lent("normed k", row(kv)),
                            ],
                            sums: Place::lent("head norm gradients", F32 * sums),
                        }
                    }),
                }
            }
        }
    }

    /// Queries, keys and values in their rows: where they need not stay, they are where their gradients will be. What norms read stays.
    pub(crate) fn rows(&self, attention: &AttentionPlaces) -> Vec<Place> {
        let stay = match (attention, &self.head_norms) {
            (AttentionPlaces::Cudnn(..), _) => self.rows.len(),
            (AttentionPlaces::Products(_), Some(_)) => 2,
            (AttentionPlaces::Products(_), None) => 0,
        };
        let gradients = self.gradients.iter().take(self.rows.len()).flatten();
        let kept = self.rows.iter().take(stay);
        kept.chain(gradients.skip(stay)).copied().collect()
    }

    /// What norms make of queries and keys, which attention reads.
    pub(crate) fn normed(&self, attention: &AttentionPlaces) -> Vec<Place> {
        match (attention, &self.head_norms) {
            (_, None) => Vec::new(),
            (AttentionPlaces::Cudnn(..), Some(norms)) => norms.made.to_vec(),
            (AttentionPlaces::Products(_), Some(_)) => {
                let gradients = self.gradients.iter().take(2);
                gradients.flatten().copied().collect()
            }
        }
    }

    pub(crate) fn all(&self, attention: &AttentionPlaces) -> Vec<Place> {
        let Self {
            norms,
            gradients,
            operands: _,
            mlp,
            rows: _,
            head_norms,
        } = self;
        let mut all = self.rows(attention);
        all.extend(self.normed(attention));
        all.extend(head_norms.iter().map(|norms| norms.sums));
        all.extend(norms.iter().flat_map(|norm| [norm.x, norm.stats]));
        all.extend(gradients.iter().flatten());
        all.extend(mlp);
        all
    }
}

/// The passes of attention that run by cuDNN; others run as plain products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CudnnPasses {
    /// None.
    None,
    /// Forward alone.
    Forward,
    /// Forward and backward, whose sums have one order.
    #[default]
    Both,
    /// Forward and backward, in which blocks of keys add to the gradients of queries in the order in which they end: other bits in each run.
    AnyOrder,
}

/// The buffers of attention.
#[expect(clippy::large_enum_variant, reason = "a model has one")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum AttentionPlaces {
    /// By cuDNN, with what backward makes where that runs as products.
    Cudnn(CudnnPlaces, Option<ProductPlaces>),
    Products(ProductPlaces),
}

/// Of attention by cuDNN.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CudnnPlaces {
    pub(crate) output: Place,
    /// The logarithms of the sums that the softmax divides by.
    pub(crate) stats: Place,
    /// What it works in on Hopper.
    workspace: Place,
}

/// Of attention by batched products over all heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductPlaces {
    /// Queries, keys and values by head.
    pub(crate) split: [Place; 3],
    /// Probabilities.
    pub(crate) p: Place,
    pub(crate) scores: Place,
    pub(crate) heads: Place,
    pub(crate) dheads: Place,
    pub(crate) dscores: Place,
}

impl CudnnPlaces {
    pub(crate) fn new(sizes: &Sizes, tokens: usize, passes: CudnnPasses) -> Self {
        let (values, rows) = (tokens * sizes.heads_width(), tokens * sizes.heads);
        let slice = AttentionSlice::new(sizes, tokens, passes);
        let of_slice = slice.sequences * sizes.seq * slice.heads();
        let shared = match slice.group {
            0 | 1 => 0,
            _ => 2 * of_slice * sizes.head_dim(),
        };
        Self {
            output: Place::kept("kept seen heads", BF16 * values),
            stats: Place::kept("kept attention stats", F32 * rows),
            // Measured: a sum for each row, where queries share them gradients of keys and values for each head, and gradients of scores, or of
            // queries in f32.
            workspace: sdpa_workspace(match passes {
                CudnnPasses::Both => BF16 * (of_slice * sizes.seq + shared) + F32 * of_slice + 256,
                CudnnPasses::AnyOrder => {
                    BF16 * shared + F32 * of_slice * (sizes.head_dim() + 1) + 256
                }
                CudnnPasses::Forward | CudnnPasses::None => 256,
            }),
        }
    }
}

impl ProductPlaces {
    /// `kept` says that backward has the heads and the probabilities of forward; else it makes them again.
    pub(crate) fn new(sizes: &Sizes, tokens: usize, kept: bool) -> Self {
        let values = tokens * sizes.heads_width();
        let square = tokens * sizes.heads * sizes.seq;
        let place = |[stays, again]: [&'static str; 2], len| match kept {
            true => Place::kept(stays, BF16 * len),
            false => Place::lent(again, BF16 * len),
        };
        let split = [
            ["kept q heads", "q heads"],
            ["kept k heads", "k heads"],
            ["kept v heads", "v heads"],
        ];
        Self {
            split: split.map(|names| place(names, values)),
            p: place(["kept probabilities", "probabilities"], square),
            scores: Place::lent("scores", F32 * square),
            heads: Place::lent("heads", BF16 * values),
            dheads: Place::lent("head gradients", BF16 * values),
            dscores: Place::lent("score gradients", BF16 * square),
        }
    }
}

impl AttentionPlaces {
    /// Those of attention of which cuDNN runs `passes`.
    pub(crate) fn new(sizes: &Sizes, tokens: usize, passes: CudnnPasses) -> Self {
        let products = |kept| ProductPlaces::new(sizes, tokens, kept);
        let cudnn = || CudnnPlaces::new(sizes, tokens, passes);
        match passes {
            CudnnPasses::Both | CudnnPasses::AnyOrder => Self::Cudnn(cudnn(), None),
            CudnnPasses::Forward => Self::Cudnn(cudnn(), Some(products(false))),
            CudnnPasses::None => Self::Products(products(true)),
        }
    }

    /// Those of one block.
    pub(crate) fn of_block(&self) -> Vec<Place> {
        let (cudnn, products) = match *self {
            Self::Cudnn(cudnn, products) => (Some(cudnn), products),
            Self::Products(products) => (None, Some(products)),
        };
        let of_cudnn = cudnn.map(|CudnnPlaces { output, stats, .. }| [output, stats]);
        let of_products = products.map(|of| {
            let [q, k, v] = of.split;
            [q, k, v, of.p, of.scores, of.heads, of.dheads, of.dscores]
        });
        let all = of_cudnn.into_iter().flatten();
        all.chain(of_products.into_iter().flatten()).collect()
    }

    /// That of all blocks.
    pub(crate) fn of_all(&self) -> Option<Place> {
        match self {
            Self::Cudnn(places, _) => Some(places.workspace),
            Self::Products(_) => None,
        }
    }
}

/// What cuDNN works in: `bytes`, at least as many as are aligned.
pub(crate) const fn sdpa_workspace(bytes: usize) -> Place {
    Place::workspace("attention", if bytes < 16 { 16 } else { bytes })
}

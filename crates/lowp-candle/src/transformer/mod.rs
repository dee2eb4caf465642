//! [`Transformer`]: GPT and Llama on a CPU, as [`GptConfig`] has them.

mod block;
mod llama;
mod memory;
mod network;
mod ops;
mod recompute;
#[cfg(test)]
mod tests;
mod tied;

use block::{Block, GptBlock};
use candle_core::backprop::GradStore;
use candle_core::{Device, Error, Result, Tensor, Var, bail};
use llama::LlamaBlock;
use lowp_train::Batch;
use lowp_train::Model;
use lowp_transformer::{Arch, GptConfig, Llama};
use ops::{HeadLoss, LOGITS, LayerNorm, LossOptions, Positions, RmsNorm, add_rows, embed};
use recompute::Recomputed;
use std::sync::Arc;
use tied::TiedHead;

use crate::custom_op::with_values;
use crate::{Linear, QuantLinear, WeightSource};
use lowp_format::Phase;

pub use memory::{Needed, NoMemory};
pub use network::Transformer;

/// The model: candle variables, and layers that fetch their weights.
#[derive(Debug)]
pub(crate) struct Gpt {
    config: GptConfig,
    tokens: Arc<dyn WeightSource>,
    /// Learned positions, where the blocks do not turn by rotary ones.
    positions: Option<Var>,
    blocks: Vec<Arc<dyn Block>>,
    /// Gamma, and beta where there is one.
    norm: Vec<Var>,
    /// Where it is not the embedding.
    head: Option<Arc<dyn WeightSource>>,
    threads: usize,
    recompute: bool,
    /// Coefficient of the z-loss.
    pub(crate) z_loss: f32,
}

impl Gpt {
    /// Builds the model over `linears`, one per entry of [`Model::linears`], and `vars` and `transients`, one per
    /// entry of [`Model::vars`] of either use. Products of the head use at most `threads` threads. Where the model is to `recompute`, only the
    /// inputs of blocks are saved, and backward runs the blocks again.
    ///
    /// # Errors
    /// If the number of layers or variables is wrong or the heads do not divide the width.
    pub(crate) fn new(
        config: GptConfig,
        linears: Vec<Box<dyn Linear>>,
        vars: Vec<Var>,
        transients: Vec<Arc<dyn WeightSource>>,
        threads: usize,
        recompute: bool,
    ) -> Result<Self> {
        let GptConfig { dim, heads, .. } = config;
        if linears.len() != config.linears().len() {
            let (found, expected) = (linears.len(), config.linears().len());
            bail!("{found} linear layers for a model that has {expected}");
        }
        if heads == 0 || (config.arch == Arch::Gpt && !dim.is_multiple_of(heads)) {
            bail!("{heads} heads do not divide a width of {dim}");
        }
        let found = vars.len() + transients.len();
        if found != config.vars().len() {
            let expected = config.vars().len();
            bail!("{found} variables for a model that has {expected}");
        }
        let (mut linears, mut vars) = (linears.into_iter(), vars.into_iter());
        let mut transients = transients.into_iter();
        let mut table = || {
            let next = transients.next();
            next.ok_or_else(|| Error::msg("an embedding or a head is missing"))
        };
        let mut var = || {
            let next = vars.next();
            next.ok_or_else(|| Error::msg("a variable is missing"))
        };
        let mut linear = || {
            let next = linears.next();
            next.ok_or_else(|| Error::msg("a linear layer is missing"))
        };
        let tokens = table()?;
        let positions = match config.arch {
            Arch::Gpt => Some(var()?),
            Arch::Llama(_) => None,
        };
        let angles: Arc<[[f32; 2]]> = match config.arch {
            Arch::Gpt => Arc::default(),
            Arch::Llama(llama) => llama.rope.angles(config.head_dim(), config.seq).into(),
        };
        let mut blocks: Vec<Arc<dyn Block>> = Vec::with_capacity(config.layers);
        for _ in 0..config.layers {
            blocks.push(match config.arch {
                Arch::Gpt => Arc::new(GptBlock {
                    config,
                    norms: [[var()?, var()?], [var()?, var()?]],
                    qkv: linear()?,
                    proj: linear()?,
                    fc: linear()?,
                    out: linear()?,
                }),
                Arch::Llama(llama) => {
                    let before = var()?;
                    let qk_norms = match llama.qk_norm() {
                        true => Some([var()?, var()?]),
                        false => None,
                    };
                    Arc::new(LlamaBlock {
                        config,
                        llama,
                        norms: [before, var()?],
                        qk_norms,
                        angles: Arc::clone(&angles),
                        attention: [linear()?, linear()?, linear()?, linear()?],
                        mlp: [linear()?, linear()?, linear()?],
                    })
                }
            });
        }
        let norm = match config.arch {
            Arch::Gpt => vec![var()?, var()?],
            Arch::Llama(_) => vec![var()?],
        };
        let head = match config.arch {
            Arch::Llama(Llama { tied: true, .. }) => None,
            _ => Some(table()?),
        };
        Ok(Self {
            config,
            tokens,
            positions,
            blocks,
            norm,
            head,
            threads,
            recompute,
            z_loss: 0.0,
        })
    }

    /// Sum of the batch's token losses divided by `divisor`, the number of tokens over all ranks.
    ///
    /// # Errors
    /// A batch that is not whole sequences, or what a linear layer reports.
    pub(crate) fn loss(&self, batch: &Batch, divisor: usize) -> Result<Loss> {
        self.loss_with(batch, divisor, true)
    }

    /// The same, without gradients.
    ///
    /// # Errors
    /// As [`Gpt::loss`].
    pub(crate) fn evaluate(&self, batch: &Batch, divisor: usize) -> Result<f32> {
        self.loss_with(batch, divisor, false)?.value()
    }

    fn loss_with(&self, batch: &Batch, divisor: usize, gradients: bool) -> Result<Loss> {
        let embedded = self.embed(&batch.inputs)?;
        let again = self.recompute.then(Recomputed::default);
        let x = self.run(&embedded, batch.first_seen.as_ref(), again.as_ref())?;
        let options = LossOptions {
            divisor,
            z_loss: self.z_loss,
            gradients,
        };
        let (head, tied) = match &self.head {
            Some(head) => (Arc::clone(head), None),
            None => {
                let tied = Arc::new(TiedHead::new(&self.tokens));
                (Arc::clone(&tied) as Arc<dyn WeightSource>, Some(tied))
            }
        };
        let loss = HeadLoss::new(head, batch.targets.clone(), options, self.threads, LOGITS);
        let value = x.apply_op1(loss)?;
        Ok(Loss {
            value,
            again,
            ids: batch.inputs.clone(),
            embedded,
            tokens: Arc::clone(&self.tokens),
            tied,
            positions: self.positions.clone().map(|var| (var, self.config.seq)),
        })
    }

    /// Next-token logits, `[tokens, vocabulary]`, for whole sequences.
    ///
    /// # Errors
    /// As [`Gpt::loss`].
    pub(crate) fn logits(&self, inputs: &Arc<[u32]>) -> Result<Tensor> {
        let embedded = self.embed(inputs)?;
        let x = self.run(&embedded, None, None)?;
        let head = self.head.as_ref().unwrap_or(&self.tokens);
        QuantLinear::new(Arc::clone(head), self.threads).forward(&x)
    }

    /// What the first block reads, `[tokens, dim]`, for whole sequences: where the gradients of layers end.
    fn embed(&self, inputs: &[u32]) -> Result<Var> {
        let seq = self.config.seq;
        if inputs.is_empty() || !inputs.len().is_multiple_of(seq) {
            bail!("{} tokens are not whole sequences of {seq}", inputs.len());
        }
        let (_, dim) = self.tokens.shape();
        let mut x = Vec::new();
        self.tokens.with_weight(Phase::Forward, &mut |table| {
            x = match &self.positions {
                Some(positions) => with_values([positions], "embedding", |[positions]| {
                    embed(inputs, table, dim, Some(Positions { positions, seq }))
                })?,
                None => embed(inputs, table, dim, None)?,
            };
            Ok(())
        })?;
        Var::from_vec(x, (inputs.len(), dim), &Device::Cpu)
    }

    /// What the head reads, `[tokens, dim]`, with blocks that backward runs `again`.
    fn run(
        &self,
        embedded: &Tensor,
        first: Option<&Arc<[u32]>>,
        again: Option<&Recomputed>,
    ) -> Result<Tensor> {
        let mut x = embedded.clone();
        for block in &self.blocks {
            x = match again {
                Some(again) => again.forward(block, &x, first)?,
                None => block.forward(&x, first)?,
            };
        }
        match self.norm.as_slice() {
            [gamma, beta] => x.apply_op3(gamma, beta, LayerNorm::default()),
            [gamma] => x.apply_op2(gamma, RmsNorm::new(self.config.sizes().eps())),
            _ => bail!("a model without a last norm"),
        }
    }
}

/// The loss of a batch, from which gradients are made.
#[derive(Debug)]
pub(crate) struct Loss {
    value: Tensor,
    again: Option<Recomputed>,
    ids: Arc<[u32]>,
    embedded: Var,
    tokens: Arc<dyn WeightSource>,
    /// The head, where it is the embedding.
    tied: Option<Arc<TiedHead>>,
    /// Positions and how many there are in a sequence.
    positions: Option<(Var, usize)>,
}

impl Loss {
    /// The value.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn value(&self) -> Result<f32> {
        self.value.to_scalar()
    }

    /// The gradients of all variables; those of linear layers, of the embedding and of the head go to their sinks.
    ///
    /// # Errors
    /// What a linear layer reports.
    pub(crate) fn backward(&self) -> Result<GradStore> {
        let mut store = self.value.backward()?;
        if let Some(again) = &self.again {
            again.add_gradients(&mut store)?;
        }
        self.embedding_gradients(&mut store)?;
        Ok(store)
    }

    fn embedding_gradients(&self, store: &mut GradStore) -> Result<()> {
        let Some(dx) = store.remove(&self.embedded) else {
            bail!("the embedding got no gradient");
        };
        let (vocab, dim) = self.tokens.shape();
        let sums = match &self.tied {
            Some(tied) => Some(tied.take_gradient()?),
            None => None,
        };
        let mut sums = sums.unwrap_or_else(|| vec![0.0; vocab * dim]);
        let rows = self.ids.iter().map(|&id| id as usize);
        with_values([&dx], "embedding", |[dx]| {
            add_rows(dx, dim, rows, &mut sums);
            self.tokens.sink_gradient(sums)?;
            let Some((positions, seq)) = &self.positions else {
                return Ok(());
            };
            let mut sums = vec![0.0; positions.elem_count()];
            add_rows(dx, dim, (0..*seq).cycle(), &mut sums);
            let sums = Tensor::from_vec(sums, positions.shape(), positions.device())?;
            store.insert(positions, sums);
            Ok(())
        })
    }
}

//! [`Transformer`]: GPT and Llama on a CPU, as [`GptConfig`] has them.

mod block;
mod llama;
mod memory;
mod network;
mod ops;
mod recompute;
#[cfg(test)]
mod tests;

use block::{Block, GptBlock};
use candle_core::backprop::GradStore;
use candle_core::{Error, Result, Tensor, Var, bail};
use llama::LlamaBlock;
use lowp_train::Batch;
use lowp_train::Model;
use lowp_transformer::{Arch, GptConfig, Llama};
use ops::{Dense, Embedding, HeadLoss, LOGITS, LayerNorm, LossOptions, RmsNorm};
use recompute::Recomputed;
use std::sync::Arc;

use crate::Linear;

pub use memory::{Needed, NoMemory, machine};
pub use network::Transformer;

/// The model: candle variables, and linear layers that fetch their weights.
#[derive(Debug)]
pub(crate) struct Gpt {
    config: GptConfig,
    tokens: Var,
    /// Learned positions, where the blocks do not turn by rotary ones.
    positions: Option<Var>,
    blocks: Vec<Arc<dyn Block>>,
    /// Gamma, and beta where there is one.
    norm: Vec<Var>,
    head: Var,
    threads: usize,
    recompute: bool,
    /// Coefficient of the z-loss.
    pub(crate) z_loss: f32,
}

impl Gpt {
    /// Builds the model over `linears`, one per entry of [`Model::linears`], and `vars`, one per
    /// entry of [`Model::vars`]. Products of the head use at most `threads` threads. Where the model is to `recompute`, only the
    /// inputs of blocks are saved, and backward runs the blocks again.
    ///
    /// # Errors
    /// If the number of layers or variables is wrong or the heads do not divide the width.
    pub(crate) fn new(
        config: GptConfig,
        linears: Vec<Box<dyn Linear>>,
        vars: Vec<Var>,
        (threads, recompute): (usize, bool),
    ) -> Result<Self> {
        let GptConfig { dim, heads, .. } = config;
        if linears.len() != config.linears().len() {
            let (found, expected) = (linears.len(), config.linears().len());
            bail!("{found} linear layers for a model that has {expected}");
        }
        if heads == 0 || (config.arch == Arch::Gpt && !dim.is_multiple_of(heads)) {
            bail!("{heads} heads do not divide a width of {dim}");
        }
        if vars.len() != config.vars().len() {
            let (found, expected) = (vars.len(), config.vars().len());
            bail!("{found} variables for a model that has {expected}");
        }
        let (mut linears, mut vars) = (linears.into_iter(), vars.into_iter());
        let mut var = || {
            let next = vars.next();
            next.ok_or_else(|| Error::msg("a variable is missing"))
        };
        let mut linear = || {
            let next = linears.next();
            next.ok_or_else(|| Error::msg("a linear layer is missing"))
        };
        let tokens = var()?;
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
            Arch::Llama(Llama { tied: true, .. }) => tokens.clone(),
            _ => var()?,
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
        self.loss_with(batch, (divisor, true))
    }

    /// The same, without gradients.
    ///
    /// # Errors
    /// As [`Gpt::loss`].
    pub(crate) fn evaluate(&self, batch: &Batch, divisor: usize) -> Result<f32> {
        self.loss_with(batch, (divisor, false))?.value()
    }

    fn loss_with(&self, batch: &Batch, (divisor, gradients): (usize, bool)) -> Result<Loss> {
        let (x, again) = self.run(&batch.inputs, batch.first_seen.as_ref())?;
        let options = LossOptions {
            divisor,
            z_loss: self.z_loss,
            gradients,
        };
        let work = (self.threads, LOGITS, self.config.vocab);
        let loss = HeadLoss::new(batch.targets.clone(), options, work);
        let value = x.apply_op2(&self.head, loss)?;
        Ok(Loss { value, again })
    }

    /// Next-token logits, `[tokens, vocabulary]`, for whole sequences.
    ///
    /// # Errors
    /// As [`Gpt::loss`].
    pub(crate) fn logits(&self, inputs: &Arc<[u32]>) -> Result<Tensor> {
        let threads = self.threads;
        self.run(inputs, None)?
            .0
            .apply_op2(&self.head, Dense { threads })
    }

    /// What the head reads, `[tokens, dim]`, for whole sequences, and what backward runs again.
    fn run(
        &self,
        inputs: &Arc<[u32]>,
        first: Option<&Arc<[u32]>>,
    ) -> Result<(Tensor, Option<Recomputed>)> {
        let seq = self.config.seq;
        if inputs.is_empty() || !inputs.len().is_multiple_of(seq) {
            bail!("{} tokens are not whole sequences of {seq}", inputs.len());
        }
        let again = self.recompute.then(Recomputed::default);
        let mut x = match &self.positions {
            Some(positions) => {
                let ids = inputs.clone();
                self.tokens.apply_op2(positions, Embedding { ids, seq })?
            }
            None => {
                let ids = Tensor::from_slice(inputs, inputs.len(), self.tokens.device())?;
                self.tokens.index_select(&ids, 0)?
            }
        };
        for block in &self.blocks {
            x = match &again {
                Some(again) => again.forward(block, &x, first)?,
                None => block.forward(&x, first)?,
            };
        }
        let x = match self.norm.as_slice() {
            [gamma, beta] => x.apply_op3(gamma, beta, LayerNorm::default())?,
            [gamma] => x.apply_op2(gamma, RmsNorm::new(self.config.sizes().eps()))?,
            _ => bail!("a model without a last norm"),
        };
        Ok((x, again))
    }
}

/// The loss of a batch, from which gradients are made.
#[derive(Debug)]
pub(crate) struct Loss {
    value: Tensor,
    again: Option<Recomputed>,
}

impl Loss {
    /// The value.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn value(&self) -> Result<f32> {
        self.value.to_scalar()
    }

    /// The gradients of all variables; those of linear layers go to their sinks.
    ///
    /// # Errors
    /// What a linear layer reports.
    pub(crate) fn backward(&self) -> Result<GradStore> {
        let mut store = self.value.backward()?;
        if let Some(again) = &self.again {
            again.add_gradients(&mut store)?;
        }
        Ok(store)
    }
}

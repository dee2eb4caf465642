//! [`Transformer`]: a whole model over a batch of whole sequences.

#![expect(
    unsafe_code,
    reason = "gives cuBLASLt addresses of buffers that were made for the product"
)]

mod logits;

use std::sync::Arc;

use half::bf16;
use lowp_format::{Phase, Recipe, Shape};
use lowp_fsdp::ShardedModel;
use lowp_gemm::{Dtype, GemmDesc, GemmKind, OperandDesc, OperandPtr, Scalars};
use lowp_kernels::{Backend, Cuda, CudaBuffer, Pending};

use super::TransformerError;
use super::batch::{Batch, Tokens};
use super::block::Layer;
use super::documents::Documents;
use super::gemms::Gemms;
use super::linear::{Shared, Span};
use super::norm::{Norm, NormVars, StreamInput, f32_gradient, var_buffer};
use super::ops::{CrossEntropy, EmbeddingSizes, Ops};
use super::place::{Arena, at};
use super::sdpa::has_cudnn;
use super::trace::{Profile, Trace};
use super::transient::Transient;
use crate::known::Known;
use crate::memory::{MicroBatch, ModelMemory};
use crate::places::{BF16, CudnnPasses, DocumentPlaces, ModelPlaces};
use crate::sizes::{Block, LlamaSizes, Sizes};

type Values = CudaBuffer<bf16>;
type Done<T = ()> = Result<T, TransformerError>;

/// What the head is.
#[derive(Debug)]
enum Head {
    /// A variable of its own.
    Own(Transient),
    /// The embedding. The gradient of the head waits here for that of the embedding.
    Tied(CudaBuffer<f32>),
}

/// A model that trains on one GPU's part of each micro-batch. Its weights and variables are those of a [`ShardedModel`].
#[derive(Debug)]
pub struct Transformer<R: Recipe> {
    shared: Arc<Shared>,
    sizes: Sizes,
    tokens: usize,
    batch: Batch,
    layers: Vec<Layer<R>>,
    norm: Norm,
    /// The embedding.
    table: Transient,
    /// Positions, with the variable that they are.
    positions: Option<(usize, CudaBuffer<f32>)>,
    head: Head,
    /// The head in bf16.
    head_values: Values,
    /// The version of the head that it was rounded from.
    head_version: Option<u64>,
    /// Coefficient of the z-loss.
    z_loss: f32,
    /// Micro-batches of a step.
    micro_batches: usize,
    /// The gradient of the residual stream.
    dx: Values,
    branch: Values,
    losses: CudaBuffer<f32>,
    total: CudaBuffer<f32>,
}

impl<R: Recipe> Transformer<R> {
    /// The model of these sizes over `model`'s weights and variables.
    ///
    /// # Errors
    /// Sizes or a recipe that it cannot take, no cuBLASLt, or no room.
    pub fn new(
        cuda: &Cuda,
        model: &ShardedModel<Cuda, R>,
        sizes: &Sizes,
        span: MicroBatch,
    ) -> Done<Self> {
        sizes.check().map_err(TransformerError::Unsupported)?;
        let MicroBatch {
            sequences,
            first_token,
            ..
        } = span;
        let Sizes {
            layers, seq, block, ..
        } = *sizes;
        let tokens = span.tokens(seq).map_err(TransformerError::Unsupported)?;
        let places = ModelPlaces::new(sizes, tokens);
        let shared = Arc::new(shared(cuda, sizes, span, tokens, places)?);
        check_shapes(sizes, model)?;
        let positions = match block {
            Block::Gpt => Some((1, var_buffer(model, 1)?.clone())),
            Block::Llama(_) => None,
        };
        let angles = match block {
            Block::Gpt => None,
            Block::Llama(LlamaSizes { head_dim, rope, .. }) => {
                Some(cuda.upload(rope.angles(head_dim, seq).as_flattened())?)
            }
        };
        // The last norm, and the head after it, unless that is the embedding.
        let last = model.var_shapes().len().saturating_sub(1);
        let (gamma, beta, head_at) = match block {
            Block::Gpt => (last.saturating_sub(2), true, Some(last)),
            Block::Llama(LlamaSizes { tied: true, .. }) => (last, false, None),
            Block::Llama(_) => (last.saturating_sub(1), false, Some(last)),
        };
        let norm = NormVars {
            gamma,
            beta,
            eps: sizes.eps(),
        };
        let head = match (head_at, &places.tied_grad) {
            (Some(at), None) => Head::Own(Transient::new(&shared, model, at)?),
            (None, Some(place)) => Head::Tied(shared.arena.sums(place)?),
            _ => {
                let why = "memory is planned for another kind of head";
                return Err(TransformerError::Unsupported(why.to_owned()));
            }
        };
        let dx = shared.arena.values(&places.dx)?;
        let part = Span {
            tokens,
            first: first_token,
        };
        let layer = |index| Layer::new(&shared, model, sizes, index, part, &dx, angles.as_ref());
        Ok(Self {
            sizes: *sizes,
            tokens,
            batch: Batch::new(&shared, sequences, seq)?,
            layers: (0..layers).map(layer).collect::<Result<_, _>>()?,
            norm: Norm::new(&shared, model, norm, &places.norm)?,
            table: Transient::new(&shared, model, 0)?,
            positions,
            head,
            head_values: shared.arena.values(&places.head)?,
            head_version: None,
            z_loss: 0.0,
            micro_batches: 1,
            branch: shared.arena.values(&places.branch)?,
            losses: shared.arena.sums(&places.losses)?,
            total: shared.arena.sums(&places.total)?,
            dx,
            shared,
        })
    }

    /// The same with a z-loss of this coefficient in training.
    #[must_use]
    pub fn with_z_loss(self, coefficient: f32) -> Self {
        Self {
            z_loss: coefficient,
            ..self
        }
    }

    /// The same for steps of so many micro-batches: each but the last starts the gather of the embedding for the one after it. A step that ends earlier has
    /// gathered one more than it used.
    #[must_use]
    pub fn with_micro_batches(self, micro_batches: usize) -> Self {
        Self {
            micro_batches,
            ..self
        }
    }

    /// The coefficient of its z-loss.
    pub const fn z_loss(&self) -> f32 {
        self.z_loss
    }

    /// Tokens of a micro-batch.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes of device memory that the model has beside its parameters: activations, gradients of them, operands, what products and
    /// attention work in. Tables of plans and batches are not counted.
    pub fn bytes(&self) -> u64 {
        self.memory().total()
    }

    /// The same by what it is for.
    pub fn memory(&self) -> ModelMemory {
        self.shared.arena.memory()
    }

    /// Which passes of attention run by cuDNN, and why others run as plain products.
    pub fn attention(&self) -> (CudnnPasses, Option<String>) {
        self.shared.attention()
    }

    /// Which products run in each linear layer: forward, input gradient, weight gradient.
    pub fn products(&self) -> Vec<[GemmKind; 3]> {
        self.layers.iter().flat_map(Layer::products).collect()
    }

    /// Runs forward and backward on a micro-batch: adds its token losses divided by `divisor` to the loss, and sends all gradients of the
    /// same to their owners. [`ShardedModel::finish_micro_batch`] follows.
    ///
    /// # Errors
    /// A batch of another size or with tokens outside of the vocabulary, or a rank that failed.
    pub fn train(
        &mut self,
        model: &ShardedModel<Cuda, R>,
        batch: Tokens<'_>,
        divisor: usize,
    ) -> Done {
        self.forward(batch)?;
        // Enqueued before the products of the head, so that they hide the gather.
        if let Some(last) = self.layers.last() {
            last.prefetch_backward()?;
        }
        self.loss(Some(model), 1.0 / divisor as f32)?;
        self.backward(model)
    }

    /// Adds the token losses of a micro-batch divided by `divisor` to the loss.
    ///
    /// # Errors
    /// As [`Transformer::train`].
    pub fn evaluate(&mut self, batch: Tokens<'_>, divisor: usize) -> Done {
        self.forward(batch)?;
        self.loss(None, 1.0 / divisor as f32)
    }

    /// The loss since the last call, after all work of the stream: waits for the device.
    ///
    /// # Errors
    /// The device failed.
    pub fn take_loss(&mut self) -> Done<f64> {
        let cuda = &self.shared.cuda;
        let loss = cuda.download(&self.total)?;
        cuda.clear(&self.total)?;
        Ok(loss.first().copied().map_or(f64::NAN, f64::from))
    }

    /// The same as [`Transformer::take_loss`], as it is on its way: waits for nothing.
    ///
    /// # Errors
    /// The device failed.
    pub fn start_loss(&mut self) -> Done<Pending<f32>> {
        let cuda = &self.shared.cuda;
        let loss = cuda.start_read(&self.total, 0..self.total.len())?;
        cuda.clear(&self.total)?;
        Ok(loss)
    }

    /// Begins to measure what the device spends its time on.
    ///
    /// # Errors
    /// The device failed.
    pub fn start_profile(&self) -> Done {
        Ok(self.shared.trace.start()?)
    }

    /// Ends it, with the optimizer's step as the last work.
    ///
    /// # Errors
    /// The device failed.
    pub fn take_profile(&self) -> Done<Profile> {
        let trace = &self.shared.trace;
        trace.mark(|| "optimizer".to_owned())?;
        Ok(trace.take()?)
    }

    fn upload(&self, batch: Tokens<'_>) -> Done {
        let Shared {
            cuda,
            ops,
            documents,
            trace,
            ..
        } = &*self.shared;
        self.batch.upload(cuda, batch, self.sizes.vocab)?;
        if let Some(documents) = documents {
            let of_tokens = [self.tokens, self.sizes.seq];
            documents.upload(cuda, ops, of_tokens, batch.first_seen)?;
        }
        Ok(trace.mark(|| "tokens to the device".to_owned())?)
    }

    fn size(&self) -> [usize; 2] {
        [self.tokens, self.sizes.dim]
    }

    fn forward(&mut self, batch: Tokens<'_>) -> Done {
        let Sizes {
            dim, seq, vocab, ..
        } = self.sizes;
        let documents = self.shared.documents.is_some();
        batch.check(self.tokens, vocab, documents)?;
        // In the order of their use, before work that they need not wait for.
        self.table.prefetch()?;
        if let Some(first) = self.layers.first() {
            first.prefetch(Phase::Forward)?;
        }
        self.upload(batch)?;
        let ops = &self.shared.ops;
        let first = self
            .layers
            .first()
            .map_or(&self.norm, |layer| &layer.norms[0]);
        let positions = self.positions.as_ref().map(|(_, positions)| positions);
        self.table.with_values(|table| {
            let sizes = EmbeddingSizes {
                tokens: self.tokens,
                dim,
                seq,
                vocab,
            };
            ops.embedding(sizes, &self.batch.ids, table, positions, &first.x)
        })?;
        let head = match &self.head {
            Head::Own(head) => head,
            Head::Tied(_) => &self.table,
        };
        let version = head.version()?;
        let rounded = version.is_some() && self.head_version == version;
        let mut stream: Option<StreamInput<'_>> = None;
        for (index, layer) in self.layers.iter().enumerate() {
            let next = || match self.layers.get(index + 1) {
                Some(next) => next.prefetch(Phase::Forward),
                None if rounded => Ok(()),
                None => head.prefetch(),
            };
            layer.forward(stream, &self.branch, next)?;
            stream = Some(StreamInput {
                x: &layer.norms[1].x,
                branch: &self.branch,
            });
        }
        let h = self.shared.arena.values(&self.shared.places.last)?;
        self.norm.forward(ops, self.size(), stream, &h)?;
        if !rounded {
            head.with_values(|head| ops.narrow(head, &self.head_values, vocab * dim))?;
            self.head_version = version;
        }
        Ok(())
    }

    /// Adds the losses of what forward left and, for `model`, makes the gradients of the head and of what it reads. Logits are there for
    /// some tokens at a time.
    fn loss(&self, model: Option<&ShardedModel<Cuda, R>>, scale: f32) -> Done {
        let Sizes { dim, vocab, .. } = self.sizes;
        let Shared {
            ops,
            arena,
            gemms,
            places,
            ..
        } = &*self.shared;
        let h = arena.values(&places.last)?;
        let logits = arena.sums(&places.logits)?;
        let gradients = match model {
            Some(model) => {
                let head = match &self.head {
                    Head::Own(head) => f32_gradient(model, head.index)?,
                    Head::Tied(gradient) => gradient.clone(),
                };
                at(&head, vocab * dim)?;
                Some((
                    arena.values(&places.dlogits)?,
                    arena.values(&places.dh)?,
                    head,
                ))
            }
            None => None,
        };
        for tokens in self.parts() {
            let (first, rows) = (tokens.start, tokens.len());
            let read = self.enqueue_logits(tokens.clone(), &h, &logits)?;
            let dlogits = gradients.as_ref().map(|(dlogits, ..)| dlogits);
            ops.cross_entropy(CrossEntropy {
                tokens,
                vocab,
                logits: &logits,
                targets: &self.batch.targets,
                losses: &self.losses,
                gradients: dlogits,
                scale,
                z_loss: self.z_loss,
            })?;
            let Some((dlogits, dh, head)) = &gradients else {
                continue;
            };
            let desc = dense([vocab, dim, rows], [false, false], Dtype::F32);
            let sums = Scalars::Host {
                alpha: 1.0,
                beta: if first == 0 { 0.0 } else { 1.0 },
            };
            // SAFETY: the transpose of `[rows, vocab]` by rows of `[tokens, dim]`.
            unsafe { gemms.run(&desc, [ptr(dlogits), read], head.pointer(), sums) }?;
            let desc = dense([rows, dim, vocab], [true, false], Dtype::Bf16);
            let operands = [ptr(dlogits), ptr(&self.head_values)];
            let to = dh.pointer() + (BF16 * first * dim) as u64;
            // SAFETY: `[rows, vocab]` by `[vocab, dim]`, into rows of `[tokens, dim]`.
            unsafe { gemms.run(&desc, operands, to, Scalars::ONE) }?;
        }
        if let (Some(model), Head::Own(head)) = (model, &self.head) {
            model.push_var_gradient(head.index)?;
        }
        ops.add_losses(&self.losses, self.tokens, scale, &self.total)
    }

    fn backward(&self, model: &ShardedModel<Cuda, R>) -> Done {
        let Sizes {
            dim, seq, vocab, ..
        } = self.sizes;
        let Shared { ops, arena, .. } = &*self.shared;
        let (tokens, dx) = (self.tokens, &self.dx);
        let dh = arena.values(&self.shared.places.dh)?;
        self.norm
            .backward(&self.shared, model, self.size(), &dh, None, dx)?;
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let next = || match index
                .checked_sub(1)
                .and_then(|before| self.layers.get(before))
            {
                Some(before) => before.prefetch_backward(),
                // Its memory is idle until the next micro-batch; after the last one it is written.
                None if model.micro_batches() + 1 < self.micro_batches => self.table.prefetch(),
                None => Ok(()),
            };
            layer.forward_again(&self.branch)?;
            layer.backward(model, dx, next)?;
        }
        let grad = f32_gradient(model, self.table.index)?;
        let of_head = match &self.head {
            Head::Own(_) => None,
            Head::Tied(gradient) => Some(gradient),
        };
        let Batch { starts, order, .. } = &self.batch;
        ops.sum_rows(dx, starts, order, of_head, &grad, [tokens, vocab, dim])?;
        model.push_var_gradient(self.table.index)?;
        if let Some((index, _)) = self.positions {
            let grad = f32_gradient(model, index)?;
            let [starts, order] = &self.batch.by_position;
            ops.sum_rows(dx, starts, order, None, &grad, [tokens, seq, dim])?;
            model.push_var_gradient(index)?;
        }
        Ok(())
    }
}

/// What the parts of a model have in common.
fn shared(
    cuda: &Cuda,
    sizes: &Sizes,
    span: MicroBatch,
    tokens: usize,
    places: ModelPlaces,
) -> Done<Shared> {
    let trace = Arc::new(Trace::new(cuda));
    let arena = Arena::new(cuda, span.recompute);
    let documents = span.documents.then(|| {
        let mask = span.cudnn != CudnnPasses::None && has_cudnn();
        Documents::new(&arena, &DocumentPlaces::new(sizes, tokens, mask))
    });
    Ok(Shared {
        cuda: cuda.clone(),
        ops: Ops::new(cuda, &trace)?,
        gemms: Gemms::new(cuda, arena.codes(&places.products)?, &trace)?,
        trace,
        arena,
        places,
        capability: cuda.capability()?,
        cudnn: span.cudnn,
        agree_amaxes: span.agree_amaxes,
        prefetch: span.prefetch,
        sdpa: Known::default(),
        documents: documents.transpose()?,
    })
}

/// Checks that `model` has the weights and variables of these sizes.
fn check_shapes<R: Recipe>(sizes: &Sizes, model: &ShardedModel<Cuda, R>) -> Done {
    let wrong = |text: String| Err(TransformerError::Unsupported(text));
    let linears = sizes.linears();
    for (index, &[rows, cols]) in linears.iter().enumerate() {
        let shape = model.weight(index).map(|weight| weight.full_shape());
        if shape != Some(Shape::new(rows, cols)) {
            let found = shape.map_or_else(|| "no weight".to_owned(), |shape| shape.to_string());
            return wrong(format!(
                "linear layer {index} is {rows}x{cols}, and the model has {found}"
            ));
        }
    }
    if model.weight(linears.len()).is_some() {
        return wrong(format!(
            "the model has more than {} linear layers",
            linears.len()
        ));
    }
    let (vars, found) = (sizes.vars(), model.var_shapes());
    let lens: Vec<usize> = found.map(|(_, shape)| shape.iter().product()).collect();
    if lens != vars {
        return wrong(format!(
            "variables of {vars:?} values, and the model has {lens:?}"
        ));
    }
    Ok(())
}

/// A product of plain matrices.
fn dense(sizes: [usize; 3], k_inner: [bool; 2], out: Dtype) -> GemmDesc {
    let operands = k_inner.map(|k_inner| OperandDesc::plain(Dtype::Bf16, k_inner));
    GemmDesc::new(sizes, operands, out)
}

fn ptr(buffer: &Values) -> OperandPtr {
    OperandPtr::values(buffer.pointer())
}

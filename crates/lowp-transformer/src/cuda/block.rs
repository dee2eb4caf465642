//! [`Layer`]: one transformer block, forward and backward.

use std::sync::Arc;

use half::bf16;
use lowp_format::{Phase, Recipe};
use lowp_fsdp::ShardedModel;
use lowp_gemm::GemmKind;
use lowp_gemm::table::Pass;
use lowp_kernels::{Backend, Cuda, CudaBuffer};

use super::TransformerError;
use super::attention::{Attention, Rows};
use super::decodes::Decodes;
use super::head_norms::{HeadNorms, NewHeadNorm};
use super::linear::{Linear, LinearMemory, Shared, Span};
use super::norm::{Norm, NormVars, StreamInput, f32_gradient, var_buffer};
use super::operand::CastOperand;
use super::ops::Heads;
use super::place::at;
use crate::places::BlockPlaces;
use crate::sizes::{Block, LlamaSizes, Sizes};

type Values = CudaBuffer<bf16>;
type Done<T = ()> = Result<T, TransformerError>;

/// The products of a block.
#[derive(Debug)]
enum Linears<R: Recipe> {
    Gpt {
        /// `qkv`, `proj`, `fc` and `out`.
        linears: Box<[Linear<R>; 4]>,
        /// What `fc` makes, and where the gradient of it is.
        a: Values,
        da: Values,
    },
    Llama {
        /// Query, key, value and output.
        attention: Box<[Linear<R>; 4]>,
        /// Gate, up and down.
        mlp: Box<[Linear<R>; 3]>,
        gate: Values,
        up: Values,
        /// The gradient of what both make.
        dg: Values,
    },
}

/// As many layers as a block has there.
fn all<R: Recipe, const N: usize>(linears: Vec<Linear<R>>) -> Done<Box<[Linear<R>; N]>> {
    let all: Result<[_; N], _> = linears.try_into();
    all.map(Box::new).map_err(|linears: Vec<_>| {
        let text = format!("{} linear layers where a block has {N}", linears.len());
        TransformerError::Unsupported(text)
    })
}

/// The linear layers of a block in the order of forward, and where the gradients of their outputs are.
struct NewLinears<R: Recipe> {
    linears: Vec<Linear<R>>,
    gradients: Vec<Values>,
}

impl<R: Recipe> NewLinears<R> {
    /// Those of block `index`. `mlp` is what its MLP makes, and `dx` where the gradient of the residual stream is.
    fn new(
        shared: &Arc<Shared>,
        model: &ShardedModel<Cuda, R>,
        index: usize,
        span: Span,
        places: &BlockPlaces,
        mlp: &[Values],
        dx: &Values,
    ) -> Done<Self> {
        let mut linears: Vec<Linear<R>> = Vec::new();
        let mut gradients = Vec::new();
        for (at, (place, names)) in places.gradients.iter().zip(places.operands).enumerate() {
            let gradient = match place {
                Some(place) => shared.arena.values(place)?,
                None => dx.clone(),
            };
            gradients.push(gradient.clone());
            let layer = places.gradients.len() * index + at;
            let others = linears.iter().zip(places.operands);
            let readers = others.filter(|(_, other)| other.reads == names.reads);
            let readers = readers.map(|(linear, _)| linear);
            let memory = LinearMemory {
                names,
                gradient,
                before: mlp.first(),
                after: mlp.last(),
            };
            let made = Linear::new(shared, model, layer, span, memory, readers)?;
            linears.push(made);
        }
        Ok(Self { linears, gradients })
    }
}

impl<R: Recipe> Linears<R> {
    fn new(block: Block, new: NewLinears<R>, mlp: &[Values]) -> Done<Self> {
        let NewLinears {
            mut linears,
            gradients,
        } = new;
        Ok(match block {
            Block::Gpt => Self::Gpt {
                linears: all(linears)?,
                a: mlp[0].clone(),
                da: gradients[2].clone(),
            },
            Block::Llama(_) => {
                let of_mlp = linears.split_off(4);
                Self::Llama {
                    attention: all(linears)?,
                    mlp: all(of_mlp)?,
                    gate: mlp[0].clone(),
                    up: mlp[1].clone(),
                    dg: mlp[2].clone(),
                }
            }
        })
    }
}

/// What attention makes: heads that fill their rows.
fn output_heads(sizes: &Sizes) -> Heads {
    Heads {
        count: sizes.heads,
        groups: 1,
        dim: sizes.head_dim(),
        seq: sizes.seq,
        stride: sizes.heads_width(),
        first: 0,
        angles: None,
    }
}

/// Queries, keys and values; `angles` turn queries and keys.
fn input_heads(sizes: &Sizes, angles: Option<&CudaBuffer<f32>>) -> [Heads; 3] {
    let heads = output_heads(sizes);
    match sizes.block {
        Block::Gpt => [0, 1, 2].map(|at| Heads {
            stride: 3 * sizes.dim,
            first: at * sizes.dim,
            ..heads.clone()
        }),
        Block::Llama(LlamaSizes { kv_heads, .. }) => {
            let values = Heads {
                count: kv_heads,
                groups: sizes.heads / kv_heads.max(1),
                stride: kv_heads * sizes.head_dim(),
                ..heads.clone()
            };
            let [queries, keys] = [heads, values.clone()].map(|heads| Heads {
                angles: angles.cloned(),
                ..heads
            });
            [queries, keys, values]
        }
    }
}

/// The norms of the residual stream in block `index`: before attention, and before the MLP.
fn norm_vars(sizes: &Sizes, index: usize) -> [NormVars; 2] {
    let (beta, gammas) = match sizes.block {
        Block::Gpt => (true, [2 + 4 * index, 4 + 4 * index]),
        Block::Llama(LlamaSizes { qk_norm, .. }) => {
            // Norms of queries and keys lie between those of the stream.
            let between = if qk_norm { 2 } else { 0 };
            let first = 1 + (2 + between) * index;
            (false, [first, first + 1 + between])
        }
    };
    gammas.map(|gamma| NormVars {
        gamma,
        beta,
        eps: sizes.eps(),
    })
}

/// A block of a model.
#[derive(Debug)]
pub(super) struct Layer<R: Recipe> {
    shared: Arc<Shared>,
    size: [usize; 2],
    pub(super) norms: [Norm; 2],
    attention: Attention,
    /// Queries, keys and values in their rows.
    rows: Vec<Values>,
    /// Of queries and keys, where they have norms.
    head_norms: Option<HeadNorms>,
    linears: Linears<R>,
    /// Of their weights.
    decodes: Vec<Decodes>,
}

impl<R: Recipe> Layer<R> {
    /// Block `index` of `model`, over the tokens of `span`. `dx` is where the gradient of the residual stream is in backward.
    pub(super) fn new(
        shared: &Arc<Shared>,
        model: &ShardedModel<Cuda, R>,
        sizes: &Sizes,
        index: usize,
        span: Span,
        dx: &Values,
        angles: Option<&CudaBuffer<f32>>,
    ) -> Done<Self> {
        let tokens = span.tokens;
        let arena = &shared.arena;
        let places = BlockPlaces::new(sizes, tokens);
        let mlp = places.mlp.iter().map(|place| arena.values(place));
        let mlp = mlp.collect::<Result<Vec<_>, _>>()?;
        let linears = NewLinears::new(shared, model, index, span, &places, &mlp, dx)?;
        let decodes = Decodes::of_block(&linears.linears.iter().collect::<Vec<_>>())?;
        let linears = Linears::new(sizes.block, linears, &mlp)?;
        let [mut q, mut k, v] = input_heads(sizes, angles);
        let turned = places.head_norms.map(|norms| {
            let heads = [q.clone(), k.clone()];
            // The norms turn them.
            (q.angles, k.angles) = (None, None);
            (norms, heads)
        });
        let (attention, kept) =
            Attention::new(shared, sizes, tokens, [q, k, v], output_heads(sizes))?;
        let [first, second] = norm_vars(sizes, index);
        let head_norms = match (turned, places.normed(&kept).as_slice()) {
            (Some((of, [q_heads, k_heads])), &[q, k]) => {
                let norm = |var, heads, made| -> Done<NewHeadNorm> {
                    Ok(NewHeadNorm {
                        var,
                        gamma: var_buffer(model, var)?.clone(),
                        eps: first.eps,
                        heads,
                        made,
                    })
                };
                let norms = [
                    norm(first.gamma + 1, q_heads, q)?,
                    norm(first.gamma + 2, k_heads, k)?,
                ];
                Some(HeadNorms::new(shared, tokens, norms, &of.sums)?)
            }
            _ => None,
        };
        let rows = places.rows(&kept).into_iter();
        let rows = rows.map(|place| arena.values(&place));
        let rows = rows.collect::<Result<_, _>>()?;
        let norms = [
            Norm::new(shared, model, first, &places.norms[0])?,
            Norm::new(shared, model, second, &places.norms[1])?,
        ];
        Ok(Self {
            shared: Arc::clone(shared),
            size: [tokens, sizes.dim],
            norms,
            attention,
            rows,
            head_norms,
            linears,
            decodes,
        })
    }

    /// Queries, keys and values.
    fn rows(&self) -> [Rows<'_>; 3] {
        // One buffer, or three.
        let last = self.rows.len() - 1;
        [0, 1, 2].map(|at| Rows {
            values: &self.rows[at.min(last)],
        })
    }

    /// What attention reads of them.
    fn seen(&self) -> Done<[Rows<'_>; 3]> {
        match &self.head_norms {
            Some(norms) => norms.forward(&self.shared, self.rows()),
            None => Ok(self.rows()),
        }
    }

    /// Its linear layers, in the order of forward.
    pub(super) fn linears(&self) -> Vec<&Linear<R>> {
        match &self.linears {
            Linears::Gpt { linears, .. } => linears.iter().collect(),
            Linears::Llama { attention, mlp, .. } => attention.iter().chain(&**mlp).collect(),
        }
    }

    /// Which products run in each layer.
    pub(super) fn products(&self) -> Vec<[GemmKind; 3]> {
        self.linears().into_iter().map(Linear::products).collect()
    }

    /// Runs on `input`, the residual stream and what is added to it, or on what its first norm keeps; what it adds to the residual
    /// stream that its second norm keeps is `branch`. `next` starts the gathers of what runs next.
    pub(super) fn forward(
        &self,
        input: Option<StreamInput<'_>>,
        branch: &Values,
        next: impl Fn() -> Done,
    ) -> Done {
        let Shared { ops, .. } = &*self.shared;
        let [tokens, dim] = self.size;
        let [first, second] = &self.norms;
        match &self.linears {
            Linears::Gpt { linears, a, .. } => {
                let [qkv, proj, fc, out] = &**linears;
                first.forward(ops, self.size, input, &qkv.input.values)?;
                next()?;
                self.decode_weights(Phase::Forward)?;
                self.forward_of([(qkv, &self.rows[0])])?;
                let seen = Rows {
                    values: &proj.input.values,
                };
                self.attention.forward(self.rows(), seen)?;
                self.forward_of([(proj, branch)])?;
                let input = Some(StreamInput {
                    x: &first.x,
                    branch,
                });
                second.forward(ops, self.size, input, &fc.input.values)?;
                self.forward_of([(fc, a)])?;
                ops.gelu(a, out.input.made(), [tokens, 4 * dim])?;
                self.forward_of([(out, branch)])
            }
            Linears::Llama {
                attention,
                mlp,
                gate,
                up,
                ..
            } => {
                let ([q, k, v, o], [gate_proj, up_proj, down]) = (&**attention, &**mlp);
                first.forward(ops, self.size, input, &q.input.values)?;
                next()?;
                self.decode_weights(Phase::Forward)?;
                self.forward_of([q, k, v].into_iter().zip(&self.rows))?;
                let seen = Rows {
                    values: &o.input.values,
                };
                self.attention.forward(self.seen()?, seen)?;
                self.forward_of([(o, branch)])?;
                let input = Some(StreamInput {
                    x: &first.x,
                    branch,
                });
                second.forward(ops, self.size, input, &gate_proj.input.values)?;
                self.forward_of([(gate_proj, gate), (up_proj, up)])?;
                let size = [tokens, gate.len() / tokens];
                ops.swiglu(gate, up, down.input.made(), size)?;
                self.forward_of([(down, branch)])
            }
        }
    }

    /// Decodes the weights that products of `phase` read as values.
    fn decode_weights(&self, phase: Phase) -> Done {
        let linears = self.linears();
        let mut decodes = self.decodes.iter();
        decodes.try_for_each(|decodes| decodes.run(phase, &linears, &self.shared))
    }

    /// What layers make of values that the input of the first one has. Layers side by side that have one input cast it once.
    fn forward_of<'a>(&self, layers: impl IntoIterator<Item = (&'a Linear<R>, &'a Values)>) -> Done
    where
        R: 'a,
    {
        let Shared { cuda, trace, .. } = &*self.shared;
        let mut filled: Vec<&Values> = Vec::new();
        let mut last: Option<&Arc<CastOperand>> = None;
        for (linear, out) in layers {
            let input = &linear.input;
            let here = |values: &&Values| values.pointer() == input.values.pointer();
            match filled.first() {
                Some(from) if !filled.iter().any(here) => {
                    cuda.copy(from, 0..from.len(), &input.values, 0)?;
                    trace.mark(|| "copies of inputs".to_owned())?;
                }
                _ => {}
            }
            filled.push(&input.values);
            if !last.is_some_and(|last| Arc::ptr_eq(last, input)) {
                input.cast()?;
                input.prepare(Pass::Forward)?;
            }
            last = Some(input);
            linear.forward(out)?;
        }
        Ok(())
    }

    /// The sum of what layers that read the same values make of their gradients, and the gradients of their weights.
    fn backward_of(&self, layers: &[&Linear<R>], dx: &Values) -> Done {
        let mut last: Option<&Arc<CastOperand>> = None;
        for linear in layers {
            let input = &linear.input;
            if !last.is_some_and(|last| Arc::ptr_eq(last, input)) {
                input.prepare(Pass::WeightGrad)?;
            }
            linear.input_grad(dx, last.is_some())?;
            linear.weight_grad()?;
            last = Some(input);
        }
        Ok(())
    }

    /// Runs forward on what its first norm keeps, where blocks share the memory of what lies between their passes. Also in the last block,
    /// which still has it: gathers are those that plans count.
    pub(super) fn forward_again(&self, branch: &Values) -> Done {
        if !self.shared.arena.runs_again() {
            return Ok(());
        }
        // What forward gathers stays for backward, also where gathers are not started ahead.
        let mut linears = self.linears().into_iter();
        linears.try_for_each(Linear::gather_again)?;
        self.forward(None, branch, || Ok(()))?;
        // Of parts that smaller groups of ranks keep.
        self.prefetch(Phase::Backward)
    }

    /// Starts the gathers of its weights for backward, and before them those for forward where that runs again: it does not wait for what it does not read.
    pub(super) fn prefetch_backward(&self) -> Done {
        if self.shared.arena.runs_again() {
            self.prefetch(Phase::Forward)?;
        }
        self.prefetch(Phase::Backward)
    }

    /// Turns `dx`, the gradient of what the block made of the residual stream, into that of the stream before it.
    pub(super) fn backward(
        &self,
        model: &ShardedModel<Cuda, R>,
        dx: &Values,
        next: impl Fn() -> Done,
    ) -> Done {
        let Shared { ops, arena, .. } = &*self.shared;
        let [tokens, dim] = self.size;
        at(dx, tokens * dim)?;
        let [first, second] = &self.norms;
        let dh = arena.values(&self.shared.places.dh)?;
        next()?;
        self.decode_weights(Phase::Backward)?;
        match &self.linears {
            Linears::Gpt { linears, a, da } => {
                let [qkv, proj, fc, out] = &**linears;
                out.input_grad(da, false)?;
                let (made, again) = (fc.gradient.made(), out.input.made_again());
                ops.gelu_backward(a, da, made, again, [tokens, 4 * dim])?;
                out.input.prepare(Pass::WeightGrad)?;
                out.weight_grad()?;
                self.backward_of(&[fc], &dh)?;
                second.backward(&self.shared, model, self.size, &dh, Some(dx), dx)?;
                self.backward_of(&[proj], &dh)?;
                let gradients = [Rows {
                    values: &qkv.gradient.values,
                }; 3];
                self.attention
                    .backward(Rows { values: &dh }, self.rows(), gradients)?;
                self.backward_of(&[qkv], &dh)?;
            }
            Linears::Llama {
                attention,
                mlp,
                gate,
                up,
                dg,
            } => {
                let ([q, k, v, o], [gate_proj, up_proj, down]) = (&**attention, &**mlp);
                down.input_grad(dg, false)?;
                let gradients = [gate_proj, up_proj].map(|linear| linear.gradient.made());
                let again = down.input.made_again();
                let size = [tokens, gate.len() / tokens];
                ops.swiglu_backward(gate, up, dg, gradients, again, size)?;
                down.input.prepare(Pass::WeightGrad)?;
                down.weight_grad()?;
                self.backward_of(&[up_proj, gate_proj], &dh)?;
                second.backward(&self.shared, model, self.size, &dh, Some(dx), dx)?;
                self.backward_of(&[o], &dh)?;
                let gradients = [q, k, v].map(|linear| Rows {
                    values: &linear.gradient.values,
                });
                let kept = self.seen()?;
                self.attention
                    .backward(Rows { values: &dh }, kept, gradients)?;
                if let Some(norms) = &self.head_norms {
                    let [of_q, of_k] = norms.vars;
                    let dgammas = [f32_gradient(model, of_q)?, f32_gradient(model, of_k)?];
                    norms.backward(&self.shared, self.rows(), gradients, &dgammas)?;
                    model.push_var_gradient(of_q)?;
                    model.push_var_gradient(of_k)?;
                }
                self.backward_of(&[v, k, q], &dh)?;
            }
        }
        first.backward(&self.shared, model, self.size, &dh, Some(dx), dx)
    }

    /// Starts the gathers of its weights for `phase`.
    pub(super) fn prefetch(&self, phase: Phase) -> Done {
        let mut linears = self.linears();
        if phase == Phase::Backward {
            linears.reverse();
        }
        linears
            .into_iter()
            .try_for_each(|linear| linear.prefetch(phase))
    }
}

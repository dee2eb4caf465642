//! [`Layer`]: one transformer block, forward and backward.

use std::sync::Arc;

use half::bf16;
use lowp_format::{Phase, Recipe};
use lowp_fsdp::ShardedModel;
use lowp_gemm::GemmKind;
use lowp_gemm::table::Pass;
use lowp_kernels::{Backend, Cuda, CudaBuffer, Source};

use super::TransformerError;
use super::attention::{Attention, Rows};
use super::decodes::Decodes;
use super::head_norms::HeadNorms;
use super::linear::{Linear, Shared};
use super::operand::CastOperand;
use super::ops::{Heads, NormParams, Ops};
use super::place::at;
use crate::places::{BlockPlaces, NormPlaces};
use crate::sizes::{Block, LlamaSizes, Sizes};

type Values = CudaBuffer<bf16>;
type Done<T = ()> = Result<T, TransformerError>;

/// The tokens of a batch and where they begin in the batch of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) tokens: usize,
    pub(super) first: u64,
}

/// A norm with what backward needs of it.
#[derive(Debug)]
pub(super) struct Norm {
    pub(super) params: NormParams,
    /// The variables that gamma and beta are.
    vars: [usize; 2],
    pub(super) x: Values,
    stats: CudaBuffer<f32>,
}

impl Norm {
    /// The norm whose gamma is variable `var`, and its beta, if it has one, the next.
    pub(super) fn new<R: Recipe>(
        shared: &Shared,
        model: &ShardedModel<Cuda, R>,
        (var, beta, eps): (usize, bool, f32),
        places: &NormPlaces,
    ) -> Done<Self> {
        let gamma = var_buffer(model, var)?.clone();
        let beta = match beta {
            true => Some(var_buffer(model, var + 1)?.clone()),
            false => None,
        };
        Ok(Self {
            params: NormParams { gamma, beta, eps },
            vars: [var, var + 1],
            x: shared.arena.values(&places.x)?,
            stats: shared.arena.sums(&places.stats)?,
        })
    }

    /// Keeps `x + branch` and writes its norm; without a branch, `x` is what is kept already.
    pub(super) fn forward(
        &self,
        ops: &Ops,
        size: [usize; 2],
        input: Option<(&Values, &Values)>,
        h: &Values,
    ) -> Done {
        match input {
            Some((x, branch)) => ops.norm(
                size,
                (x, Some((branch, &self.x))),
                &self.params,
                h,
                &self.stats,
            ),
            None => ops.norm(size, (&self.x, None), &self.params, h, &self.stats),
        }
    }

    /// `dx = residual + the gradient for x`; those of gamma and beta go to their owners.
    pub(super) fn backward<R: Recipe>(
        &self,
        shared: &Shared,
        model: &ShardedModel<Cuda, R>,
        size: [usize; 2],
        dh: &Values,
        (residual, dx): (Option<&Values>, &Values),
    ) -> Done {
        let partial = shared.arena.sums(&shared.places.norm_sums)?;
        let [gamma, beta] = self.vars;
        let dgamma = f32_gradient(model, gamma)?;
        let dbeta = match self.params.beta {
            Some(_) => Some(f32_gradient(model, beta)?),
            None => None,
        };
        let input = (dh, &self.x, &self.stats);
        let sums = (&partial, &dgamma, dbeta.as_ref());
        shared
            .ops
            .norm_backward(size, input, &self.params, (residual, dx), sums)?;
        model.push_var_gradient(gamma)?;
        if dbeta.is_some() {
            model.push_var_gradient(beta)?;
        }
        Ok(())
    }
}

/// The values of variable `index`.
pub(super) fn var_buffer<R: Recipe>(
    model: &ShardedModel<Cuda, R>,
    index: usize,
) -> Done<&CudaBuffer<f32>> {
    let found = model.var_buffer(index);
    found.ok_or_else(|| {
        TransformerError::Unsupported(match model.transient_var(index) {
            Some(_) => format!(
                "variable {index} is gathered for each use, but is read throughout: give it `VarUse::Throughout`"
            ),
            None => format!(
                "the model has no variable {index} on the device: build it with `VarPlace::Backend`"
            ),
        })
    })
}

/// Memory for the gradient of variable `index`.
pub(super) fn f32_gradient<R: Recipe>(
    model: &ShardedModel<Cuda, R>,
    index: usize,
) -> Done<CudaBuffer<f32>> {
    match model.var_gradient(index)? {
        Source::F32(buffer) => Ok(buffer),
        Source::Bf16(_) => Err(TransformerError::Unsupported(
            "gradients of variables are f32: build the model with `FloatDtype::F32` gradients"
                .to_owned(),
        )),
    }
}

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
    /// Block `index` of `model`. `dx` is where the gradient of the residual stream is in backward.
    pub(super) fn new(
        shared: &Arc<Shared>,
        model: &ShardedModel<Cuda, R>,
        sizes: &Sizes,
        (index, span): (usize, Span),
        (dx, angles): (&Values, Option<&CudaBuffer<f32>>),
    ) -> Done<Self> {
        let Sizes {
            dim, heads, seq, ..
        } = *sizes;
        let Span { tokens, first } = span;
        let arena = &shared.arena;
        let places = BlockPlaces::new(sizes, tokens);
        let head = |count: usize, groups: usize, stride: usize, first: usize, turned: bool| Heads {
            count,
            groups,
            dim: sizes.head_dim(),
            seq,
            stride,
            first,
            angles: angles.filter(|_| turned).cloned(),
        };
        let (width, eps) = (sizes.heads_width(), sizes.eps());
        let output = head(heads, 1, width, 0, false);
        let mlp = places.mlp.iter().map(|place| arena.values(place));
        let mlp = mlp.collect::<Result<Vec<_>, _>>()?;
        let mut linears: Vec<Linear<R>> = Vec::new();
        let mut gradients = Vec::new();
        for (at, (place, names)) in places.gradients.iter().zip(places.operands).enumerate() {
            let gradient = match place {
                Some(place) => arena.values(place)?,
                None => dx.clone(),
            };
            let layer = places.gradients.len() * index + at;
            let before = linears.iter().zip(places.operands);
            let readers = before.filter(|(_, other)| other.reads == names.reads);
            let readers = readers.map(|(linear, _)| linear);
            let of = (names, [mlp.first(), mlp.last()]);
            let batch = (tokens, first);
            gradients.push(gradient.clone());
            let made = Linear::new(shared, model, layer, batch, gradient, of, readers)?;
            linears.push(made);
        }
        let decodes = Decodes::of_block(&linears.iter().collect::<Vec<_>>())?;
        let (norms, inputs, linears) = match sizes.block {
            Block::Gpt => {
                let linears = Linears::Gpt {
                    linears: all(linears)?,
                    a: mlp[0].clone(),
                    da: gradients[2].clone(),
                };
                let inputs = [0, dim, 2 * dim].map(|at| head(heads, 1, 3 * dim, at, false));
                let var = 2 + 4 * index;
                ([(var, true, eps), (var + 2, true, eps)], inputs, linears)
            }
            Block::Llama(LlamaSizes {
                kv_heads, qk_norm, ..
            }) => {
                let mlp_linears = linears.split_off(4);
                let linears = Linears::Llama {
                    attention: all(linears)?,
                    mlp: all(mlp_linears)?,
                    gate: mlp[0].clone(),
                    up: mlp[1].clone(),
                    dg: mlp[2].clone(),
                };
                let kv = kv_heads * sizes.head_dim();
                let groups = heads / kv_heads.max(1);
                let inputs = [
                    head(heads, 1, width, 0, true),
                    head(kv_heads, groups, kv, 0, true),
                    head(kv_heads, groups, kv, 0, false),
                ];
                // Norms of queries and keys lie between those of the stream.
                let between = if qk_norm { 2 } else { 0 };
                let var = 1 + (2 + between) * index;
                let norms = [(var, false, eps), (var + 1 + between, false, eps)];
                (norms, inputs, linears)
            }
        };
        let [mut q, mut k, v] = inputs;
        let turned = places.head_norms.map(|norms| {
            let heads = [q.clone(), k.clone()];
            // The norms turn them.
            (q.angles, k.angles) = (None, None);
            (norms, heads)
        });
        let (attention, kept) = Attention::new(shared, (sizes, tokens), [q, k, v], output)?;
        let head_norms = match (turned, places.normed(&kept).as_slice()) {
            (Some((of, heads)), &[q, k]) => {
                let (var, _, eps) = norms[0];
                let [of_q, of_k] = [var_buffer(model, var + 1)?, var_buffer(model, var + 2)?];
                let gammas = [of_q.clone(), of_k.clone()];
                let of_norms = ([var + 1, var + 2], gammas, eps);
                let made = ([q, k], &of.sums);
                Some(HeadNorms::new(shared, of_norms, (heads, tokens), made)?)
            }
            _ => None,
        };
        let rows = places.rows(&kept).into_iter();
        let rows = rows.map(|place| arena.values(&place));
        let rows = rows.collect::<Result<_, _>>()?;
        let size = [tokens, dim];
        let [first, second] = norms;
        let norms = [
            Norm::new(shared, model, first, &places.norms[0])?,
            Norm::new(shared, model, second, &places.norms[1])?,
        ];
        Ok(Self {
            shared: Arc::clone(shared),
            size,
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
        input: Option<(&Values, &Values)>,
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
                let input = Some((&first.x, branch));
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
                let input = Some((&first.x, branch));
                second.forward(ops, self.size, input, &gate_proj.input.values)?;
                self.forward_of([(gate_proj, gate), (up_proj, up)])?;
                let size = [tokens, gate.len() / tokens];
                ops.swiglu([gate, up], down.input.made(), size)?;
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
                let made = (fc.gradient.made(), out.input.made_again());
                ops.gelu_backward(a, da, made, [tokens, 4 * dim])?;
                out.input.prepare(Pass::WeightGrad)?;
                out.weight_grad()?;
                self.backward_of(&[fc], &dh)?;
                second.backward(&self.shared, model, self.size, &dh, (Some(dx), dx))?;
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
                let made = (gradients, down.input.made_again());
                let size = [tokens, gate.len() / tokens];
                ops.swiglu_backward([gate, up], dg, made, size)?;
                down.input.prepare(Pass::WeightGrad)?;
                down.weight_grad()?;
                self.backward_of(&[up_proj, gate_proj], &dh)?;
                second.backward(&self.shared, model, self.size, &dh, (Some(dx), dx))?;
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
        first.backward(&self.shared, model, self.size, &dh, (Some(dx), dx))
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

//! [`RecipeOperands`]: activations and gradients, quantized and decoded as a recipe says.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{Error, Result, bail};
use lowp_format::{
    BufferSpec, Operand, Orientation, Origin, Part, Recipe, Role, Rounding, ScaleRule, ScaleSource,
    Shape,
};
use lowp_kernels::{
    AmaxJob, Backend, DecodeJob, EncodeJob, Source, StepScalars, StochasticKey, Target, Work,
};
use lowp_shard::{Communicator, ScaleBook, ScaleBookBuilder, ScaleSlot};
use smallvec::SmallVec;

use crate::hadamard::hadamard_rows;
use crate::linear::{OperandCast, OperandRole};

/// What all layers of a rank share about the pass that runs now.
#[derive(Debug, Default)]
pub struct PassState {
    step: AtomicU64,
    first_token: AtomicU64,
    training: AtomicBool,
}

impl PassState {
    /// Begins a pass: its step, the index of its first token in the global batch, and whether
    /// amaxes are observed (training) or scales only used (evaluation).
    pub fn begin(&self, step: u64, first_token: u64, training: bool) {
        self.step.store(step, Ordering::Relaxed);
        self.first_token.store(first_token, Ordering::Relaxed);
        self.training.store(training, Ordering::Relaxed);
    }
}

/// An operand kind of one layer and its entry in the model's scale book, if its scale is delayed.
#[derive(Clone, Debug)]
struct Kind {
    operand: Operand,
    slot: Option<ScaleSlot>,
}

/// How one layer's operands are quantized, before the scale book is built.
#[derive(Clone, Debug)]
pub struct OperandPlan {
    activation: Kind,
    gradient: Kind,
    stream: u64,
    seed: u64,
}

impl OperandPlan {
    /// Operands of layer number `layer` of a model whose weights live in `recipe`. Delayed scales
    /// are registered in `book`, so that one reduction covers them with the weights.
    pub fn new(recipe: &impl Recipe, book: &mut ScaleBookBuilder, seed: u64, layer: u64) -> Self {
        let mut kind = |role| {
            let operand = recipe.operand(role);
            let delayed = matches!(operand.scale_source, ScaleSource::History { .. });
            let slot = delayed
                .then(|| book.register_kernel(operand.kernel, operand.scale_source))
                .flatten();
            Kind { operand, slot }
        };
        let (activation, gradient) = (kind(Role::Activation), kind(Role::Gradient));
        // Bit 62 keeps stochastic rounding apart from every other use of the seed.
        Self {
            activation,
            gradient,
            stream: (1 << 62) | (layer * 4),
            seed,
        }
    }
}

/// Quantizes a layer's operands through a backend and returns the decoded values, which is what a
/// GEMM over the codes multiplies.
///
/// Tensor amaxes of operands are agreed over all ranks, so a batch gives the same codes however it
/// is split: casts are collective where a scale depends on the whole tensor.
#[derive(Debug)]
pub struct RecipeOperands<B: Backend> {
    backend: B,
    plan: OperandPlan,
    book: Arc<ScaleBook<B>>,
    pass: Arc<PassState>,
    world: Arc<dyn Communicator<B>>,
    casts: Mutex<HashMap<CastKey, Arc<Mutex<Cast<B>>>>>,
}

/// What a planned cast is found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct CastKey {
    role: OperandRole,
    shape: Shape,
    first_token: u64,
}

/// One planned cast: source in, codes, decoded values out.
#[derive(Debug)]
struct Cast<B: Backend> {
    source: B::Buffer<f32>,
    out: B::Buffer<f32>,
    amax: B::Plan,
    /// Scales that depend on this tensor alone.
    local: Option<ScaleBook<B>>,
    encode: B::Plan,
    decode: B::Plan,
}

impl<B: Backend> RecipeOperands<B> {
    /// Operands over the built `book` that `plan` was registered in; `world` are the ranks that
    /// share a batch.
    pub fn new(
        backend: &B,
        plan: OperandPlan,
        book: Arc<ScaleBook<B>>,
        pass: Arc<PassState>,
        world: Arc<dyn Communicator<B>>,
    ) -> Self {
        Self {
            backend: backend.clone(),
            plan,
            book,
            pass,
            world,
            casts: Mutex::default(),
        }
    }

    fn kind(&self, role: OperandRole) -> &Kind {
        match role {
            OperandRole::Input | OperandRole::InputForWeightGrad => &self.plan.activation,
            OperandRole::Gradient | OperandRole::GradientForWeightGrad => &self.plan.gradient,
        }
    }

    fn planned(&self, key: CastKey) -> Result<Arc<Mutex<Cast<B>>>> {
        let Ok(mut casts) = self.casts.lock() else {
            bail!("a thread failed in a cast")
        };
        Ok(match casts.entry(key) {
            Entry::Occupied(cast) => cast.get().clone(),
            Entry::Vacant(place) => place
                .insert(Arc::new(Mutex::new(self.make(key).map_err(Error::wrap)?)))
                .clone(),
        })
    }

    fn make(&self, key: CastKey) -> std::result::Result<Cast<B>, lowp_shard::ShardError> {
        let CastKey {
            role,
            shape,
            first_token,
        } = key;
        let Kind { operand, slot } = self.kind(role);
        let backend = &self.backend;
        let source = backend.alloc::<f32>(shape.elements())?;
        let out = backend.alloc::<f32>(shape.elements())?;
        let mut targets: SmallVec<[Target<B>; 6]> = SmallVec::new();
        for spec in buffers(operand, orientation(role)) {
            let bytes = backend.alloc::<u8>(spec.bytes(shape))?;
            targets.push(Target::new(spec, bytes));
        }
        let mut local = ScaleBookBuilder::default();
        let local_slot = match slot {
            Some(_) => None,
            None => local.register_kernel(operand.kernel, operand.scale_source),
        };
        let local = local.build(backend)?;
        let (book, entry) = match slot {
            Some(_) => (&*self.book, *slot),
            None => (&local, local_slot),
        };
        let amax = AmaxJob {
            shape,
            start: 0,
            source: Source::F32(source.clone()),
            source_rounding: operand.source_rounding,
            out: book.observed().clone(),
            tensor: entry.map(|slot| book.index(slot)).transpose()?,
            blocks: SmallVec::new(),
        };
        let amax = if entry.is_some() {
            vec![amax]
        } else {
            Vec::new()
        };
        let stochastic = (operand.rounding == Rounding::Stochastic).then(|| StochasticKey {
            seed: self.plan.seed,
            stream: self.plan.stream + role as u64,
            first: first_token * shape.cols as u64,
        });
        let encode = EncodeJob {
            shape,
            kernel: operand.kernel,
            source: Source::F32(source.clone()),
            source_rounding: operand.source_rounding,
            tensor: entry.map(|slot| book.tensor_input(slot)).transpose()?,
            targets: targets.clone(),
            stochastic,
        };
        let find = |part| targets.iter().find(|t| t.spec.key.part == part).cloned();
        let data = find(Part::Data).ok_or_else(|| lowp_format::FormatError::MissingUsage {
            orientation: orientation(role),
            usage: lowp_format::Usage::empty(),
        })?;
        let decode = DecodeJob {
            shape,
            kernel: operand.kernel,
            data,
            block_scale: find(Part::BlockScale),
            tensor_scale: find(Part::TensorScale).map(|t| t.bytes),
            out: out.clone(),
        };
        Ok(Cast {
            source,
            out,
            amax: backend.plan(Work::Amax(amax))?,
            local: local_slot.map(|_| local),
            encode: backend.plan(Work::Encode(vec![encode]))?,
            decode: backend.plan(Work::Decode(vec![decode]))?,
        })
    }

    fn run(
        &self,
        cast: &Cast<B>,
        data: &[f32],
    ) -> std::result::Result<Vec<f32>, lowp_shard::ShardError> {
        let backend = &self.backend;
        let random_step = self.pass.step.load(Ordering::Relaxed);
        let scalars = StepScalars {
            random_step,
            ..StepScalars::default()
        };
        backend.write(&cast.source, 0, data)?;
        if cast.local.is_some() || self.pass.training.load(Ordering::Relaxed) {
            backend.run(&cast.amax, &scalars)?;
        }
        if let Some(local) = &cast.local {
            local.agree(&*self.world)?;
        }
        backend.run(&cast.encode, &scalars)?;
        backend.run(&cast.decode, &scalars)?;
        Ok(backend.download(&cast.out)?)
    }
}

impl<B: Backend> OperandCast for RecipeOperands<B> {
    fn cast<'a>(
        &self,
        role: OperandRole,
        data: &'a [f32],
        tokens: usize,
        features: usize,
    ) -> Result<Cow<'a, [f32]>> {
        let operand = &self.kind(role).operand;
        if operand.kernel.scale == ScaleRule::None && operand.kernel.element.bits() == 32 {
            return Ok(Cow::Borrowed(data));
        }
        let transformed;
        let weight_grad = orientation(role) == Orientation::Columnwise;
        let data = if operand.hadamard && weight_grad {
            transformed = hadamard_rows(data, features);
            &transformed
        } else {
            data
        };
        let first_token = match operand.rounding {
            Rounding::Stochastic => self.pass.first_token.load(Ordering::Relaxed),
            Rounding::Nearest => 0,
        };
        let shape = Shape::new(tokens, features);
        let cast = self.planned(CastKey {
            role,
            shape,
            first_token,
        })?;
        let Ok(cast) = cast.lock() else {
            bail!("a thread failed in a cast")
        };
        Ok(Cow::Owned(self.run(&cast, data).map_err(Error::wrap)?))
    }
}

/// The direction of the blocks: along the axis that the product contracts.
fn orientation(role: OperandRole) -> Orientation {
    match role {
        OperandRole::Input | OperandRole::Gradient => Orientation::Rowwise,
        OperandRole::InputForWeightGrad | OperandRole::GradientForWeightGrad => {
            Orientation::Columnwise
        }
    }
}

/// The buffers of one orientation. A columnwise operand whose data is the transpose of the rowwise
/// data decodes to the same values, so the rowwise buffers stand for it.
fn buffers(operand: &Operand, orientation: Orientation) -> SmallVec<[BufferSpec; 6]> {
    let derived = operand.buffers.iter().any(|spec| {
        spec.key.serves(orientation, Part::Data) && matches!(spec.origin, Origin::TransposeOf(_))
    });
    let usage = if derived {
        Orientation::Rowwise.usage()
    } else {
        orientation.usage()
    };
    operand
        .buffers
        .iter()
        .filter(|spec| spec.key.usage.contains(usage))
        .copied()
        .collect()
}

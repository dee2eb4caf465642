//! [`RecipeOperands`]: activations and gradients, quantized and decoded as a recipe says.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use lowp_comm::{Communicator, or_abort};
use lowp_format::{
    Code, Columnwise, KernelKey, Operand, Orientation, Part, Quantizers, Recipe, Role, Rounding,
    ScaleRule, Shape, Usage, rotate_rows,
};
use lowp_kernels::{Backend, DecodeJob, KernelError, Source, StepScalars, Work};
use lowp_shard::{DelayedState, ScaleBook, ScaleBookBuilder, ScaleSlot, ShardError};

mod encode;

pub use encode::{OperandEncode, OperandPart, Rounded, code_buffers, encoded};

use crate::error::ModelError;
use crate::memory::{CastBuffers, LayerMemory};

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

/// An operand kind of one layer and its entries in the model's scale book, by orientation, where its scales are delayed.
#[derive(Clone, Debug)]
struct RegisteredOperand {
    operand: Operand,
    slots: [Option<ScaleSlot>; 2],
}

impl RegisteredOperand {
    fn new(operand: Operand, book: &mut ScaleBookBuilder) -> Self {
        let quantizers = &operand.quantizers;
        let delayed = |o: &Orientation| quantizers.of(*o).kernel.scale.is_delayed();
        let usage = Orientation::ALL.into_iter().filter(delayed);
        let usage = usage.fold(Usage::empty(), |usage, o| usage | o.usage());
        // A scale of earlier steps is one of the tensor, whatever its shape.
        let slots = book.register_operand(quantizers, Shape::new(0, 0), usage);
        Self { operand, slots }
    }
}

/// How one layer's operands are quantized, before the scale book is built.
#[derive(Clone, Debug)]
pub struct OperandPlan {
    activation: RegisteredOperand,
    gradient: RegisteredOperand,
    /// The cast of a weight that lives in another code than its products read.
    weight: Option<RegisteredOperand>,
    stream: u64,
    seed: u64,
}

impl OperandPlan {
    /// Operands of layer number `layer` of a model whose weights live in `recipe`. Delayed scales
    /// are registered in `book`, so that one reduction covers them with the weights.
    pub fn new(recipe: &impl Recipe, book: &mut ScaleBookBuilder, seed: u64, layer: u64) -> Self {
        let mut kind = |role| RegisteredOperand::new(recipe.operand(role), book);
        let (activation, gradient) = (kind(Role::Activation), kind(Role::Gradient));
        // It lives in the code that its products read, unless the recipe says otherwise.
        let read = recipe.operand(Role::Weight).quantizers;
        let weight = (read.kernels() != recipe.quantizers(Role::Weight).kernels())
            .then(|| kind(Role::Weight));
        // Bit 62 keeps stochastic rounding apart from every other use of the seed.
        Self {
            activation,
            gradient,
            weight,
            stream: (1 << 62) | (layer * 4),
            seed,
        }
    }
}

/// The state of a delayed scale, with the code and the rule that it is made for.
pub(crate) type DelayedScale = Option<((Code, ScaleRule), DelayedState)>;

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
    memory: Arc<LayerMemory<B>>,
    /// The latest used last, at most [`MAX_CASTS`].
    casts: Mutex<Vec<(CastKey, Arc<Cast<B>>)>>,
}

/// Casts that a layer keeps planned: those of the batches of training and evaluation, and the
/// gradients of twelve micro-batches, whose random numbers start at other tokens. A layer that
/// alternates between more plans them again.
const MAX_CASTS: usize = 32;

/// What a planned cast is found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CastKey {
    role: Role,
    orientation: Orientation,
    shape: Shape,
    first_token: u64,
}

/// One planned cast: source in, codes, decoded values out.
#[derive(Debug)]
struct Cast<B: Backend> {
    /// Locked while it runs: casts of other layers use them too.
    buffers: Arc<Mutex<CastBuffers<B>>>,
    encode: OperandEncode<B>,
    decode: B::Plan,
}

impl<B: Backend> RecipeOperands<B> {
    /// Operands over the built `book` that `plan` was registered in; `world` are the ranks that
    /// share a batch, `memory` is what the rank's layers share.
    pub fn new(
        backend: &B,
        plan: OperandPlan,
        book: Arc<ScaleBook<B>>,
        pass: Arc<PassState>,
        world: Arc<dyn Communicator<B>>,
        memory: Arc<LayerMemory<B>>,
    ) -> Self {
        Self {
            backend: backend.clone(),
            plan,
            book,
            pass,
            world,
            memory,
            casts: Mutex::default(),
        }
    }

    /// The entries of the model's scale book, by kind of operand and orientation.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Option<ScaleSlot>> + '_ {
        let OperandPlan {
            activation,
            gradient,
            weight,
            ..
        } = &self.plan;
        let kinds = [Some(activation), Some(gradient), weight.as_ref()];
        kinds
            .into_iter()
            .flat_map(|kind| kind.map_or([None; 2], |kind| kind.slots))
    }

    /// The states of the delayed scales, by kind of operand and orientation, with what each is made for.
    pub(crate) fn delayed_states(&self) -> Result<Vec<DelayedScale>, ShardError> {
        let state = |slot: Option<ScaleSlot>| {
            let Some(slot) = slot else {
                return Ok(None);
            };
            let state = self.book.delayed_state(slot)?;
            let made_for = self.book.ingredients(slot)?;
            Ok(state.map(|state| (made_for, state)))
        };
        self.slots().map(state).collect()
    }

    /// Takes over those of `states` whose scales are made for the same.
    pub(crate) fn keep_delayed(&self, states: &[DelayedScale]) -> Result<(), ShardError> {
        for (slot, kept) in self.slots().zip(states) {
            if let (Some(slot), Some((made_for, state))) = (slot, kept)
                && self.book.ingredients(slot)? == *made_for
            {
                self.book.set_delayed_state(slot, state)?;
            }
        }
        Ok(())
    }

    fn planned(&self, key: CastKey, kind: &RegisteredOperand) -> Result<Arc<Cast<B>>, ModelError> {
        let Ok(mut casts) = self.casts.lock() else {
            return Err(ModelError::PoisonedCast);
        };
        let known = casts.iter().rposition(|(known, _)| *known == key);
        let latest = if let Some(index) = known {
            casts.remove(index)
        } else {
            if casts.len() == MAX_CASTS {
                casts.remove(0);
            }
            (key, Arc::new(self.make(key, kind)?))
        };
        let cast = latest.1.clone();
        casts.push(latest);
        Ok(cast)
    }

    fn make(&self, key: CastKey, kind: &RegisteredOperand) -> Result<Cast<B>, ShardError> {
        let CastKey {
            role,
            orientation,
            shape,
            first_token,
        } = key;
        let quantizers = &kind.operand.quantizers;
        let number = number(role, orientation);
        let orientation = cast_for(quantizers, orientation);
        let usage = orientation.usage();
        let shared = self.memory.cast_buffers(shape, quantizers.buffers(usage))?;
        let (source, targets, out) = {
            let buffers = shared.lock().map_err(|_| KernelError::Poisoned)?;
            let CastBuffers {
                source,
                targets,
                out,
            } = &*buffers;
            let [source, out] = [source, out].map(|values| Source::F32(values.clone()));
            (source, targets.clone(), out)
        };
        let part = OperandPart {
            shape,
            usage,
            first_token,
        };
        let encode = self.planned_encode(kind, part, &source, targets, [None, None], number)?;
        let find = |part| encode.target(orientation, part).cloned();
        let data = find(Part::Data).ok_or_else(|| lowp_format::FormatError::MissingUsage {
            orientation,
            usage: Usage::empty(),
        })?;
        let kernel = quantizers.of(orientation).kernel;
        let outer = kernel.scale.outer().and_then(|(_, part)| find(part));
        let decode = DecodeJob {
            shape,
            kernel,
            data,
            block_scale: find(Part::BlockScale),
            tensor_scale: outer.map(|target| target.bytes),
            out,
        };
        Ok(Cast {
            decode: self.backend.plan(Work::Decode(vec![decode]))?,
            buffers: shared,
            encode,
        })
    }

    fn run(&self, cast: &Cast<B>, data: &[f32]) -> Result<Vec<f32>, ShardError> {
        let backend = &self.backend;
        let buffers = cast.buffers.lock().map_err(|_| KernelError::Poisoned)?;
        backend.write(&buffers.source, 0, data)?;
        self.run_encode(&cast.encode, true)?;
        backend.run(&cast.decode, &StepScalars::default())?;
        Ok(backend.download(&buffers.out)?)
    }
}

impl<B: Backend> RecipeOperands<B> {
    /// Quantizes an operand of a product on the host as the recipe says and returns what the product reads: the decoded values. `data` is row-major
    /// `[tokens, features]`, or for a weight `[outputs, inputs]`, as its source decoded it; the result has the same shape.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, or a rank failed.
    pub fn cast<'a>(
        &self,
        role: Role,
        orientation: Orientation,
        data: &'a [f32],
        tokens: usize,
        features: usize,
    ) -> Result<Cow<'a, [f32]>, ModelError> {
        let Some(kind) = self.of_role(role) else {
            return Ok(Cow::Borrowed(data));
        };
        let operand = &kind.operand;
        let kernel = operand.quantizers.of(orientation).kernel;
        if is_plain(&kernel) || !operand.quantized.contains(orientation.usage()) {
            // The other operand of the product is transformed by its cast.
            return Ok(if kernel.hadamard {
                let mut rotated = data.to_vec();
                rotate_rows(&mut rotated, features);
                Cow::Owned(rotated)
            } else {
                Cow::Borrowed(data)
            });
        }
        let first_token = match operand.rounding {
            Rounding::Stochastic => self.pass.first_token.load(Ordering::Relaxed),
            Rounding::Nearest => 0,
        };
        let shape = Shape::new(tokens, features);
        let key = CastKey {
            role,
            orientation,
            shape,
            first_token,
        };
        let done = self.planned(key, kind).and_then(|cast| {
            let done = self.run(&cast, data).map_err(ModelError::from);
            if let (Err(_), Ok(mut casts)) = (&done, self.casts.lock()) {
                // It may hold an amax that no encode consumed: the next one starts anew.
                casts.retain(|(known, _)| *known != key);
            }
            done
        });
        or_abort(&*self.world, done).map(Cow::Owned)
    }
}

/// The number of a cast among those of a layer, for its random numbers.
fn number(role: Role, orientation: Orientation) -> u64 {
    let first = match role {
        Role::Activation => 0,
        Role::Gradient => 2,
        Role::Weight => 4,
    };
    first + orientation as u64
}

/// Whether values are read as they are.
fn is_plain(kernel: &KernelKey) -> bool {
    kernel.scale == ScaleRule::None && kernel.element == Code::F32
}

/// The orientation that is cast for products that read `orientation`. Columnwise buffers that follow from the rowwise
/// ones decode to the same values, so the rowwise ones stand for them.
fn cast_for(quantizers: &Quantizers, orientation: Orientation) -> Orientation {
    match quantizers.relation {
        Columnwise::Quantized => orientation,
        Columnwise::Transposed | Columnwise::Shared => Orientation::Rowwise,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_comm::LocalComm;
    use lowp_format::{AnyRecipe, RecipeOptions};
    use lowp_kernels::Cpu;

    fn operands(memory: &Arc<LayerMemory<Cpu>>) -> RecipeOperands<Cpu> {
        let recipe = AnyRecipe::from_name("nvfp4-2d", &RecipeOptions::default());
        let recipe = recipe.expect("a recipe");
        let mut book = ScaleBookBuilder::default();
        let plan = OperandPlan::new(&recipe, &mut book, 1, 0);
        let book = Arc::new(book.build(&Cpu).expect("a book"));
        let world = Arc::new(LocalComm::solo(&Cpu));
        RecipeOperands::new(&Cpu, plan, book, Arc::default(), world, memory.clone())
    }

    #[test]
    fn planned_casts_have_a_bound() {
        let memory = LayerMemory::new(&Cpu);
        let layer = operands(&memory);
        let data = vec![1.0; 64 * 32];
        let cast = |role, tokens: usize| {
            let data = &data[..tokens * 32];
            let cast = layer.cast(role, Orientation::Rowwise, data, tokens, 32);
            cast.map(Cow::into_owned).expect("a cast")
        };
        let first = cast(Role::Gradient, 16);
        for step in 0..3 * MAX_CASTS as u64 {
            // Other tokens and other shapes in every step, and one that comes again and again.
            layer.pass.begin(0, step * 64, true);
            cast(Role::Gradient, 64);
            cast(Role::Activation, 1 + step as usize % 50);
            layer.pass.begin(0, 0, true);
            cast(Role::Gradient, 16);
            let casts = layer.casts.lock().expect("casts");
            assert!(casts.len() <= MAX_CASTS);
        }
        let again = cast(Role::Gradient, 16);
        assert_eq!(first, again);
        // Every kept cast holds at most one kind of buffers.
        assert!(memory.cast_kinds() <= MAX_CASTS, "{}", memory.cast_kinds());
    }

    #[test]
    fn layers_share_the_buffers_of_their_casts() {
        let memory = LayerMemory::new(&Cpu);
        let layers = [0, 1, 2].map(|_| operands(&memory));
        let data = vec![1.0; 64 * 32];
        for layer in &layers {
            for orientation in Orientation::ALL {
                layer
                    .cast(Role::Activation, orientation, &data, 64, 32)
                    .expect("a cast");
            }
        }
        assert_eq!(memory.cast_kinds(), 2, "one of each orientation");
        drop(layers);
        assert_eq!(memory.cast_kinds(), 0, "freed with their casts");
    }
}

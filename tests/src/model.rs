//! Models of many matrices, each with its own recipe, shape, group and dtypes, as one rank of a
//! world or a mesh holds them.

use std::fmt;
use std::sync::Arc;

use half::bf16;
use lowp_comm::{Communicator, Mesh};
use lowp_format::{
    AnyRecipe, KernelKey, Orientation, Phase, Recipe, RecipeOptions, Role, ScaleRule, Shape,
};
use lowp_kernels::{Backend, Cpu, Source};
use lowp_optim::{
    FloatDtype, Group, OptimError, Optimizer, OptimizerBuilder, ParamId, ParamSpec, StateDtypes,
    StepOptions, StepReport,
};
use lowp_shard::{
    GatherGroup, GatherPool, ScaleBook, ScaleSlot, ShardError, ShardSpec, ShardedTensor, quantize,
};

use crate::world::{Bytes, bytes_of, orientation};

/// One matrix of a model.
#[derive(Clone)]
pub struct Case {
    /// Its low-precision form.
    pub recipe: AnyRecipe,
    /// Its full shape.
    pub shape: Shape,
    /// Index of its group.
    pub group: usize,
    /// Gradient storage.
    pub grad: FloatDtype,
    /// Storage of the states.
    pub state: StateDtypes,
    /// Initial values, full.
    pub values: Vec<f32>,
}

/// Without the values, which a failing test would print by the thousand.
impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            recipe,
            shape,
            group,
            grad,
            state,
            ..
        } = self;
        write!(f, "{recipe:?} {shape} in group {group}, ")?;
        write!(f, "{grad:?} gradients, {state}")
    }
}

impl Case {
    /// A matrix with f32 gradients and states in group 0.
    pub fn new(recipe: AnyRecipe, shape: Shape, values: Vec<f32>) -> Self {
        Self {
            recipe,
            shape,
            group: 0,
            grad: FloatDtype::F32,
            state: StateDtypes::default(),
            values,
        }
    }

    /// The values that arrive in the optimizer for gradient values `grad`.
    pub fn stored(&self, grad: &[f32]) -> Vec<f32> {
        let round = |&x: &f32| match self.grad {
            FloatDtype::F32 => x,
            FloatDtype::Bf16 => bf16::from_f32(x).to_f32(),
        };
        grad.iter().map(round).collect()
    }

    /// What casting all of `master` gives for `o`; `encode_scale` is for delayed scales.
    ///
    /// # Panics
    /// If the recipe cannot take the shape.
    pub fn cast(&self, master: &[f32], encode_scale: Option<f32>, o: Orientation) -> Bytes {
        let source = Source::F32(Cpu.upload(master).expect("room"));
        let tensor = quantize(
            &Cpu,
            self.recipe,
            self.shape,
            o.usage(),
            source,
            encode_scale,
        )
        .unwrap_or_else(|e| panic!("{self:?}: {e}"));
        bytes_of(&tensor, o)
    }
}

/// The ingredients of weights, rowwise first.
pub fn kernels(recipe: &impl Recipe) -> [KernelKey; 2] {
    recipe.quantizers(Role::Weight).kernels()
}

/// Whether an encode of weights waits for an amax of the tensor or of its lines.
pub fn waits_for_amax(recipe: &impl Recipe) -> bool {
    kernels(recipe).iter().any(|key| key.scale.waits_for_amax())
}

/// Whether scales of weights come of earlier steps.
pub fn is_delayed(recipe: &impl Recipe) -> bool {
    kernels(recipe).iter().any(|key| key.scale.is_delayed())
}

/// Whether weights have an amax of the tensor or of its lines, observed now or before.
pub fn observes_amax(recipe: &impl Recipe) -> bool {
    kernels(recipe)
        .iter()
        .any(|key| key.scale.outer().is_some())
}

/// Whether flat slices of masters can be cast: not with four over six, which compares the errors of whole blocks.
pub fn casts_flat(recipe: &impl Recipe) -> bool {
    let chooses = |key: &KernelKey| match key.scale {
        ScaleRule::TwoLevel { four_over_six, .. } => four_over_six.is_on(),
        _ => false,
    };
    !kernels(recipe).iter().any(chooses)
}

/// Every recipe: with its default options, with each value of each option, and with pairs of them, as far as the
/// recipe takes them and they quantize weights in another way.
pub fn recipe_variants() -> Vec<AnyRecipe> {
    let weights = |r: &AnyRecipe| (r.name(), r.quantizers(Role::Weight), r.source_rounding());
    let mut found: Vec<AnyRecipe> = Vec::new();
    for default in AnyRecipe::all() {
        let name = default.name();
        let made = |options: &RecipeOptions| AnyRecipe::from_name(name, options).ok();
        let mut changes: Vec<Vec<(&str, &str)>> = vec![vec![]];
        for option in AnyRecipe::options_of(name).expect("a recipe") {
            // Numbers have no names.
            let texts = (option.names)().iter().chain(&["1", "2.5", "3"]);
            let set = texts.map(|text| vec![(option.name, *text)]);
            let pairs = set.clone().flat_map(|set| {
                let before = changes.iter().filter(|change| change.len() == 1);
                before.map(move |change| [change.clone(), set.clone()].concat())
            });
            let new: Vec<_> = set.clone().chain(pairs).collect();
            changes.extend(new);
        }
        for change in changes {
            let mut options = default.options();
            change
                .iter()
                .for_each(|(option, text)| options.set(option, text));
            let Some(recipe) = made(&options) else {
                continue;
            };
            if !found.iter().any(|other| weights(other) == weights(&recipe)) {
                found.push(recipe);
            }
        }
    }
    found
}

/// A model as one rank holds it.
#[derive(Debug)]
pub struct Rank {
    /// The ranks that hold the other rows.
    pub shards: Arc<dyn Communicator<Cpu>>,
    /// All ranks.
    pub world: Arc<dyn Communicator<Cpu>>,
    /// The optimizer.
    pub optimizer: Optimizer<Cpu>,
    /// The parameters, in the order of the cases.
    pub ids: Vec<ParamId>,
    /// This rank's rows of each.
    pub tensors: Vec<ShardedTensor<Cpu>>,
}

impl Rank {
    /// Builds this rank's part of a model and casts it for the first time. Collective.
    ///
    /// # Errors
    /// Whatever a rank fails with.
    pub fn new(
        cases: &[Case],
        groups: &[Group],
        shards: &Arc<dyn Communicator<Cpu>>,
        world: &Arc<dyn Communicator<Cpu>>,
    ) -> Result<Self, OptimError> {
        let shard = shards.world_size();
        let mesh = Mesh {
            replicate: world.world_size() / shard,
            shard,
        };
        let mut builder = OptimizerBuilder::new(world.clone()).mesh(mesh);
        for &group in groups {
            builder.group(group);
        }
        let (mut ids, mut tensors) = (Vec::new(), Vec::new());
        for (index, case) in cases.iter().enumerate() {
            let (size, rank) = (shards.world_size(), shards.rank());
            let spec = ShardSpec::new(&case.recipe, case.shape, size, rank)?;
            let own = case.values[spec.elements()].to_vec();
            let tensor = ShardedTensor::new(&Cpu, case.recipe, spec)?;
            let param = ParamSpec {
                grad: case.grad,
                state: case.state,
                ..ParamSpec::new(format!("param {index}"), case.group, own)
            };
            ids.push(builder.param(tensor.local(), param)?);
            tensors.push(tensor);
        }
        Ok(Self {
            shards: shards.clone(),
            world: world.clone(),
            optimizer: builder.build()?,
            ids,
            tensors,
        })
    }

    /// Gives every parameter this rank's rows of its full gradient.
    ///
    /// # Errors
    /// Whatever the optimizer rejects.
    pub fn set_grads(&mut self, grads: &[Vec<f32>]) -> Result<(), OptimError> {
        for (index, grad) in grads.iter().enumerate() {
            let own = &grad[self.tensors[index].spec().elements()];
            let id = self.ids[index];
            match self.optimizer.grad(id) {
                Source::F32(_) => self.optimizer.set_grad(id, own)?,
                Source::Bf16(buffer) => {
                    let own: Vec<bf16> = own.iter().map(|&x| bf16::from_f32(x)).collect();
                    Cpu.write(buffer, 0, &own)?;
                    self.optimizer.mark_ready(id);
                }
            }
        }
        Ok(())
    }

    /// One step with full gradients. Collective.
    ///
    /// # Errors
    /// Whatever a rank fails with.
    pub fn step(
        &mut self,
        grads: &[Vec<f32>],
        options: &StepOptions,
    ) -> Result<StepReport, OptimError> {
        self.set_grads(grads)?;
        self.finish(options)
    }

    /// One step with the gradients that are there. Collective.
    ///
    /// # Errors
    /// Whatever a rank fails with.
    pub fn finish(&mut self, options: &StepOptions) -> Result<StepReport, OptimError> {
        self.optimizer.step(options)?.wait()
    }

    /// The gathered bytes of every parameter, for forward and backward. Collective.
    ///
    /// # Errors
    /// Whatever a rank fails with.
    pub fn gather(&self, reshard_after_forward: bool) -> Result<Vec<[Bytes; 2]>, OptimError> {
        let pool = GatherPool::new(&Cpu);
        let (comm, tensors) = (self.shards.clone(), self.tensors.clone());
        let mut group = GatherGroup::new(&Cpu, comm, &pool, tensors, reshard_after_forward)?;
        let mut gathered = vec![[Bytes::new(), Bytes::new()]; self.tensors.len()];
        for phase in Phase::ALL {
            group.unshard(phase)?;
            for (index, phases) in gathered.iter_mut().enumerate() {
                phases[phase as usize] = bytes_of(group.tensor(index)?, orientation(phase));
            }
            group.reshard();
        }
        Ok(gathered)
    }

    /// This rank's own state: master, states and shard bytes of every parameter, and the scales
    /// and histories of the book.
    ///
    /// # Errors
    /// The backend failed.
    pub fn state(&self) -> Result<State, OptimError> {
        let mut params = Vec::new();
        for (&id, tensor) in self.ids.iter().zip(&self.tensors) {
            let states = self.optimizer.states(id)?;
            let buffers = tensor.local().buffers().iter();
            let bytes = buffers.map(|b| Cpu.download(&b.storage));
            params.push(ParamState {
                master: bits(&self.optimizer.master(id)?),
                states: states.iter().map(|state| bits(state)).collect(),
                bytes: bytes.collect::<Result<_, _>>()?,
            });
        }
        let book = self.optimizer.scales();
        let scales = bits(&book.scales()?);
        let mut histories = Vec::new();
        for slot in tensor_slots(book)? {
            histories.push(bits(&book.history(slot)?.unwrap_or_default()));
        }
        Ok(State {
            params,
            scales,
            histories,
        })
    }
}

/// The entries of tensors, in the order of [`ScaleBook::scales`]; those of lines come after them.
///
/// # Errors
/// The backend failed.
pub fn tensor_slots(book: &ScaleBook<Cpu>) -> Result<Vec<ScaleSlot>, ShardError> {
    let tensors = book.scales()?.len();
    let mut slots = Vec::new();
    for slot in book.slots() {
        if book.index(slot)? < tensors {
            slots.push(slot);
        }
    }
    Ok(slots)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Everything that a rank owns of one parameter, as bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamState {
    /// Master values.
    pub master: Vec<u32>,
    /// States of its rule.
    pub states: Vec<Vec<u32>>,
    /// The shard's buffers.
    pub bytes: Vec<Vec<u8>>,
}

/// Everything that a rank owns, as bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Per parameter.
    pub params: Vec<ParamState>,
    /// What encoding reads of tensors, by entry of the book.
    pub scales: Vec<u32>,
    /// Amax histories, by entry of a tensor; empty where there is none.
    pub histories: Vec<Vec<u32>>,
}

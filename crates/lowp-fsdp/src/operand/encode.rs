//! [`OperandEncode`]: an operand that stays where it is made: its codes, for the products of one layer.

use lowp_format::{
    BufferList, BufferSpec, Code, KernelKey, Operand, Orientation, Part, Quantizers, Role,
    Rounding, ScaleRule, Shape, Usage,
};
use lowp_kernels::{
    AmaxJob, Backend, EncodeJob, KernelError, RoundJob, Source, StepScalars, StochasticKey, Target,
    TensorInput, Work, bf16,
};
use lowp_shard::{ScaleBook, ScaleBookBuilder, ShardError};
use std::sync::atomic::Ordering;

use super::{RecipeOperands, RegisteredOperand, is_plain};

/// Where values that are rounded go, by orientation: what codes of it decode to, without the codes.
pub type Rounded<B> = [Option<<B as Backend>::Buffer<bf16>>; 2];

/// The part of an operand that is cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandPart {
    /// Tokens x features.
    pub shape: Shape,
    /// The orientations that are asked for.
    pub usage: Usage,
    /// The token of the batch that the first row belongs to: stochastic rounding takes its random numbers by it.
    pub first_token: u64,
}

/// A planned cast of values at one place into the codes that products read.
///
/// Both orientations are cast at once.
#[derive(Debug)]
pub struct OperandEncode<B: Backend> {
    quantizers: Quantizers,
    usage: Usage,
    targets: Vec<Target<B>>,
    /// Decoded values, by orientation.
    values: Rounded<B>,
    /// Amaxes for the scales of later steps.
    observe: Option<B::Plan>,
    /// Observes the amaxes of this cast.
    amax: Option<B::Plan>,
    encode: Option<B::Plan>,
    /// Scales of this tensor alone.
    local: ScaleBook<B>,
}

impl<B: Backend> OperandEncode<B> {
    /// The orientations that are cast; in others products read the values themselves.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// How each orientation is quantized.
    pub fn quantizers(&self) -> &Quantizers {
        &self.quantizers
    }

    /// The buffer that holds `part` for `orientation`.
    pub fn target(&self, orientation: Orientation, part: Part) -> Option<&Target<B>> {
        let mut targets = self.targets.iter();
        targets.find(|target| target.spec.key.serves(orientation, part))
    }

    /// The decoded values of an orientation that has no codes.
    pub fn values(&self, orientation: Orientation) -> Option<&B::Buffer<bf16>> {
        self.values[orientation as usize].as_ref()
    }

    /// The cast alone, where it is all that [`RecipeOperands::run_encode`] runs: no amax is taken first.
    pub fn one_pass(&self) -> Option<&B::Plan> {
        let alone = self.observe.is_none() && self.amax.is_none();
        self.encode.as_ref().filter(|_| alone)
    }

    /// The amaxes that [`RecipeOperands::run_encode`] takes of the values first.
    pub fn amax(&self) -> Option<&B::Plan> {
        self.amax.as_ref()
    }

    /// Bytes of the codes and scales.
    pub fn bytes(&self, backend: &B) -> usize {
        let bytes = |target: &Target<B>| backend.len(&target.bytes);
        self.targets.iter().map(bytes).sum()
    }
}

/// The orientations in which products read codes of `operand`, whose values are `stored`; in others they read the values themselves.
pub fn encoded(operand: &Operand, stored: Code) -> Usage {
    let as_it_is = |kernel: &KernelKey| {
        is_plain(kernel)
            || (kernel.element == stored && kernel.scale == ScaleRule::None && !kernel.hadamard)
    };
    let cast = |o: &Orientation| !as_it_is(&operand.quantizers.of(*o).kernel);
    let cast = Orientation::ALL.into_iter().filter(cast);
    cast.fold(Usage::empty(), |all, o| all | o.usage()) & operand.quantized
}

/// The buffers that a cast of `operand` in `usage` fills where some orientations are `rounded`.
pub fn code_buffers(
    operand: &Operand,
    usage: Usage,
    rounded: impl Fn(Orientation) -> bool,
) -> BufferList {
    let codes = usage.orientations().filter(|o| !rounded(*o));
    let codes = codes.fold(Usage::empty(), |all, o| all | o.usage());
    match codes.is_empty() {
        true => BufferList::new(),
        false => operand.quantizers.buffers(codes),
    }
}

impl<B: Backend> RecipeOperands<B> {
    /// How operands in `role` are quantized; nothing for a weight that is multiplied as it is gathered.
    pub fn operand(&self, role: Role) -> Option<&Operand> {
        self.of_role(role).map(|kind| &kind.operand)
    }

    pub(super) fn of_role(&self, role: Role) -> Option<&RegisteredOperand> {
        match role {
            Role::Activation => Some(&self.plan.activation),
            Role::Gradient => Some(&self.plan.gradient),
            Role::Weight => self.plan.weight.as_ref(),
        }
    }

    /// Plans the cast of `source`, the values of `part`, in its orientations in which products read codes. Buffers that `lend` gives are used instead of new ones. An orientation of `values` is rounded,
    /// and has no codes.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, or no room.
    pub fn plan_encode(
        &self,
        role: Role,
        part: OperandPart,
        source: &Source<B>,
        values: Rounded<B>,
        lend: impl Fn(&BufferSpec) -> Result<Option<B::Buffer<u8>>, KernelError>,
    ) -> Result<OperandEncode<B>, ShardError> {
        let backend = &self.backend;
        let exact = Operand {
            quantized: Usage::empty(),
            ..self.plan.activation.operand
        };
        let exact = RegisteredOperand {
            operand: exact,
            slots: [None; 2],
        };
        let kind = self.of_role(role).unwrap_or(&exact);
        let stored = match source {
            Source::F32(_) => Code::F32,
            Source::Bf16(_) => Code::Bf16,
        };
        let usage = encoded(&kind.operand, stored) & part.usage;
        let specs = code_buffers(&kind.operand, usage, |o| values[o as usize].is_some());
        let mut targets = Vec::new();
        for spec in &specs {
            let bytes = match lend(spec)? {
                Some(bytes) => bytes,
                None => backend.alloc::<u8>(spec.bytes(part.shape))?,
            };
            targets.push(Target::new(*spec, bytes));
        }
        let part = OperandPart { usage, ..part };
        self.planned_encode(kind, part, source, targets, values, role as u64)
    }

    /// Plans the cast of `source` into `targets`, buffers of the usage of `part`, and `values`; `stream` is that of its random numbers among those of the layer.
    pub(super) fn planned_encode(
        &self,
        RegisteredOperand { operand, slots }: &RegisteredOperand,
        part: OperandPart,
        source: &Source<B>,
        targets: Vec<Target<B>>,
        values: Rounded<B>,
        stream: u64,
    ) -> Result<OperandEncode<B>, ShardError> {
        let OperandPart {
            shape,
            usage,
            first_token,
        } = part;
        let backend = &self.backend;
        let quantizers = operand.quantizers;
        let mut planned = OperandEncode {
            quantizers,
            usage,
            targets,
            values,
            observe: None,
            amax: None,
            encode: None,
            local: ScaleBookBuilder::default().build(backend)?,
        };
        if usage.is_empty() {
            return Ok(planned);
        }
        let mut local = ScaleBookBuilder::default();
        let delayed = Orientation::ALL
            .into_iter()
            .filter(|o| slots[*o as usize].is_some())
            .fold(Usage::empty(), |all, o| all | o.usage());
        let own = local.register_operand(&quantizers, shape, usage - delayed);
        planned.local = local.build(backend)?;
        // A buffer of one orientation may serve both.
        let served = planned.targets.iter().map(|target| target.spec.key.usage);
        let served = served.fold(usage, |all, usage| all | usage);
        let used = Orientation::ALL.map(|o| served.contains(o.usage()).then_some(o as usize));
        let earlier = used.map(|at| at.and_then(|at| slots[at]));
        let [mut row, mut col] = planned.local.tensor_inputs(own)?;
        let [row_of_book, col_of_book] = self.book.tensor_inputs(earlier)?;
        row = row_of_book.or(row);
        col = col_of_book.or(col);
        // Random numbers round to E2M1 only.
        let is_e2m1 = |o: Orientation| quantizers.of(o).kernel.element == Code::E2M1;
        let random = operand.rounding == Rounding::Stochastic && usage.orientations().any(is_e2m1);
        let stochastic = random.then(|| StochasticKey {
            seed: self.plan.seed,
            stream: self.plan.stream + stream,
            first: first_token * shape.cols as u64,
        });
        let encode = EncodeJob {
            shape,
            kernels: quantizers.kernels(),
            source: source.clone(),
            source_rounding: operand.source_rounding,
            tensor: [row, col],
            targets: planned.targets.clone(),
            stochastic,
        };
        let plan = |jobs: Vec<AmaxJob<B>>| -> Result<Option<B::Plan>, ShardError> {
            let some = !jobs.is_empty();
            Ok(some.then(|| backend.plan(Work::Amax(jobs))).transpose()?)
        };
        planned.amax = plan(AmaxJob::before(backend, &encode))?;
        let mut seen = Vec::new();
        let mut observe = Vec::new();
        for orientation in Orientation::ALL {
            let at = orientation as usize;
            if let (Some(slot), Some(TensorInput::Known(_))) = (earlier[at], &encode.tensor[at]) {
                let entry = self.book.index(slot)?;
                if seen.contains(&entry) {
                    continue;
                }
                seen.push(entry);
                observe.push(AmaxJob {
                    shape,
                    start: 0,
                    source: source.clone(),
                    source_rounding: operand.source_rounding,
                    out: self.book.observed().clone(),
                    tensor: Some(entry),
                    blocks: Vec::new(),
                    hadamard: quantizers.of(orientation).kernel.hadamard,
                });
            }
        }
        planned.observe = plan(observe)?;
        let rounds = planned.values.iter().any(Option::is_some);
        planned.encode = Some(backend.plan(match rounds {
            true => Work::Round(vec![RoundJob {
                encode,
                values: planned.values.clone(),
            }]),
            false => Work::Encode(vec![encode]),
        })?);
        Ok(planned)
    }

    /// Gives the backend's stream a planned cast. With `agree` scales that are of this step's values are those of all ranks' parts of
    /// the batch, and the call is collective.
    ///
    /// # Errors
    /// The device failed.
    pub fn run_encode(&self, planned: &OperandEncode<B>, agree: bool) -> Result<(), ShardError> {
        if let Some(amax) = &planned.amax {
            self.backend.run(amax, &self.scalars())?;
        }
        self.run_observed(planned, agree)
    }

    fn scalars(&self) -> StepScalars {
        StepScalars {
            random_step: self.pass.step.load(Ordering::Relaxed),
            ..StepScalars::default()
        }
    }

    /// As [`RecipeOperands::run_encode`], where what made the values has raised the amaxes of [`OperandEncode::amax`].
    ///
    /// # Errors
    /// As [`RecipeOperands::run_encode`].
    pub fn run_observed(&self, planned: &OperandEncode<B>, agree: bool) -> Result<(), ShardError> {
        let scalars = self.scalars();
        if let (Some(observe), true) =
            (&planned.observe, self.pass.training.load(Ordering::Relaxed))
        {
            self.backend.run(observe, &scalars)?;
        }
        if planned.amax.is_some() && agree {
            planned.local.agree(&*self.world)?;
        }
        match &planned.encode {
            Some(encode) => Ok(self.backend.run(encode, &scalars)?),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::LayerMemory;
    use crate::operand::OperandPlan;
    use lowp_comm::LocalComm;
    use lowp_format::{AnyRecipe, Part, Recipe};
    use lowp_kernels::{Cpu, DecodeJob};
    use std::sync::Arc;

    const SHAPE: Shape = Shape::new(128, 256);
    const PART: OperandPart = OperandPart {
        shape: SHAPE,
        usage: Usage::BOTH,
        first_token: 0,
    };

    fn values() -> Vec<f32> {
        let value = |i: usize| ((i * 2_654_435_761) % 4001) as f32 / 500.0 - 4.0;
        (0..SHAPE.elements()).map(value).collect()
    }

    fn operands(recipe: &AnyRecipe) -> RecipeOperands<Cpu> {
        let mut book = ScaleBookBuilder::default();
        let plan = OperandPlan::new(recipe, &mut book, 1, 0);
        let book = Arc::new(book.build(&Cpu).expect("a book"));
        let world = Arc::new(LocalComm::solo(&Cpu));
        let memory = LayerMemory::new(&Cpu);
        RecipeOperands::new(&Cpu, plan, book, Arc::default(), world, memory)
    }

    /// Both orientations, cast at once, hold what a cast of each alone gives.
    #[test]
    fn codes_are_those_of_casts_that_are_decoded() {
        let values = values();
        for recipe in AnyRecipe::all() {
            let layer = operands(&recipe);
            let source = Source::F32(Cpu.upload(&values).expect("a source"));
            let planned = layer
                .plan_encode(Role::Activation, PART, &source, [None, None], |_| Ok(None))
                .expect("a plan");
            layer.run_encode(&planned, true).expect("a cast");
            for orientation in Orientation::ALL {
                let expected = layer
                    .cast(
                        Role::Activation,
                        orientation,
                        &values,
                        SHAPE.rows,
                        SHAPE.cols,
                    )
                    .expect("a cast");
                if !planned.usage().contains(orientation.usage()) {
                    assert_eq!(
                        recipe.name(),
                        AnyRecipe::all()[0].name(),
                        "f32 alone is not cast"
                    );
                    continue;
                }
                let find = |part| planned.target(orientation, part).cloned();
                let kernel = planned.quantizers().of(orientation).kernel;
                let outer = kernel.scale.outer().and_then(|(_, part)| find(part));
                let out = Cpu.alloc::<f32>(SHAPE.elements()).expect("room");
                let job = DecodeJob {
                    shape: SHAPE,
                    kernel,
                    data: find(Part::Data).expect("codes"),
                    block_scale: find(Part::BlockScale),
                    tensor_scale: outer.map(|target| target.bytes),
                    out: Source::F32(out.clone()),
                };
                Cpu.once(Work::Decode(vec![job])).expect("a decode");
                let found = Cpu.download(&out).expect("values");
                assert!(found == *expected, "{} {orientation:?}", recipe.name());
            }
        }
    }

    /// Values that are stored as the recipe has them are read as they are.
    #[test]
    fn values_of_the_same_code_are_not_cast() {
        let plain = AnyRecipe::all()[1];
        let layer = operands(&plain);
        let source = Source::Bf16(Cpu.alloc(SHAPE.elements()).expect("a source"));
        let planned = layer
            .plan_encode(Role::Gradient, PART, &source, [None, None], |_| Ok(None))
            .expect("a plan");
        assert!(planned.usage().is_empty(), "{}", plain.name());
    }
}

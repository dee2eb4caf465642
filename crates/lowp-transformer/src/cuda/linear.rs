//! [`Linear`]: a linear layer over a weight that lives in a recipe. It multiplies codes where the device does, and decoded values elsewhere.

#![expect(
    unsafe_code,
    reason = "gives cuBLASLt addresses of operands whose shapes were planned"
)]

use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use lowp_format::{Buffer, Orientation, Part, Phase, QuantizedTensor, Recipe, Role, Shape};
use lowp_fsdp::{ShardedModel, ShardedWeight};
use lowp_gemm::table::{self, Pass};
use lowp_gemm::{Dtype, GemmDesc, GemmKind, Operand, Scalars, ScaleMode};
use lowp_kernels::{
    Backend, Cuda, CudaBuffer, CudaPlan, DecodeJob, KernelError, Source, StepScalars,
};
use lowp_shard::GatherWatch;

use super::TransformerError;
use super::documents::Documents;
use super::gemms::Gemms;
use super::operand::{CastOperand, OperandValues, plan_repack};
use super::ops::Ops;
use super::place::Arena;
use super::sdpa::{Sdpa, SdpaSizes};
use super::trace::{GATHERS, Trace};
use crate::known::Known;
use crate::linear_plan::{FACTORS, LinearPlan, WeightUse};
use crate::places::{CudnnPasses, ModelPlaces, OperandNames};

/// The tokens of a batch and where they begin in the batch of all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) tokens: usize,
    pub(super) first: u64,
}

/// What the layers of a model share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) cuda: Cuda,
    pub(super) ops: Ops,
    pub(super) gemms: Gemms,
    pub(super) arena: Arena,
    pub(super) places: ModelPlaces,
    pub(super) trace: Arc<Trace>,
    pub(super) capability: (i32, i32),
    /// The passes of attention that may run by cuDNN.
    pub(super) cudnn: CudnnPasses,
    pub(super) agree_amaxes: bool,
    pub(super) prefetch: bool,
    /// Planned attention, or why cuDNN does not run it: blocks of equal sizes have one.
    pub(super) sdpa: Known<SdpaSizes, Result<Arc<Sdpa>, String>>,
    /// What tokens see, where documents are apart.
    pub(super) documents: Option<Documents>,
}

impl Shared {
    /// Which passes of attention run by cuDNN, and why others do not.
    pub(super) fn attention(&self) -> (CudnnPasses, Option<String>) {
        if self.cudnn == CudnnPasses::None {
            return (CudnnPasses::None, Some("cuDNN is left out".to_owned()));
        }
        let planned = self.sdpa.values();
        if let Some(why) = planned.iter().find_map(|made| made.as_ref().err()) {
            return (CudnnPasses::None, Some(why.clone()));
        }
        let mut planned = planned.iter().flatten();
        match planned.find_map(|sdpa| sdpa.forward_only()) {
            Some(why) => (CudnnPasses::Forward, Some(why.to_owned())),
            None => (self.cudnn, None),
        }
    }

    /// Attention by cuDNN, where it runs it.
    pub(super) fn sdpa(&self, sizes: &SdpaSizes) -> Done<Option<Arc<Sdpa>>> {
        if self.cudnn == CudnnPasses::None {
            return Ok(None);
        }
        let made = self.sdpa.of(sizes, || {
            let made = Sdpa::new(&self.cuda, &self.arena, sizes)?;
            Done::Ok(made.map(Arc::new))
        })?;
        Ok(made.ok())
    }
}

type Done<T = ()> = Result<T, TransformerError>;

/// A linear layer over `tokens` tokens.
#[derive(Debug)]
pub(super) struct Linear<R: Recipe> {
    shared: Arc<Shared>,
    weight: Arc<ShardedWeight<Cuda, R>>,
    recipe: R,
    /// Of the weight: outputs x inputs.
    shape: Shape,
    tokens: usize,
    /// What forward multiplies; layers that read the same may have one.
    pub(super) input: Arc<CastOperand>,
    /// The gradient of what forward makes, when backward runs.
    pub(super) gradient: CastOperand,
    plan: LinearPlan,
    /// The values of the weight in each phase whose product reads them decoded.
    decoded: [Option<CudaBuffer<bf16>>; 2],
    /// What is planned over the memory that the weight is gathered in.
    weights: Mutex<Vec<(Gathered, WeightPlan)>>,
}

/// The memory that a weight is gathered in, and the phase that it is gathered for.
type Gathered = (Option<u64>, Phase);

/// What becomes of a gathered weight that is multiplied as it is ([`WeightUse`]), planned.
#[derive(Clone, Debug)]
enum WeightPlan {
    AsItIs,
    Repack(CudaPlan, CudaBuffer<u8>),
}

/// The memory of a layer.
#[derive(Debug)]
pub(super) struct LinearMemory<'a> {
    /// What the operands are called in the plan of memory.
    pub(super) names: &'a OperandNames,
    /// Where the gradient of the output will be.
    pub(super) gradient: CudaBuffer<bf16>,
    /// What an activation reads that makes the input: a matrix of its shape.
    pub(super) before: Option<&'a CudaBuffer<bf16>>,
    /// What an activation reads that makes the gradient.
    pub(super) after: Option<&'a CudaBuffer<bf16>>,
}

impl<R: Recipe> Linear<R> {
    /// Layer `index` of `model`, over the tokens of `span`. `readers` are layers before it that read the same input.
    pub(super) fn new<'a>(
        shared: &Arc<Shared>,
        model: &ShardedModel<Cuda, R>,
        index: usize,
        span: Span,
        memory: LinearMemory<'_>,
        mut readers: impl Iterator<Item = &'a Self>,
    ) -> Done<Self>
    where
        R: 'a,
    {
        let Span { tokens, first } = span;
        let names = memory.names;
        let missing =
            || TransformerError::Unsupported(format!("the model has no linear layer {index}"));
        let weight = Arc::clone(model.weight(index).ok_or_else(missing)?);
        let trace = Arc::clone(&shared.trace);
        weight.watch_gathers(GatherWatch::new(move |stream, point| {
            trace.mark_gather(stream, point)
        }))?;
        let operands = model.operands().get(index).ok_or_else(missing)?;
        let (recipe, shape) = (weight.recipe(), weight.full_shape());
        table::check(&recipe)?;
        let plan = LinearPlan::new(&recipe, shape, tokens, names, shared.capability);
        let plan = plan.map_err(KernelError::from)?;
        let cast = |role, width, values, activated| {
            let of = OperandValues {
                values,
                shape: Shape::new(tokens, width),
                first_token: first,
                activated,
            };
            CastOperand::new(shared, operands, &plan, role, of)
        };
        let read = |activation: Option<&CudaBuffer<bf16>>| {
            activation.cloned().ok_or_else(|| {
                TransformerError::Unsupported(format!("no activation before linear layer {index}"))
            })
        };
        let input = match readers.find(|other| other.plan.shares_input(&plan)) {
            Some(other) => Arc::clone(&other.input),
            None => {
                let values = match &plan.input {
                    Some(place) => shared.arena.values(place)?,
                    None => read(memory.before)?,
                };
                Arc::new(cast(Role::Activation, shape.cols, values, names.activated)?)
            }
        };
        let gradient = match plan.gradient_is_made {
            true => read(memory.after)?,
            false => memory.gradient,
        };
        let activated = names.gradient.is_some();
        let gradient = cast(Role::Gradient, shape.rows, gradient, activated)?;
        let mut decoded = [None, None];
        for (decoded, weight) in decoded.iter_mut().zip(&plan.weights) {
            if let WeightUse::Decode(place) = weight {
                *decoded = Some(shared.arena.values(place)?);
            }
        }
        Ok(Self {
            shared: Arc::clone(shared),
            weight,
            recipe,
            shape,
            tokens,
            input,
            gradient,
            decoded,
            plan,
            weights: Mutex::default(),
        })
    }

    /// Which product runs in each pass.
    pub(super) fn products(&self) -> [GemmKind; 3] {
        self.plan.products
    }

    /// Starts the gather of the weight for `phase`.
    pub(super) fn prefetch(&self, phase: Phase) -> Done {
        match self.shared.prefetch {
            true => Ok(self.weight.prefetch(phase)?),
            false => Ok(()),
        }
    }

    /// Starts the gathers of the weight for forward again, and for backward after it.
    pub(super) fn gather_again(&self) -> Done {
        Ok(self.weight.gather_again()?)
    }

    /// `out = input W^T`, `[tokens, outputs]`, of an input that is cast and prepared.
    pub(super) fn forward(&self, out: &CudaBuffer<bf16>) -> Done {
        let x = self.input.operand(Pass::Forward)?;
        self.with_weight(Phase::Forward, |w| {
            let out = super::place::at(out, self.tokens * self.shape.rows)?;
            // SAFETY: operands and result have the shapes that the layer was made for.
            unsafe { self.multiply(Pass::Forward, [&x, &w], out, Dtype::Bf16, false) }
        })
    }

    /// From the gradient of what forward made: `dx = dy W`, `[tokens, inputs]`, added to what is there with `accumulate`.
    pub(super) fn input_grad(&self, dx: &CudaBuffer<bf16>, accumulate: bool) -> Done {
        self.gradient.cast()?;
        self.gradient.prepare(Pass::InputGrad)?;
        let dy = self.gradient.operand(Pass::InputGrad)?;
        self.with_weight(Phase::Backward, |w| {
            let dx = super::place::at(dx, self.tokens * self.shape.cols)?;
            // SAFETY: as in `forward`.
            unsafe { self.multiply(Pass::InputGrad, [&dy, &w], dx, Dtype::Bf16, accumulate) }
        })
    }

    /// The gradient of the weight, which goes to its owners, from that of what forward made, once `input_grad` has cast it, and an input that
    /// is prepared.
    pub(super) fn weight_grad(&self) -> Done {
        let Shape { rows, cols } = self.shape;
        self.gradient.prepare(Pass::WeightGrad)?;
        let dy = self.gradient.operand(Pass::WeightGrad)?;
        let x = self.input.operand(Pass::WeightGrad)?;
        let (out, dtype) = match self.weight.gradient()? {
            Source::F32(buffer) => (super::place::at(&buffer, rows * cols)?, Dtype::F32),
            Source::Bf16(buffer) => (super::place::at(&buffer, rows * cols)?, Dtype::Bf16),
        };
        // SAFETY: as in `forward`.
        unsafe { self.multiply(Pass::WeightGrad, [&dy, &x], out, dtype, false) }?;
        self.weight.push_gradient()?;
        self.mark("gradients to their owners")
    }

    fn mark(&self, what: &str) -> Done {
        Ok(self.shared.trace.mark(|| what.to_owned())?)
    }

    /// Gives the stream `out = left right`, the product of `pass`, or with `accumulate` adds that to `out`.
    ///
    /// # Safety
    /// Operands and result have the sizes of the pass, in memory that is not freed before work that the stream has by now.
    unsafe fn multiply(
        &self,
        pass: Pass,
        [left, right]: [&Operand; 2],
        out: u64,
        dtype: Dtype,
        accumulate: bool,
    ) -> Done {
        let Shared {
            gemms, ops, arena, ..
        } = &*self.shared;
        let sizes = pass.sizes(self.shape, self.tokens);
        let two_level = self.plan.products[pass as usize] == GemmKind::Fp4Groups16;
        let desc = GemmDesc {
            // cuBLASLt has scales by block only for sums in f32.
            fast_accum: pass == Pass::Forward && left.desc.scale == ScaleMode::Tensor,
            ..GemmDesc::new(sizes, [left.desc, right.desc], dtype)
        };
        let scalars = if two_level {
            let made = arena.sums(&FACTORS)?;
            let reciprocal = 1.0 / (left.largest * right.largest);
            ops.two_level_factors([left.amax, right.amax], reciprocal, &made)?;
            let at = |index: u64| made.pointer() + index * size_of::<f32>() as u64;
            Scalars::Device {
                alpha: at(0),
                beta: at(1 + u64::from(accumulate)),
            }
        } else {
            Scalars::Host {
                alpha: 1.0,
                beta: f32::from(u8::from(accumulate)),
            }
        };
        // SAFETY: the caller's promise; scalars on the device are the arena's.
        unsafe { gemms.run(&desc, [left.ptr, right.ptr], out, scalars) }
    }

    /// The values of the weight where they are decoded for `phase`.
    pub(super) fn decoded(&self, phase: Phase) -> Option<&CudaBuffer<bf16>> {
        self.decoded[phase as usize].as_ref()
    }

    /// Whether its weight and that of `other` are gathered together.
    pub(super) fn is_gathered_with(&self, other: &Self) -> Done<bool> {
        Ok(self.weight.is_with(&other.weight)?)
    }

    /// Gathers a weight that is decoded for `phase`, and gives `enqueue` what makes its job and the number of the memory that it is in.
    pub(super) fn with_gathered(
        &self,
        phase: Phase,
        enqueue: impl FnOnce(&dyn Fn() -> Done<DecodeJob<Cuda>>, Option<u64>) -> Done,
    ) -> Done {
        self.weight.with_gathered(phase, |tensor, set| {
            let job = || {
                let values = self.decoded(phase).ok_or_else(|| KernelError::Missing {
                    what: format!("the values of a weight for {phase:?}"),
                })?;
                let values = Source::Bf16(values.clone());
                let job = DecodeJob::new(tensor, orientation(phase), values);
                Ok(job.map_err(KernelError::from)?)
            };
            enqueue(&job, set)
        })
    }

    /// Gives the weight to `multiply`: its values, which are decoded, or what is gathered of it for `phase`.
    fn with_weight(&self, phase: Phase, multiply: impl FnOnce(Operand) -> Done) -> Done {
        if let Some(values) = self.decoded(phase) {
            let k_inner = phase == Phase::Forward;
            return multiply(Operand::values(values.pointer(), k_inner));
        }
        self.weight.with_gathered(phase, |tensor, set| {
            self.mark(GATHERS)?;
            let operand = self.weight_operand(phase, tensor, set)?;
            multiply(operand)
        })
    }

    fn weight_operand(
        &self,
        phase: Phase,
        tensor: &QuantizedTensor<CudaBuffer<u8>, R>,
        set: Option<u64>,
    ) -> Done<Operand> {
        let orientation = orientation(phase);
        let product = match phase {
            Phase::Forward => self.plan.products[Pass::Forward as usize],
            Phase::Backward => self.plan.products[Pass::InputGrad as usize],
        };
        if product == GemmKind::Bf16 {
            // bf16, row-major for both phases.
            let values = tensor.data(orientation).map_err(KernelError::from)?;
            let k_inner = phase == Phase::Forward;
            return Ok(Operand::values(values.storage.pointer(), k_inner));
        }
        let plan = self.weight_plan((set, phase), tensor, orientation)?;
        let find = |part| {
            tensor
                .part(orientation, part)
                .map(|buffer| (&buffer.spec, &buffer.storage))
        };
        let kernel = self.recipe.kernel(orientation);
        let mut operand = Operand::codes(product, orientation, &kernel, find)?;
        if let WeightPlan::Repack(repack, padded) = &plan {
            self.shared.cuda.run(repack, &StepScalars::default())?;
            operand.ptr.scale = padded.pointer();
        }
        Ok(operand)
    }

    fn weight_plan(
        &self,
        key: Gathered,
        tensor: &QuantizedTensor<CudaBuffer<u8>, R>,
        orientation: Orientation,
    ) -> Done<WeightPlan> {
        let mut known = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plan)) = known.iter().find(|(other, _)| *other == key) {
            return Ok(plan.clone());
        }
        let Shared { cuda, arena, .. } = &*self.shared;
        let (_, phase) = key;
        let scales = tensor.part(orientation, Part::BlockScale);
        let plan = match (&self.plan.weights[phase as usize], scales) {
            (WeightUse::Repack { form, place }, Some(buffer)) => {
                let to = arena.codes(place)?;
                let Buffer { spec, storage } = buffer;
                let plan = plan_repack(cuda, spec, storage, self.shape, orientation, *form, &to)?;
                WeightPlan::Repack(plan, to)
            }
            _ => WeightPlan::AsItIs,
        };
        known.push((key, plan.clone()));
        Ok(plan)
    }
}

/// The orientation of a weight that products of `phase` read.
const fn orientation(phase: Phase) -> Orientation {
    match phase {
        Phase::Forward => Orientation::Rowwise,
        Phase::Backward => Orientation::Columnwise,
    }
}

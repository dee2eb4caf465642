//! [`Linear`]: a linear layer over a weight that lives in a recipe. It multiplies codes where the device does, and decoded values elsewhere.

#![expect(
    unsafe_code,
    reason = "gives cuBLASLt addresses of operands whose shapes were planned"
)]

use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use lowp_format::{
    BufferSpec, Form, Orientation, Part, Phase, QuantizedTensor, Recipe, Role, ScaleLayout, Shape,
    Usage,
};
use lowp_fsdp::{OperandEncode, RecipeOperands, Rounded, ShardedModel, ShardedWeight};
use lowp_gemm::table::{self, Pass};
use lowp_gemm::{Dtype, GemmDesc, GemmKind, Operand, Scalars, ScaleMode};
use lowp_kernels::{
    Backend, Cuda, CudaBuffer, CudaPlan, DecodeJob, KernelError, RepackJob, Source, StepScalars,
    Work,
};
use lowp_shard::GatherWatch;

use super::TransformerError;
use super::documents::Documents;
use super::gemms::Gemms;
use super::ops::Ops;
use super::place::Arena;
use super::sdpa::{Sdpa, SdpaSizes};
use super::trace::{GATHERS, Trace};
use crate::known::Known;
use crate::linear_plan::{Decode, FACTORS, LinearPlan, Repack, WeightUse};
use crate::places::{CudnnPasses, ModelPlaces, Place};

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
    operands: Arc<RecipeOperands<Cuda>>,
    recipe: R,
    /// Of the weight: outputs x inputs.
    shape: Shape,
    tokens: usize,
    /// What forward multiplies.
    pub(super) input: CudaBuffer<bf16>,
    /// The gradient of what forward makes, when backward runs.
    pub(super) gradient: CudaBuffer<bf16>,
    x: OperandEncode<Cuda>,
    dy: OperandEncode<Cuda>,
    plan: LinearPlan,
    /// Planned decodes of this layer's operands.
    decodes: Vec<DecodeOfOperand>,
    /// Planned copies of their block scales, as products read them.
    repacks: Vec<RepackOfOperand>,
    /// What is planned over the memory that the weight is gathered in.
    weights: Mutex<Vec<(Gathered, WeightPlan)>>,
}

/// What is planned for an operand, and where it goes.
type DecodeOfOperand = ((Role, Orientation), CudaPlan, CudaBuffer<bf16>);
type RepackOfOperand = ((Role, Orientation), CudaPlan, CudaBuffer<u8>);

/// The memory that a weight is gathered in, and the phase that it is gathered for.
type Gathered = (Option<u64>, Phase);

/// What becomes of a gathered weight before it is multiplied ([`WeightUse`]), planned.
#[derive(Clone, Debug)]
enum WeightPlan {
    AsItIs,
    Decode(CudaPlan, CudaBuffer<bf16>),
    Repack(CudaPlan, CudaBuffer<u8>),
}

impl<R: Recipe> Linear<R> {
    /// Layer `index` of `model`, over `tokens` tokens the first of which is `first_token` of the batch. `gradient` is where its output's
    /// gradient will be. Where codes of the input outlive it, it is the memory named first, else the one named second.
    pub(super) fn new(
        shared: &Arc<Shared>,
        model: &ShardedModel<Cuda, R>,
        index: usize,
        (tokens, first_token): (usize, u64),
        gradient: &CudaBuffer<bf16>,
        inputs: [&'static str; 2],
    ) -> Done<Self> {
        let missing =
            || TransformerError::Unsupported(format!("the model has no linear layer {index}"));
        let weight = Arc::clone(model.weight(index).ok_or_else(missing)?);
        let trace = Arc::clone(&shared.trace);
        weight.watch_gathers(GatherWatch::new(move |stream, point| {
            trace.mark_gather(stream, point)
        }))?;
        let operands = Arc::clone(model.operands().get(index).ok_or_else(missing)?);
        let (recipe, shape) = (weight.recipe(), weight.full_shape());
        let arena = &shared.arena;
        table::check(&recipe)?;
        let plan = LinearPlan::new(&recipe, shape, tokens, inputs, shared.capability);
        let plan = plan.map_err(KernelError::from)?;
        let input = arena.values(&plan.input)?;
        let lend = |places: &[Place], spec: &BufferSpec| {
            let place = places.iter().find(|place| place.spec == Some(*spec));
            place.map(|place| arena.codes(place)).transpose()
        };
        let rows = Shape::new(tokens, shape.cols);
        let rounded = |role| -> Done<Rounded<Cuda>> {
            let mut values = [None, None];
            for of in plan.rounded.iter().filter(|of| of.role == role) {
                values[of.orientation as usize] = Some(arena.values(&of.to)?);
            }
            Ok(values)
        };
        let x = operands.plan_encode(
            Role::Activation,
            (rows, Usage::BOTH, first_token),
            (&Source::Bf16(input.clone()), rounded(Role::Activation)?),
            |spec| lend(&plan.x, spec),
        )?;
        let outputs = Shape::new(tokens, shape.rows);
        let dy = operands.plan_encode(
            Role::Gradient,
            (outputs, Usage::BOTH, first_token),
            (&Source::Bf16(gradient.clone()), rounded(Role::Gradient)?),
            |spec| lend(&plan.dy, spec),
        )?;
        let mut layer = Self {
            shared: Arc::clone(shared),
            weight,
            operands,
            recipe,
            shape,
            tokens,
            input,
            gradient: gradient.clone(),
            x,
            dy,
            plan,
            decodes: Vec::new(),
            repacks: Vec::new(),
            weights: Mutex::default(),
        };
        layer.decodes = layer.plan_decodes()?;
        layer.repacks = layer.plan_repacks()?;
        Ok(layer)
    }

    /// The cast of an input or gradient, and the shape of its matrix.
    fn encode(&self, role: Role) -> (&OperandEncode<Cuda>, Shape) {
        let (encode, width) = match role {
            Role::Gradient => (&self.dy, self.shape.rows),
            Role::Activation | Role::Weight => (&self.x, self.shape.cols),
        };
        (encode, Shape::new(self.tokens, width))
    }

    /// Plans the decodes of operands that hold codes for products of values.
    fn plan_decodes(&self) -> Done<Vec<DecodeOfOperand>> {
        let Shared { cuda, arena, .. } = &*self.shared;
        let planned = self.plan.decodes.iter().map(|decode| {
            let Decode {
                role,
                orientation,
                from,
                to,
            } = decode;
            let (encode, shape) = self.encode(*role);
            let kernel = encode.quantizers().of(*from).kernel;
            let find = |part| encode.target(*from, part).cloned();
            let data = find(Part::Data).ok_or_else(|| KernelError::Missing {
                what: format!("the {} codes of an operand", from.usage()),
            })?;
            let outer = kernel.scale.outer().and_then(|(_, part)| find(part));
            let out = arena.values(to)?;
            let job = DecodeJob {
                shape,
                kernel,
                data,
                block_scale: find(Part::BlockScale),
                tensor_scale: outer.map(|target| target.bytes),
                out: Source::Bf16(out.clone()),
            };
            let plan = cuda.plan(Work::Decode(vec![job]))?;
            Ok(((*role, *orientation), plan, out))
        });
        planned.collect()
    }

    /// Plans the copies of block scales of operands into the form that products read.
    fn plan_repacks(&self) -> Done<Vec<RepackOfOperand>> {
        let Shared { cuda, arena, .. } = &*self.shared;
        let mut planned = Vec::new();
        for repack in &self.plan.repacks {
            let Repack {
                role,
                orientation,
                form,
                to,
            } = repack;
            let (encode, shape) = self.encode(*role);
            let Some(target) = encode.target(*orientation, Part::BlockScale) else {
                continue;
            };
            let to = arena.codes(to)?;
            let from = (&target.spec, &target.bytes);
            let plan = plan_repack(cuda, from, shape, (*orientation, *form), &to)?;
            planned.push(((*role, *orientation), plan, to));
        }
        Ok(planned)
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

    /// `out = input W^T`, `[tokens, outputs]`.
    pub(super) fn forward(&self, out: &CudaBuffer<bf16>) -> Done {
        let agree = self.shared.agree_amaxes;
        self.operands.run_encode(&self.x, agree)?;
        self.mark("cast of inputs")?;
        let x = self.operand(Pass::Forward, Role::Activation)?;
        self.with_weight(Phase::Forward, |w| {
            let out = super::place::at(out, self.tokens * self.shape.rows)?;
            // SAFETY: operands and result have the shapes that the layer was made for.
            unsafe { self.multiply(Pass::Forward, [&x, &w], (out, Dtype::Bf16), false) }
        })
    }

    /// From the gradient of what forward made: `dx = dy W`, `[tokens, inputs]`, added to what is there with `accumulate`, and the
    /// weight's gradient, which goes to its owners.
    pub(super) fn backward(&self, dx: &CudaBuffer<bf16>, accumulate: bool) -> Done {
        let Shape { rows, cols } = self.shape;
        let agree = self.shared.agree_amaxes;
        self.operands.run_encode(&self.dy, agree)?;
        self.mark("cast of gradients")?;
        let dy = self.operand(Pass::InputGrad, Role::Gradient)?;
        self.with_weight(Phase::Backward, |w| {
            let dx = super::place::at(dx, self.tokens * cols)?;
            // SAFETY: as in `forward`.
            unsafe { self.multiply(Pass::InputGrad, [&dy, &w], (dx, Dtype::Bf16), accumulate) }
        })?;
        let dy = self.operand(Pass::WeightGrad, Role::Gradient)?;
        let x = self.operand(Pass::WeightGrad, Role::Activation)?;
        let out = match self.weight.gradient()? {
            Source::F32(buffer) => (super::place::at(&buffer, rows * cols)?, Dtype::F32),
            Source::Bf16(buffer) => (super::place::at(&buffer, rows * cols)?, Dtype::Bf16),
        };
        // SAFETY: as in `forward`.
        unsafe { self.multiply(Pass::WeightGrad, [&dy, &x], out, false) }?;
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
        (out, dtype): (u64, Dtype),
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

    /// An input or gradient as `pass` reads it.
    fn operand(&self, pass: Pass, role: Role) -> Done<Operand> {
        let product = self.plan.products[pass as usize];
        let orientation = pass
            .operands()
            .into_iter()
            .find(|(r, _)| *r == role)
            .map_or(Orientation::Rowwise, |(_, o)| o);
        let (encode, _) = self.encode(role);
        let values = match role {
            Role::Gradient => &self.gradient,
            Role::Activation | Role::Weight => &self.input,
        };
        if product != GemmKind::Bf16 {
            let find = |part| {
                encode
                    .target(orientation, part)
                    .map(|target| (&target.spec, &target.bytes))
            };
            let kernel = encode.quantizers().of(orientation).kernel;
            let mut operand = Operand::codes(product, orientation, &kernel, find)?;
            let mut planned = self.repacks.iter();
            if let Some((_, repack, scales)) = planned.find(|(key, ..)| *key == (role, orientation))
            {
                self.shared.cuda.run(repack, &StepScalars::default())?;
                operand.ptr.scale = scales.pointer();
            }
            return Ok(operand);
        }
        let k_inner = orientation == Orientation::Rowwise;
        if let Some(rounded) = encode.values(orientation) {
            return Ok(Operand::values(rounded.pointer(), k_inner));
        }
        let planned = self
            .decodes
            .iter()
            .find(|(key, ..)| *key == (role, orientation));
        let Some((_, decode, values)) = planned else {
            return Ok(Operand::values(values.pointer(), k_inner));
        };
        self.shared.cuda.run(decode, &StepScalars::default())?;
        self.mark("decode of operands")?;
        Ok(Operand::values(values.pointer(), k_inner))
    }

    /// Gathers the weight for `phase` and gives it to `multiply`.
    fn with_weight(&self, phase: Phase, multiply: impl FnOnce(Operand) -> Done) -> Done {
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
        let (orientation, product) = match phase {
            Phase::Forward => (
                Orientation::Rowwise,
                self.plan.products[Pass::Forward as usize],
            ),
            Phase::Backward => (
                Orientation::Columnwise,
                self.plan.products[Pass::InputGrad as usize],
            ),
        };
        let cuda = &self.shared.cuda;
        let plan = self.weight_plan((set, phase), tensor, orientation)?;
        let find = |part| {
            tensor
                .part(orientation, part)
                .map(|buffer| (&buffer.spec, &buffer.storage))
        };
        if product != GemmKind::Bf16 {
            let kernel = self.recipe.kernel(orientation);
            let mut operand = Operand::codes(product, orientation, &kernel, find)?;
            if let WeightPlan::Repack(repack, padded) = &plan {
                cuda.run(repack, &StepScalars::default())?;
                operand.ptr.scale = padded.pointer();
            }
            return Ok(operand);
        }
        let k_inner = orientation == Orientation::Rowwise;
        let WeightPlan::Decode(decode, values) = plan else {
            // bf16, row-major for both phases.
            return Ok(Operand::values(
                tensor
                    .data(orientation)
                    .map_err(KernelError::from)?
                    .storage
                    .pointer(),
                k_inner,
            ));
        };
        cuda.run(&decode, &StepScalars::default())?;
        self.mark("decode of weights")?;
        Ok(Operand::values(values.pointer(), k_inner))
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
            (WeightUse::Decode(place), _) => {
                let out = arena.values(place)?;
                let job = DecodeJob::new(tensor, orientation, Source::Bf16(out.clone()))
                    .map_err(KernelError::from)?;
                WeightPlan::Decode(cuda.plan(Work::Decode(vec![job]))?, out)
            }
            (WeightUse::Repack { form, place }, Some(buffer)) => {
                let to = arena.codes(place)?;
                let from = (&buffer.spec, &buffer.storage);
                let plan = plan_repack(cuda, from, self.shape, (orientation, *form), &to)?;
                WeightPlan::Repack(plan, to)
            }
            (WeightUse::AsItIs | WeightUse::Repack { .. }, _) => WeightPlan::AsItIs,
        };
        known.push((key, plan.clone()));
        Ok(plan)
    }
}

/// Plans a copy of block scales of a matrix of `shape` from their Compact form to `form`.
fn plan_repack(
    cuda: &Cuda,
    (spec, from): (&BufferSpec, &CudaBuffer<u8>),
    shape: Shape,
    (orientation, form): (Orientation, Form),
    to: &CudaBuffer<u8>,
) -> Done<CudaPlan> {
    let layout = |form| ScaleLayout::new(spec, shape, orientation, form).map_err(KernelError::from);
    let job = RepackJob {
        from_layout: layout(Form::Compact)?,
        to_layout: layout(form)?,
        from: from.clone(),
        to: to.clone(),
    };
    Ok(cuda.plan(Work::Repack(vec![job]))?)
}

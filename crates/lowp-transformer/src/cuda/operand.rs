//! [`CastOperand`]: an input or gradient of linear layers, with its cast and what products read of that.

use std::sync::Arc;

use half::bf16;
use lowp_format::{BufferSpec, Form, Orientation, Part, Role, ScaleLayout, Shape, Usage};
use lowp_fsdp::{OperandEncode, OperandPart, RecipeOperands};
use lowp_gemm::table::Pass;
use lowp_gemm::{GemmKind, Operand};
use lowp_kernels::{
    Backend, Cuda, CudaBuffer, CudaPlan, DecodeJob, Element, KernelError, RepackJob, Source,
    StepScalars, Target, Work,
};

use super::TransformerError;
use super::activation::Made;
use super::linear::Shared;
use crate::linear_plan::{Decode, LinearPlan, Repack};

type Done<T = ()> = Result<T, TransformerError>;

/// What is planned for an orientation.
#[derive(Debug)]
struct Planned<T: Element> {
    orientation: Orientation,
    plan: CudaPlan,
    /// Where it goes.
    to: CudaBuffer<T>,
}

/// A cast that the backward pass of an activation does.
#[derive(Debug)]
struct MadeAgain {
    cast: OperandEncode<Cuda>,
    /// The address of its job.
    job: u64,
}

/// The values of an operand of a layer.
#[derive(Clone, Debug)]
pub(super) struct OperandValues {
    pub(super) values: CudaBuffer<bf16>,
    pub(super) shape: Shape,
    /// The token of the batch that the first row belongs to.
    pub(super) first_token: u64,
    /// Whether an activation makes them. If it also rounds them, `values` are what it reads.
    pub(super) activated: bool,
}

/// What the activation that makes an operand does of its cast, by the address of the job.
#[derive(Clone, Copy, Debug)]
enum Job {
    Nothing,
    /// Its amaxes.
    Amax(u64),
    /// All of it.
    Round(u64),
}

/// An input or gradient of linear layers, cast as their recipe says. Layers that read the same input may have one.
#[derive(Debug)]
pub(super) struct CastOperand {
    shared: Arc<Shared>,
    operands: Arc<RecipeOperands<Cuda>>,
    role: Role,
    shape: Shape,
    /// What is cast; where an activation makes it, a matrix of its shape that the activation reads.
    pub(super) values: CudaBuffer<bf16>,
    cast: OperandEncode<Cuda>,
    /// What an activation does that makes it.
    job: Job,
    /// The cast of its columns, where backward makes it again.
    again: Option<MadeAgain>,
    /// The products of the layers.
    products: [GemmKind; 3],
    /// Planned decodes of its codes.
    decodes: Vec<Planned<bf16>>,
    /// Planned copies of its block scales, as products read them.
    repacks: Vec<Planned<u8>>,
}

impl CastOperand {
    /// The operand in `role` of a layer with this plan.
    pub(super) fn new(
        shared: &Arc<Shared>,
        operands: &Arc<RecipeOperands<Cuda>>,
        plan: &LinearPlan,
        role: Role,
        of: OperandValues,
    ) -> Done<Self> {
        let OperandValues {
            values,
            shape,
            first_token,
            activated,
        } = of;
        let arena = &shared.arena;
        let mut rounded = [None, None];
        for of in plan.rounded.iter().filter(|of| of.role == role) {
            rounded[of.orientation as usize] = Some(arena.values(&of.to)?);
        }
        let places = match role {
            Role::Gradient => &plan.dy,
            Role::Activation | Role::Weight => &plan.x,
        };
        let lend = |spec: &BufferSpec| {
            let place = places.iter().find(|place| place.spec == Some(*spec));
            place.map(|place| arena.codes(place)).transpose()
        };
        let plan_cast = |usage, rounded| {
            let source = Source::Bf16(values.clone());
            let part = OperandPart {
                shape,
                usage,
                first_token,
            };
            operands.plan_encode(role, part, &source, rounded, lend)
        };
        let rounding = |cast: &OperandEncode<Cuda>| {
            let job = cast.one_pass().and_then(CudaPlan::rounds_of_blocks);
            job.ok_or_else(|| KernelError::Missing {
                what: format!("a rounding of blocks of a {role:?}"),
            })
        };
        let (cast, again) = match (role, rounded) {
            (Role::Activation, [rows, columns]) if plan.input_is_made_again => {
                let again = plan_cast(Usage::COLUMNWISE, [None, columns])?;
                let job = rounding(&again)?;
                let again = MadeAgain { cast: again, job };
                (plan_cast(Usage::ROWWISE, [rows, None])?, Some(again))
            }
            (_, rounded) => (plan_cast(Usage::BOTH, rounded)?, None),
        };
        let is_rounded = match role {
            Role::Gradient => plan.gradient_is_made,
            Role::Activation | Role::Weight => plan.input.is_none(),
        };
        let amax = cast.amax().filter(|_| activated);
        // Activations raise amaxes by whole tiles of 32 x 8.
        let amax = amax.filter(|_| shape.rows.is_multiple_of(32) && shape.cols.is_multiple_of(8));
        let job = match (is_rounded, amax.and_then(CudaPlan::amaxes_of_matrix)) {
            (true, _) => Job::Round(rounding(&cast)?),
            (false, Some(job)) => Job::Amax(job),
            (false, None) => Job::Nothing,
        };
        let mut made = Self {
            shared: Arc::clone(shared),
            operands: Arc::clone(operands),
            role,
            shape,
            values,
            cast,
            job,
            again,
            products: plan.products,
            decodes: Vec::new(),
            repacks: Vec::new(),
        };
        let decodes = plan.decodes.iter().filter(|decode| decode.role == role);
        made.decodes = decodes
            .map(|decode| made.plan_decode(decode))
            .collect::<Result<_, _>>()?;
        for repack in plan.repacks.iter().filter(|repack| repack.role == role) {
            made.repacks.extend(made.plan_repack(repack)?);
        }
        Ok(made)
    }

    fn plan_decode(&self, decode: &Decode) -> Done<Planned<bf16>> {
        let Self {
            shared,
            cast,
            shape,
            ..
        } = self;
        let Decode {
            orientation,
            from,
            to,
            ..
        } = decode;
        let kernel = cast.quantizers().of(*from).kernel;
        let find = |part| cast.target(*from, part).cloned();
        let data = find(Part::Data).ok_or_else(|| KernelError::Missing {
            what: format!("the {} codes of an operand", from.usage()),
        })?;
        let outer = kernel.scale.outer().and_then(|(_, part)| find(part));
        let out = shared.arena.values(to)?;
        let job = DecodeJob {
            shape: *shape,
            kernel,
            data,
            block_scale: find(Part::BlockScale),
            tensor_scale: outer.map(|target| target.bytes),
            out: Source::Bf16(out.clone()),
        };
        let plan = shared.cuda.plan(Work::Decode(vec![job]))?;
        Ok(Planned {
            orientation: *orientation,
            plan,
            to: out,
        })
    }

    fn plan_repack(&self, repack: &Repack) -> Done<Option<Planned<u8>>> {
        let Shared { cuda, arena, .. } = &*self.shared;
        let Repack {
            orientation,
            form,
            to,
            ..
        } = repack;
        let Some(target) = self.cast.target(*orientation, Part::BlockScale) else {
            return Ok(None);
        };
        let to = arena.codes(to)?;
        let Target { spec, bytes, .. } = target;
        let plan = plan_repack(cuda, spec, bytes, self.shape, *orientation, *form, &to)?;
        Ok(Some(Planned {
            orientation: *orientation,
            plan,
            to,
        }))
    }

    /// What becomes of what an activation makes for it.
    pub(super) fn made(&self) -> Made<'_> {
        match self.job {
            Job::Nothing => Made::Values(&self.values),
            Job::Amax(job) => Made::Observed(&self.values, job),
            Job::Round(job) => Made::Rounded(job),
        }
    }

    /// The job by which the backward pass of the activation rounds what it makes again.
    pub(super) fn made_again(&self) -> Option<u64> {
        self.again.as_ref().map(|again| again.job)
    }

    /// Casts the values, as far as an activation has not.
    pub(super) fn cast(&self) -> Done {
        let Shared {
            trace,
            agree_amaxes,
            ..
        } = &*self.shared;
        match self.job {
            Job::Nothing => self.operands.run_encode(&self.cast, *agree_amaxes)?,
            Job::Amax(_) => self.operands.run_observed(&self.cast, *agree_amaxes)?,
            Job::Round(_) => return Ok(()),
        }
        let what = match self.role {
            Role::Gradient => "cast of gradients",
            Role::Activation | Role::Weight => "cast of inputs",
        };
        Ok(trace.mark(|| what.to_owned())?)
    }

    /// Makes what `pass` reads of the codes, in memory that other layers have after it.
    pub(super) fn prepare(&self, pass: Pass) -> Done {
        let Shared { cuda, trace, .. } = &*self.shared;
        let orientation = self.orientation(pass);
        if self.products[pass as usize] != GemmKind::Bf16 {
            return match planned(&self.repacks, orientation) {
                Some(repack) => Ok(cuda.run(&repack.plan, &StepScalars::default())?),
                None => Ok(()),
            };
        }
        if let Some(decode) = planned(&self.decodes, orientation) {
            cuda.run(&decode.plan, &StepScalars::default())?;
            trace.mark(|| "decode of operands".to_owned())?;
        }
        Ok(())
    }

    /// The operand as `pass` reads it, once it is cast and prepared.
    pub(super) fn operand(&self, pass: Pass) -> Done<Operand> {
        let product = self.products[pass as usize];
        let orientation = self.orientation(pass);
        if product != GemmKind::Bf16 {
            let find = |part| {
                let target = self.cast.target(orientation, part);
                target.map(|target| (&target.spec, &target.bytes))
            };
            let kernel = self.cast.quantizers().of(orientation).kernel;
            let mut operand = Operand::codes(product, orientation, &kernel, find)?;
            if let Some(repack) = planned(&self.repacks, orientation) {
                operand.ptr.scale = repack.to.pointer();
            }
            return Ok(operand);
        }
        let decoded = planned(&self.decodes, orientation).map(|decode| &decode.to);
        let again = self.again.as_ref().map(|again| &again.cast);
        let casts = [Some(&self.cast), again].into_iter().flatten();
        let rounded = casts.filter_map(|cast| cast.values(orientation)).next();
        let values = rounded.or(decoded).unwrap_or(&self.values);
        let k_inner = orientation == Orientation::Rowwise;
        Ok(Operand::values(values.pointer(), k_inner))
    }

    /// The orientation in which `pass` reads it.
    fn orientation(&self, pass: Pass) -> Orientation {
        let mut operands = pass.operands().into_iter();
        let found = operands.find(|(role, _)| *role == self.role);
        found.map_or(Orientation::Rowwise, |(_, orientation)| orientation)
    }
}

fn planned<T: Element>(all: &[Planned<T>], orientation: Orientation) -> Option<&Planned<T>> {
    all.iter()
        .find(|planned| planned.orientation == orientation)
}

/// Plans a copy of block scales of a matrix of `shape` from their Compact form to `form`.
pub(super) fn plan_repack(
    cuda: &Cuda,
    spec: &BufferSpec,
    from: &CudaBuffer<u8>,
    shape: Shape,
    orientation: Orientation,
    form: Form,
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

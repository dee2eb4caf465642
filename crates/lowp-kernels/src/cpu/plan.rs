//! [`CpuPlan`]: work that was checked and laid out.

use std::sync::Arc;

use lowp_format::STATE_BLOCK;

use super::Cpu;
use super::access::Access;
use super::buffer::CpuBuffer;
use super::generic::{self, Context};
use super::layout::Layout;
use super::round;
use crate::check::access::{BufferUse, Mode};
use crate::check::reads::Reads;
use crate::check::{Checked, check};
use crate::lanes::Isa;
use crate::{
    Backend, DecodeJob, EncodeJob, KernelError, RepackJob, StepScalars, Target, UpdateJob, Work,
};

/// Work that was checked and laid out once, and runs any number of times. Cloning clones the handle.
#[derive(Clone, Debug)]
pub struct CpuPlan {
    planned: Arc<Planned>,
    isa: Isa,
    /// Elements of a plan from which decodes write past the caches.
    streamed: usize,
}

#[derive(Debug)]
struct Planned {
    work: Work<Cpu>,
    access: Access,
    /// Scales in other forms: encoded in Compact form into memory of the plan, then converted.
    forms: Vec<RepackJob<Cpu>>,
    /// Of roundings: what is encoded into memory of the plan.
    decodes: Vec<DecodeJob<Cpu>>,
    /// The walk of each encode (also of those within updates).
    layouts: Vec<Layout>,
    elements: usize,
    reads: Reads,
}

impl CpuPlan {
    /// Checks `work`.
    pub(crate) fn new(mut work: Work<Cpu>) -> Result<Self, KernelError> {
        let Checked {
            mut access,
            elements,
            reads,
        } = check(&Cpu, &work)?;
        let mut forms = Vec::new();
        let mut decodes = Vec::new();
        if let Work::Round(jobs) = &work {
            let mut encodes = Vec::new();
            for job in jobs {
                let (encode, values) = round::apart(job)?;
                encodes.push(encode);
                decodes.extend(values);
            }
            work = Work::Encode(encodes);
        }
        match &mut work {
            Work::Encode(jobs) => jobs
                .iter_mut()
                .try_for_each(|job| compact(job, &mut forms))?,
            Work::Update(jobs) => {
                let mut encodes = jobs.iter_mut().filter_map(|job| job.encode.as_mut());
                encodes.try_for_each(|job| compact(job, &mut forms))?;
            }
            _ => {}
        }
        let scratch = forms.iter().map(|job| &job.from);
        let scratch = scratch.chain(decodes.iter().flat_map(codes));
        let scratch = scratch.filter(|bytes| !bytes.is_empty());
        access.bytes.extend(scratch.map(|bytes| BufferUse {
            buffer: bytes.clone(),
            mode: Mode::Write,
        }));
        let layouts = match &work {
            Work::Encode(jobs) => jobs.iter().map(Layout::new).collect(),
            Work::Update(jobs) => {
                let walk = |job: &UpdateJob<Cpu>| match &job.encode {
                    Some(encode) if job.in_fp8() => Layout::new(encode).of_blocks(STATE_BLOCK),
                    Some(encode) => Layout::new(encode),
                    None => Layout::default(),
                };
                jobs.iter().map(walk).collect()
            }
            _ => Vec::new(),
        };
        let planned = Planned {
            work,
            forms,
            decodes,
            access: Access::new(access),
            layouts,
            elements,
            reads,
        };
        Ok(Self {
            planned: Arc::new(planned),
            isa: Isa::best(),
            streamed: generic::decode::STREAMED,
        })
    }

    /// The same plan for another instruction set, and of decodes that write past the caches from `streamed` elements on.
    #[doc(hidden)]
    pub fn varied(self, isa: Isa, streamed: usize) -> Self {
        Self {
            isa,
            streamed,
            ..self
        }
    }

    /// Checks that scalars of `given` parameter groups are enough.
    pub(super) fn fits(&self, given: usize) -> Result<(), KernelError> {
        self.planned.reads.fit(given)
    }

    /// Runs the work.
    pub(crate) fn run(&self, scalars: &StepScalars) -> Result<(), KernelError> {
        self.fits(scalars.groups.len())?;
        if scalars.skip && self.planned.reads.skip {
            return Ok(());
        }
        let plan = &*self.planned;
        let context = &Context {
            isa: self.isa,
            scalars,
            elements: plan.elements,
            streamed: self.streamed,
        };
        let mut locked = plan.access.lock()?;
        let views = &mut locked.views();
        match &plan.work {
            Work::Amax(jobs) => generic::amax::run(jobs, context, views),
            Work::History(jobs) => generic::history::run(jobs, views),
            Work::Encode(jobs) => generic::encode::run(jobs, &plan.layouts, context, views),
            Work::FlatEncode(jobs) => generic::flat::run(jobs, context, views),
            Work::Decode(jobs) => generic::decode::run(jobs, context, views),
            // Planned as an encode and decodes.
            Work::Round(_) => Ok(()),
            Work::Transpose(jobs) => generic::transpose::run(jobs, context, views),
            Work::Repack(jobs) => generic::repack::run(jobs, context, views),
            Work::Interleave(jobs) => generic::interleave::run(jobs, context, views),
            Work::Rearrange(jobs) => generic::rearrange::run(jobs, context, views),
            Work::Update(jobs) => generic::update::run(jobs, &plan.layouts, context, views),
            Work::SumSquares(jobs) => generic::norm::run(jobs, context, views),
            Work::Sum(jobs) => generic::sum::sums(jobs, context, views),
            Work::SumParts(jobs) => generic::sum_parts::run(jobs, context, views),
            Work::Convert(jobs) => generic::sum::conversions(jobs, context, views),
            Work::Momentum(jobs) => generic::momentum::run(jobs, context, views),
            Work::Normalize(jobs) => generic::normalize::run(jobs, context, views),
            Work::StepScalars(jobs) => generic::step_scalars::run(jobs, views),
        }?;
        if plan.forms.is_empty() && plan.decodes.is_empty() {
            return Ok(());
        }
        let views = &mut locked.views();
        let scratch = plan.forms.iter().map(|job| &job.from);
        for bytes in scratch.chain(plan.decodes.iter().flat_map(codes)) {
            views.bytes.freeze(bytes)?;
        }
        generic::repack::run(&plan.forms, context, views)?;
        generic::decode::run(&plan.decodes, context, views)
    }
}

/// What a decode reads.
fn codes(job: &DecodeJob<Cpu>) -> impl Iterator<Item = &CpuBuffer<u8>> {
    let DecodeJob {
        data,
        block_scale,
        tensor_scale,
        ..
    } = job;
    let scale = block_scale.as_ref().map(|target| &target.bytes);
    [Some(&data.bytes), scale, tensor_scale.as_ref()]
        .into_iter()
        .flatten()
}

/// Makes every target of `job` Compact; what becomes of them is added to `forms`.
fn compact(job: &mut EncodeJob<Cpu>, forms: &mut Vec<RepackJob<Cpu>>) -> Result<(), KernelError> {
    let shape = job.shape;
    for target in job.targets.iter_mut().filter(|target| !target.is_compact()) {
        let scratch = Target::<Cpu>::new(target.spec, Cpu.alloc(target.spec.bytes(shape))?);
        forms.push(RepackJob {
            from_layout: scratch.layout(shape)?,
            to_layout: target.layout(shape)?,
            from: scratch.bytes.clone(),
            to: target.bytes.clone(),
        });
        *target = scratch;
    }
    Ok(())
}

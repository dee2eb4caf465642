//! [`StepWork`]: a step as work of the device, from gradients to low-precision rows.

use std::ops::Range;
use std::sync::Arc;

use lowp_comm::{CommError, Communicator, Done, GatherItem, Mesh, ordered};
use lowp_kernels::{
    AdamwJob, Backend, EncodeJob, GradPart, Pending, Source, StepCounts, StepReport, StepScalars,
    StepScalarsJob, SumSquaresJob, Work,
};
use lowp_shard::{FlatGather, ScaleBook, ShardError};

use crate::param::Param;
use crate::{Group, OptimError, StepOptions};

/// Buffers and plans of a step. Nothing in it waits for the host: the norm, the clipping factor, the
/// decision to skip and the bias corrections are made where the update reads them.
#[derive(Debug)]
pub(crate) struct StepWork<B: Backend> {
    backend: B,
    world: Arc<dyn Communicator<B>>,
    book: Arc<ScaleBook<B>>,
    norm: B::Plan,
    /// Whether the step runs it.
    measures: bool,
    scalars: B::Plan,
    update: B::Plan,
    second: B::Plan,
    /// What flat slices need besides.
    flat: Option<FlatWork<B>>,
    /// What the host writes: the second half of this rank's [`GradPart`], then the options of the step.
    input: B::Buffer<u8>,
    /// The content of `input`.
    written: Vec<u8>,
    /// This rank's [`GradPart`], the sums in it, and the parts of all ranks.
    part: B::Buffer<u8>,
    sums: B::Buffer<u8>,
    parts: B::Buffer<u8>,
    ranges: Vec<Range<usize>>,
    counts: B::Buffer<u8>,
    /// The scalars that the update reads.
    on_device: B::Buffer<u8>,
    report: B::Buffer<u8>,
}

/// The jobs that change masters and rows.
pub(crate) struct Passes<B: Backend> {
    /// Updates, with encodes whose scale is known before the values.
    pub(crate) update: Vec<AdamwJob<B>>,
    /// Encodes of rows that need agreed amaxes.
    pub(crate) second: Vec<EncodeJob<B>>,
    /// What flat slices need besides.
    pub(crate) flat: Option<FlatWork<B>>,
}

/// The casts of flat slices, and of rows that cut blocks, which are passes of their own, and the gather of the full weights of
/// slices.
#[derive(Debug)]
pub(crate) struct FlatWork<B: Backend> {
    /// The amaxes of their blocks.
    observe: B::Plan,
    /// Encodes whose scale is known before the values.
    early: B::Plan,
    /// Those that need agreed amaxes.
    late: B::Plan,
    gather: Option<FlatGather<B>>,
}

impl<B: Backend> FlatWork<B> {
    /// Plans the casts of those of `params` that are flat, of which `gather` gathers the slices of full weights.
    pub(crate) fn new(
        backend: &B,
        book: &ScaleBook<B>,
        params: &[Param<B>],
        gather: Option<FlatGather<B>>,
    ) -> Result<Self, ShardError> {
        let (mut observe, mut early, mut late) = (Vec::new(), Vec::new(), Vec::new());
        for param in params {
            if let Some(job) = param.item.flat_encode_job(book)? {
                let needs_agreement = param.item.needs_agreement();
                let casts = if needs_agreement {
                    &mut late
                } else {
                    &mut early
                };
                casts.push(job);
                observe.extend(param.observe_blocks(book)?);
            }
        }
        Ok(Self {
            observe: backend.plan(Work::Amax(observe))?,
            early: backend.plan(Work::FlatEncode(early))?,
            late: backend.plan(Work::FlatEncode(late))?,
            gather,
        })
    }
}

impl<B: Backend> StepWork<B> {
    /// Plans a step of `groups` parameter groups over `grads`.
    pub(crate) fn new(
        (backend, world, mesh): (&B, &Arc<dyn Communicator<B>>, Mesh),
        book: &Arc<ScaleBook<B>>,
        grads: &[Source<B>],
        groups: usize,
        passes: Passes<B>,
    ) -> Result<Self, OptimError> {
        let ranks = world.world_size();
        let (replica, _) = mesh.coordinates(world.rank())?;
        let scalars = StepScalars::bytes(groups);
        let input = backend.alloc::<u8>(GradPart::BYTES + scalars)?;
        let part = backend.view::<u8>(&input, 0..GradPart::BYTES)?;
        let sums = backend.view::<u8>(&input, 0..GradPart::SUMS)?;
        let options = backend.view::<u8>(&input, GradPart::BYTES..GradPart::BYTES + scalars)?;
        let parts = backend.alloc::<u8>(ranks * GradPart::BYTES)?;
        let counts = backend.alloc::<u8>(StepCounts::BYTES)?;
        let on_device = backend.alloc::<u8>(scalars)?;
        let report = backend.alloc::<u8>(StepReport::BYTES)?;
        let make_scalars = StepScalarsJob {
            parts: parts.clone(),
            shards: mesh.shard,
            replica,
            options,
            counts: counts.clone(),
            out: on_device.clone(),
            report: report.clone(),
        };
        Ok(Self {
            norm: norm(backend, grads, &sums)?,
            measures: true,
            scalars: backend.plan(Work::StepScalars(vec![make_scalars]))?,
            update: backend.plan(Work::Adamw(passes.update))?,
            second: backend.plan(Work::Encode(passes.second))?,
            flat: passes.flat,
            ranges: (0..ranks)
                .map(|rank| rank * GradPart::BYTES..(rank + 1) * GradPart::BYTES)
                .collect(),
            backend: backend.clone(),
            world: Arc::clone(world),
            book: Arc::clone(book),
            input,
            written: Vec::new(),
            part,
            sums,
            parts,
            counts,
            on_device,
            report,
        })
    }

    /// Plans what reads gradients, over `grads`: the norm, and the update.
    pub(crate) fn plan_over(
        &self,
        grads: &[Source<B>],
        update: Vec<AdamwJob<B>>,
    ) -> Result<[B::Plan; 2], OptimError> {
        let update = self.backend.plan(Work::Adamw(update))?;
        Ok([norm(&self.backend, grads, &self.sums)?, update])
    }

    /// Runs `plans` of [`StepWork::plan_over`] from here on. Returns those of before.
    pub(crate) fn swap(&mut self, plans: [B::Plan; 2]) -> [B::Plan; 2] {
        let [norm, update] = plans;
        [
            std::mem::replace(&mut self.norm, norm),
            std::mem::replace(&mut self.update, update),
        ]
    }

    /// Gives the device the options and the hyperparameters of step `number`.
    pub(crate) fn set(
        &mut self,
        options: &StepOptions,
        number: u64,
        groups: &[Group],
        done: &[Done],
    ) -> Result<(), OptimError> {
        self.measures = options.measures();
        let mut bytes = options.part(number, groups, done).to_bytes()[GradPart::SUMS..].to_vec();
        bytes.extend(options.scalars(groups).to_bytes());
        if self.written != bytes {
            self.backend.write(&self.input, GradPart::SUMS, &bytes)?;
            self.written = bytes;
        }
        Ok(())
    }

    /// Whether the step that was set last takes the norm.
    pub(crate) fn measures(&self) -> bool {
        self.measures
    }

    /// Gives the step to the stream.
    pub(crate) fn enqueue(&self) -> Result<(), OptimError> {
        let Self { backend, world, .. } = self;
        let none = StepScalars::default();
        backend.clear(&self.sums)?;
        if self.measures {
            backend.run(&self.norm, &none)?;
        }
        let item = GatherItem {
            source: &self.part,
            dest: &self.parts,
            ranges: &self.ranges,
        };
        ordered(backend, &**world, || world.all_gather(&[item]))?;
        backend.run(&self.scalars, &none)?;
        backend.run_with(&self.update, &self.on_device)?;
        if let Some(flat) = &self.flat {
            backend.run_with(&flat.observe, &self.on_device)?;
            backend.run_with(&flat.early, &self.on_device)?;
        }
        // Also where the step is skipped: scales of other tensors in the book advance.
        self.book.agree(&**world)?;
        backend.run_with(&self.second, &self.on_device)?;
        if let Some(flat) = &self.flat {
            backend.run_with(&flat.late, &self.on_device)?;
        }
        self.gather()
    }

    /// Makes full weights of the flat slices.
    pub(crate) fn gather(&self) -> Result<(), OptimError> {
        match self.flat_gather() {
            Some(gather) => Ok(gather.run()?),
            None => Ok(()),
        }
    }

    /// The gather of flat slices, where there are any.
    pub(crate) fn flat_gather(&self) -> Option<&FlatGather<B>> {
        self.flat.as_ref().and_then(|flat| flat.gather.as_ref())
    }

    /// Starts to read what became of the step.
    pub(crate) fn report(&self) -> Result<Pending<u8>, OptimError> {
        Ok(self
            .backend
            .start_read(&self.report, 0..StepReport::BYTES)?)
    }

    /// How many steps were applied and skipped, once the stream is done.
    pub(crate) fn counts(&self) -> Result<StepCounts, OptimError> {
        let mut bytes = [0; StepCounts::BYTES];
        self.backend.read(&self.counts, 0, &mut bytes)?;
        Ok(StepCounts::from_bytes(&bytes))
    }

    /// Replaces the counts.
    pub(crate) fn set_counts(&self, counts: StepCounts) -> Result<(), OptimError> {
        Ok(self.backend.write(&self.counts, 0, &counts.to_bytes())?)
    }

    /// Compares over the ranks what they must have in common, and says in what they differ.
    pub(crate) fn difference(
        &self,
        options: &StepOptions,
        number: u64,
        groups: &[Group],
    ) -> Result<&'static str, OptimError> {
        for (what, bits) in options.common(number, groups) {
            match self.world.control().all_equal(what, &bits.to_string()) {
                Ok(()) => {}
                Err(CommError::Mismatch { .. }) => return Ok(what),
                Err(error) => return Err(error.into()),
            }
        }
        Ok("the step")
    }
}

/// Adds the squares of all gradients up in `sums`.
fn norm<B: Backend>(
    backend: &B,
    grads: &[Source<B>],
    sums: &B::Buffer<u8>,
) -> Result<B::Plan, OptimError> {
    let job = |source: &Source<B>| SumSquaresJob {
        source: source.clone(),
        out: sums.clone(),
    };
    Ok(backend.plan(Work::SumSquares(grads.iter().map(job).collect()))?)
}

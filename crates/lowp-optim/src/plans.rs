//! [`StepPlans`]: what a step runs over its gradients, of the parameters that have one.

use std::sync::Arc;

use lowp_kernels::{
    Backend, GradContribution, KernelError, Source, StepScalars, SumSquaresJob, Work,
};
use lowp_shard::{ScaleBook, ScaleSlot, ShardError};

use crate::OptimError;
use crate::param::Param;
use crate::present::Present;
use crate::records::{Records, Sharing};

/// The work of a step. None of it reads or writes anything of parameters that have no gradient in it.
#[derive(Clone, Debug)]
pub(crate) struct StepPlans<B: Backend> {
    /// The sum of squares.
    pub(crate) norm: B::Plan,
    /// The momenta of matrices that are made orthogonal.
    pub(crate) momentum: B::Plan,
    /// Updates, with encodes whose scale is known before the values.
    pub(crate) update: B::Plan,
    pub(crate) independent: Arc<GradIndependentPlans<B>>,
}

/// What of it is the same wherever the gradients lie.
#[derive(Debug)]
pub(crate) struct GradIndependentPlans<B: Backend> {
    pub(crate) present: Arc<Present>,
    /// Makes the scalars of the step.
    pub(crate) scalars: B::Plan,
    /// The scalars, of all records.
    pub(crate) on_device: B::Buffer<u8>,
    /// Encodes of rows that need agreed amaxes.
    pub(crate) second: B::Plan,
    /// What flat slices need besides, where there are any.
    pub(crate) flat: Option<FlatCasts<B>>,
}

/// The casts of flat slices, which are passes of their own.
#[derive(Debug)]
pub(crate) struct FlatCasts<B: Backend> {
    /// The amaxes of their blocks.
    pub(crate) observe: B::Plan,
    /// Encodes whose scale is known before the values.
    pub(crate) early: B::Plan,
    /// Encodes that need agreed amaxes.
    pub(crate) late: B::Plan,
}

/// What goes in and out of the scalars of a step.
#[derive(Debug)]
pub(crate) struct Buffers<B: Backend> {
    /// What the host writes: the second half of this rank's [`GradContribution`], then the options of the step.
    pub(crate) input: B::Buffer<u8>,
    /// This rank's [`GradContribution`], the sums in it, and the parts of all ranks.
    pub(crate) part: B::Buffer<u8>,
    pub(crate) sums: B::Buffer<u8>,
    pub(crate) parts: B::Buffer<u8>,
    pub(crate) options: B::Buffer<u8>,
    /// Ranks of a replica, and the replica of this rank.
    pub(crate) shards: usize,
    pub(crate) replica: usize,
}

impl<B: Backend> Buffers<B> {
    pub(crate) fn new(
        backend: &B,
        ranks: usize,
        shards: usize,
        replica: usize,
        groups: usize,
    ) -> Result<Self, KernelError> {
        let end = GradContribution::BYTES + StepScalars::bytes(groups);
        let input = backend.alloc::<u8>(end)?;
        Ok(Self {
            part: backend.view::<u8>(&input, 0..GradContribution::BYTES)?,
            sums: backend.view::<u8>(&input, 0..GradContribution::SUMS)?,
            parts: backend.alloc::<u8>(ranks * GradContribution::BYTES)?,
            options: backend.view::<u8>(&input, GradContribution::BYTES..end)?,
            input,
            shards,
            replica,
        })
    }
}

pub(crate) struct Planner<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) book: &'a ScaleBook<B>,
    pub(crate) buffers: &'a Buffers<B>,
    pub(crate) records: &'a Records<B>,
    pub(crate) params: &'a [Param<B>],
    pub(crate) names: &'a Arc<[String]>,
}

impl<B: Backend> Planner<'_, B> {
    /// Plans a step over `grads`, in which parameters share records as `sharing` says. `known` are plans with the same records.
    pub(crate) fn plan<'a>(
        &self,
        grads: &[Option<Source<B>>],
        sharing: &Sharing,
        mut known: impl Iterator<Item = &'a StepPlans<B>>,
    ) -> Result<StepPlans<B>, OptimError> {
        let present: Vec<bool> = grads.iter().map(Option::is_some).collect();
        let known = known.find(|known| known.independent.present.which == present);
        let independent = match known {
            Some(known) => Arc::clone(&known.independent),
            None => Arc::new(self.independent(present, sharing)?),
        };
        let (mut squares, mut momenta, mut updates) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (param, grad)) in self.params.iter().zip(grads).enumerate() {
            let Some(grad) = grad else { continue };
            squares.push(SumSquaresJob {
                source: grad.clone(),
                out: self.buffers.sums.clone(),
            });
            let mut job = param.update(self.book)?;
            job.group = self.records.group(sharing, index, param.group);
            momenta.extend(param.momentum(grad, job.group));
            job.grad = match &param.piece {
                Some(piece) => Source::Bf16(piece.clone()),
                None => grad.clone(),
            };
            updates.push(job);
        }
        Ok(StepPlans {
            norm: self.backend.plan(Work::SumSquares(squares))?,
            momentum: self.backend.plan(Work::Momentum(momenta))?,
            update: self.backend.plan(Work::Update(updates))?,
            independent,
        })
    }

    fn independent(
        &self,
        which: Vec<bool>,
        sharing: &Sharing,
    ) -> Result<GradIndependentPlans<B>, OptimError> {
        let present = Present::new(which, self.names);
        self.check_shared_scales(&present)?;
        let jobs = self.records.jobs(sharing, &present.which, self.buffers)?;
        let params = || present.of(self.params).map(|(_, param)| param);
        let late = |p: &&Param<B>| p.item.needs_agreement() && !p.is_flat();
        let second = params().filter(late).map(|p| p.item.encode_job(self.book));
        let second: Vec<_> = second.collect::<Result<_, _>>()?;
        let second = second.into_iter().flatten().collect();
        let flat = self.params.iter().any(Param::is_flat);
        Ok(GradIndependentPlans {
            scalars: self.backend.plan(Work::StepScalars(jobs))?,
            on_device: self.records.scalars(sharing)?,
            second: self.backend.plan(Work::Encode(second))?,
            flat: flat.then(|| self.flat_casts(params())).transpose()?,
            present: Arc::new(present),
        })
    }

    fn flat_casts<'a>(
        &self,
        params: impl Iterator<Item = &'a Param<B>>,
    ) -> Result<FlatCasts<B>, ShardError> {
        let (mut observe, mut early, mut late) = (Vec::new(), Vec::new(), Vec::new());
        for param in params {
            if let Some(job) = param.item.flat_encode_job(self.book)? {
                let needs_agreement = param.item.needs_agreement();
                let casts = if needs_agreement {
                    &mut late
                } else {
                    &mut early
                };
                casts.push(job);
                observe.extend(param.observe_blocks(self.book)?);
            }
        }
        Ok(FlatCasts {
            observe: self.backend.plan(Work::Amax(observe))?,
            early: self.backend.plan(Work::FlatEncode(early))?,
            late: self.backend.plan(Work::FlatEncode(late))?,
        })
    }

    /// A parameter that is left as it is cannot follow a scale that others change.
    fn check_shared_scales(&self, present: &Present) -> Result<(), OptimError> {
        let slots = |param: &Param<B>| param.item.slots.into_iter().flatten();
        let changing = present.of(self.params);
        let changing: Vec<(ScaleSlot, &Param<B>)> = changing
            .flat_map(|(_, param)| slots(param).map(move |slot| (slot, param)))
            .collect();
        let absent = self.params.iter().zip(&present.which);
        for (missing, _) in absent.filter(|(_, p)| !**p) {
            let shared = changing
                .iter()
                .find(|(slot, _)| slots(missing).any(|own| own == *slot));
            if let Some((_, with)) = shared {
                return Err(OptimError::SharedScale {
                    missing: missing.name.clone(),
                    present: with.name.clone(),
                });
            }
        }
        Ok(())
    }
}

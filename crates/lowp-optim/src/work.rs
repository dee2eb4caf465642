//! [`StepWork`]: a step as work of the device, from gradients to low-precision rows.

use std::ops::Range;
use std::sync::Arc;

use lowp_comm::{CallLog, CommError, Communicator, GatherItem, Mesh, ordered};
use lowp_kernels::{Backend, GradContribution, Pending, Source, StepRecord, StepScalars};
use lowp_shard::{FlatGather, ScaleBook};

use crate::muon::Muon;
use crate::param::Param;
use crate::plans::{Buffers, Planner, StepPlans};
use crate::present::Present;
use crate::records::{Records, Sharing};
use crate::{Group, OptimError, StepOptions};

/// Buffers and plans of a step. Nothing in it waits for the host: the norm, the clipping factor, the
/// decision to skip and the bias corrections are made where the update reads them.
#[derive(Debug)]
pub(crate) struct StepWork<B: Backend> {
    backend: B,
    world: Arc<dyn Communicator<B>>,
    book: Arc<ScaleBook<B>>,
    /// The names of the parameters.
    names: Arc<[String]>,
    plans: StepPlans<B>,
    /// Whether the step runs the norm.
    measures: bool,
    /// Makes matrices orthogonal, where there are any.
    muon: Option<Muon<B>>,
    /// Whether updates round by random bits.
    random: bool,
    /// Makes full weights of flat slices, where there are any.
    flat: Option<FlatGather<B>>,
    buffers: Buffers<B>,
    /// What the host wrote into [`Buffers::input`].
    written: Vec<u8>,
    ranges: Vec<Range<usize>>,
    records: Records<B>,
}

/// What a step is planned of.
#[derive(Debug)]
pub(crate) struct NewStep<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) world: &'a Arc<dyn Communicator<B>>,
    pub(crate) mesh: Mesh,
    pub(crate) book: &'a Arc<ScaleBook<B>>,
    pub(crate) params: &'a [Param<B>],
    /// Number of parameter groups.
    pub(crate) groups: usize,
    /// The gradient of each parameter; `None` of those that have none.
    pub(crate) grads: &'a [Option<Source<B>>],
    /// Makes matrices orthogonal, where there are any.
    pub(crate) muon: Option<Muon<B>>,
    /// Gathers the weights whose masters are flat slices, where there are any.
    pub(crate) flat: Option<FlatGather<B>>,
}

impl<B: Backend> StepWork<B> {
    pub(crate) fn new(step: NewStep<'_, B>) -> Result<Self, OptimError> {
        let NewStep {
            backend,
            world,
            mesh,
            book,
            params,
            groups,
            grads,
            muon,
            flat,
        } = step;
        let ranks = world.world_size();
        let (replica, _) = mesh.coordinates(world.rank())?;
        let buffers = Buffers::new(backend, ranks, mesh.shard, replica, groups)?;
        let mut records = Records::new(backend, params.len(), groups)?;
        let names = params.iter().map(|param| param.name.clone()).collect();
        let planner = Planner {
            backend,
            book,
            buffers: &buffers,
            records: &records,
            params,
            names: &names,
        };
        let present: Vec<bool> = grads.iter().map(Option::is_some).collect();
        let sharing = records.split_for(&present);
        let plans = planner.plan(
            grads,
            sharing.as_ref().unwrap_or(records.sharing()),
            std::iter::empty(),
        )?;
        if let Some(sharing) = sharing {
            records.split(sharing)?;
        }
        Ok(Self {
            backend: backend.clone(),
            world: Arc::clone(world),
            book: Arc::clone(book),
            names,
            plans,
            measures: true,
            muon,
            random: params.iter().any(Param::is_stochastic),
            flat,
            buffers,
            written: Vec::new(),
            ranges: (0..ranks)
                .map(|rank| rank * GradContribution::BYTES..(rank + 1) * GradContribution::BYTES)
                .collect(),
            records,
        })
    }

    /// Which parameters share step counts in a step over `grads`; `None` if as now.
    pub(crate) fn split_for(&self, grads: &[Option<Source<B>>]) -> Option<Sharing> {
        let present: Vec<bool> = grads.iter().map(Option::is_some).collect();
        self.records.split_for(&present)
    }

    /// Plans a step over `grads`. What is the same as in the present one, or in `known`, is not planned again where step counts are
    /// shared as now.
    pub(crate) fn plan<'a>(
        &'a self,
        params: &[Param<B>],
        grads: &[Option<Source<B>>],
        sharing: Option<&Sharing>,
        known: impl Iterator<Item = &'a StepPlans<B>>,
    ) -> Result<StepPlans<B>, OptimError> {
        let planner = Planner {
            backend: &self.backend,
            book: &self.book,
            buffers: &self.buffers,
            records: &self.records,
            params,
            names: &self.names,
        };
        match sharing {
            Some(sharing) => planner.plan(grads, sharing, std::iter::empty()),
            None => {
                let known = std::iter::once(&self.plans).chain(known);
                planner.plan(grads, self.records.sharing(), known)
            }
        }
    }

    /// Runs `plans` from here on. Returns those of before.
    pub(crate) fn swap(&mut self, plans: StepPlans<B>) -> StepPlans<B> {
        std::mem::replace(&mut self.plans, plans)
    }

    /// The parameters that have a gradient.
    pub(crate) fn present(&self) -> &Arc<Present> {
        &self.plans.independent.present
    }

    /// Gives the device the options and the hyperparameters of step `number`.
    pub(crate) fn set(
        &mut self,
        options: &StepOptions,
        number: u64,
        groups: &[Group],
        done: &[CallLog],
    ) -> Result<(), OptimError> {
        self.measures = options.measures();
        let part = options.part(number, groups, done, self.present().digest());
        let mut bytes = part.to_bytes()[GradContribution::SUMS..].to_vec();
        let scalars = StepScalars {
            random_step: if self.random { number } else { 0 },
            ..options.scalars(groups)
        };
        bytes.extend(scalars.to_bytes());
        if self.written != bytes {
            let input = &self.buffers.input;
            self.backend.write(input, GradContribution::SUMS, &bytes)?;
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
        let Self {
            backend,
            world,
            buffers,
            ..
        } = self;
        let StepPlans {
            norm,
            momentum,
            update,
            independent,
        } = &self.plans;
        let none = StepScalars::default();
        backend.clear(&buffers.sums)?;
        if self.measures {
            backend.run(norm, &none)?;
        }
        let item = GatherItem {
            source: &buffers.part,
            dest: &buffers.parts,
            ranges: &self.ranges,
        };
        ordered(backend, &**world, || world.all_gather(&[item]))?;
        backend.run(&independent.scalars, &none)?;
        let scalars = &independent.on_device;
        if let Some(muon) = &self.muon {
            backend.run_with(momentum, scalars)?;
            muon.run(&independent.present.which)?;
        }
        backend.run_with(update, scalars)?;
        if let Some(flat) = &independent.flat {
            backend.run_with(&flat.observe, scalars)?;
            backend.run_with(&flat.early, scalars)?;
        }
        // Also where the step is skipped: scales of other tensors in the book advance.
        self.book.agree(&**world)?;
        backend.run_with(&independent.second, scalars)?;
        if let Some(flat) = &independent.flat {
            backend.run_with(&flat.late, scalars)?;
        }
        self.gather()
    }

    /// Makes full weights of the flat slices.
    pub(crate) fn gather(&self) -> Result<(), OptimError> {
        match &self.flat {
            Some(flat) => Ok(flat.run()?),
            None => Ok(()),
        }
    }

    /// The matrices that are made orthogonal, where there are any.
    pub(crate) fn muon(&self) -> Option<&Muon<B>> {
        self.muon.as_ref()
    }

    /// The gather of flat slices, where there are any.
    pub(crate) fn flat_gather(&self) -> Option<&FlatGather<B>> {
        self.flat.as_ref()
    }

    /// Starts to read what became of the step.
    pub(crate) fn report(&self) -> Result<Pending<u8>, OptimError> {
        let reports = self.records.reports();
        Ok(self.backend.start_read(reports, 0..StepRecord::BYTES)?)
    }

    pub(crate) fn records(&self) -> &Records<B> {
        &self.records
    }

    pub(crate) fn records_mut(&mut self) -> &mut Records<B> {
        &mut self.records
    }

    /// Compares over the ranks the options and hyperparameters that they must have in common, and says in which they differ.
    pub(crate) fn difference(
        &self,
        options: &StepOptions,
        number: u64,
        groups: &[Group],
    ) -> Result<Option<&'static str>, OptimError> {
        for (what, bits) in options.common(number, groups) {
            match self.world.control().all_equal(what, &bits.to_string()) {
                Ok(()) => {}
                Err(CommError::Mismatch { .. }) => return Ok(Some(what)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }
}

//! [`Views`]: the full tensors that a group shows of one destination set.

use lowp_format::{GatherPlan, Origin, Phase, QuantizedTensor, Recipe};
use lowp_kernels::{Backend, InterleaveJob, PieceRows, Work};

use super::kind::{ByKind, GatherKind};
use super::pool::Lease;
use super::{Full, GatherGroup};
use crate::ShardError;
use lowp_comm::Traffic;

/// The full tensors of one destination set, per phase and parameter, and the gathers into it.
#[derive(Debug)]
pub(super) struct Views<B: Backend, R: Recipe> {
    pub(super) set: u64,
    pub(super) phases: [Vec<Option<Full<B, R>>>; 2],
    pub(super) gathers: ByKind<Repeated<B>>,
}

/// One kind, as a graph from the second time on.
#[derive(Debug)]
pub(super) struct Repeated<B: Backend> {
    /// Whether it ran: before that ranks are not connected, and memory is not there.
    pub(super) ran: bool,
    pub(super) captured: Option<CapturedGather<B>>,
}

/// A gather as a graph.
#[derive(Debug)]
pub(super) struct CapturedGather<B: Backend> {
    pub(super) graph: B::Graph,
    /// What each launch sends.
    pub(super) sent: Traffic,
}

/// This rank's message.
#[derive(Debug)]
pub(super) struct Packed<B: Backend> {
    /// What fills it; nothing of a rank without small pieces.
    pub(super) plan: Option<B::Plan>,
    pub(super) message: B::Buffer<u8>,
}

impl<B: Backend> Default for Repeated<B> {
    fn default() -> Self {
        Self {
            ran: false,
            captured: None,
        }
    }
}

impl<B: Backend, R: Recipe> GatherGroup<B, R> {
    /// The place of the views of the leased set, which are made if they are not there.
    pub(super) fn views_of(&mut self, lease: &Lease<B>) -> Result<usize, ShardError> {
        let id = lease.set.id;
        if let Some(found) = self.reused.views.iter().position(|views| views.set == id) {
            return Ok(found);
        }
        let views = self.make_views(lease)?;
        self.reused.views.push(views);
        Ok(self.reused.views.len() - 1)
    }

    fn make_views(&self, lease: &Lease<B>) -> Result<Views<B, R>, ShardError> {
        let mut phases = [Vec::new(), Vec::new()];
        for phase in Phase::ALL {
            for (param, plans) in self.plan.params.iter().enumerate() {
                let view = match plans.plan(phase) {
                    Some(plan) => Some(self.make_view(lease, param, plan, phase)?),
                    None => None,
                };
                phases[phase as usize].push(view);
            }
        }
        Ok(Views {
            set: lease.set.id,
            phases,
            gathers: ByKind::default(),
        })
    }

    /// Plans what fills this rank's messages of every kind, the first time. All sets have one memory of messages: a capture may gather
    /// into a set that the group did not have before.
    pub(super) fn plan_messages(&mut self, lease: &Lease<B>) -> Result<(), ShardError> {
        if self.reused.packed.is_none() {
            let [forward, backward, parts, rest] =
                GatherKind::ALL.map(|kind| self.plan_message(lease, kind));
            self.reused.packed = Some([forward?, backward?, parts?, rest?]);
        }
        Ok(())
    }

    /// Plans what puts this rank's small pieces into its message.
    fn plan_message(
        &self,
        lease: &Lease<B>,
        kind: GatherKind,
    ) -> Result<Option<Packed<B>>, ShardError> {
        let work = lease.set.work(kind);
        let Some(messages) = &work.messages else {
            return Ok(None);
        };
        let comm = self.comm_of(kind);
        let (rank, stream) = (comm.rank(), comm.backend());
        let mut jobs = Vec::new();
        for (index, m) in work.moves.iter().enumerate() {
            let len = m.ranges[rank].len();
            if let (Some(starts), true) = (&m.packed, len > 0) {
                let place = starts[rank]..starts[rank] + len;
                jobs.push(InterleaveJob {
                    outer: 1,
                    pieces: PieceRows::dense(1, [len]),
                    from: self.source(kind, index, m)?.clone(),
                    to: stream.view(&messages.buffer, place)?,
                });
            }
        }
        let plan = match jobs.is_empty() {
            true => None,
            false => Some(stream.plan(Work::Interleave(jobs))?),
        };
        let message = stream.view(&messages.buffer, messages.ranges[rank].clone())?;
        Ok(Some(Packed { plan, message }))
    }

    fn make_view(
        &self,
        lease: &Lease<B>,
        param: usize,
        plan: &GatherPlan,
        phase: Phase,
    ) -> Result<Full<B, R>, ShardError> {
        let tensor = &self.params[param];
        let mut specs: Vec<_> = Vec::new();
        if phase == Phase::Backward && self.plan.keeps() {
            let forward = self.plan.params[param].plan(Phase::Forward);
            specs.extend(forward.into_iter().flat_map(GatherPlan::kept).copied());
        }
        for spec in plan.kept() {
            if specs.iter().all(|s| s.key != spec.key) {
                specs.push(*spec);
            }
        }
        QuantizedTensor::with_buffers(tensor.recipe(), plan.full, specs, |spec, _| {
            Ok(match (spec.origin, lease.set.buffer(param, spec.key)) {
                // Equal on all ranks: the shard's own handle serves, so it can never be stale.
                (Origin::Replicated, _) | (_, None) => {
                    tensor.local().buffer(spec.key)?.storage.clone()
                }
                (_, Some(buffer)) => buffer.clone(),
            })
        })
    }
}

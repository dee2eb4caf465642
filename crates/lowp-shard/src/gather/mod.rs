//! [`GatherGroup`]: the gather engine. Parameters that are used together are gathered together,
//! in one batched collective per phase, into memory that groups of equal shapes share.

use std::sync::Arc;

use lowp_format::{AnyRecipe, GatherPlan, Phase, QuantizedTensor, Recipe, ReshardAfterForward};
use lowp_kernels::Backend;

use crate::{ShardError, ShardedTensor};
use lowp_comm::{Communicator, or_abort, ordered};

mod account;
mod calls;
mod exchange;
mod graph;
mod kind;
mod lending;
mod messages;
mod meter;
mod plan;
mod pool;
mod reshard;
mod scratch;
mod state;
mod steps;
mod tiles;
mod views;
mod watch;

pub use account::{GatherAccount, Padding, ParamAccount};
pub use exchange::Exchange;
use kind::{ByKind, GatherKind};
pub(crate) use plan::check_derived;
use plan::{GroupPlan, describe, plan_params};
pub use pool::GatherPool;
use reshard::Parts;
pub use reshard::Reshard;
pub use scratch::{Scratch, Scratches};
use state::{GatherState, StartedGather};
pub(crate) use steps::LocalWork;
pub use steps::{MemoryStep, PoolBuffer, is_rearranged, memory_steps, piece_ranges, pool_buffers};
pub use tiles::tall_to_matrix;
use views::{Packed, Views};
pub use watch::{GatherPoint, GatherWatch};

/// What ranks compare before they gather.
pub const GATHER_PLAN: &str = "the gather plan";

/// A full tensor as the pool's buffers hold it.
type Full<B, R> = QuantizedTensor<<B as Backend>::Buffer<u8>, R>;

/// Parameters that are gathered and freed together, for example those of one layer.
///
/// `unshard(phase)` before use, `reshard()` after. What is derivable (a byte or nibble transpose) never travels.
/// [`Reshard`] says what lies between the phases:
/// - `Yes`: each phase gathers only what it needs and frees it.
/// - `No`: forward gathers what both phases need and keeps it, and backward only derives.
/// - `Group`: forward gathers what both phases need, each rank of the group keeps a part of backward's buffers, and backward
///   gathers those parts among the group.
///
/// When the shards were cast again (an optimizer step), what the group holds is stale: the next
/// `unshard` gathers again, and [`GatherGroup::tensor`] rejects until then. Casts are collective,
/// so all ranks come to the same decision; if they do not, because one rank wrote or cast its rows
/// alone, every rank gets an error.
///
/// Ranks that gather different groups, or in another order, are an error at the call where ranks wait for each other on the host. Where calls are
/// only enqueued the first gather of each kind is compared, and later ones by the optimizer's step ([`GatherPool::gathered`]).
///
/// A graph that holds a gather writes the messages of gathers at every launch, as gathers outside of it do: launch it where no gather of the
/// same communicator is under way. What was prefetched is under way until its `unshard`. The graph keeps the memory that it writes, also that of
/// messages, after its groups have ended.
#[derive(Debug)]
pub struct GatherGroup<B: Backend, R: Recipe = AnyRecipe> {
    /// Dropped first: libraries wait for graphs of their collectives before a communicator ends.
    reused: Reused<B, R>,
    backend: B,
    comm: Arc<dyn Communicator<B>>,
    pool: Arc<GatherPool<B>>,
    params: Vec<ShardedTensor<B, R>>,
    plan: GroupPlan<B>,
    /// Of [`Reshard::Group`].
    parts: Option<Parts<B>>,
    state: GatherState<B>,
    watch: Option<GatherWatch<B>>,
    counts: Counts,
}

/// What the first gathers make and later ones use again.
#[derive(Debug)]
struct Reused<B: Backend, R: Recipe> {
    /// One for each destination set that the group had.
    views: Vec<Views<B, R>>,
    /// This rank's messages; `None` before the first gather.
    packed: Option<ByKind<Option<Packed<B>>>>,
    /// Whether the ranks have compared that they all make the gather.
    compared: ByKind<bool>,
}

/// What a group has gathered so far.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// Bytes that this rank sent, as the communicators counted them.
    sent_bytes: u64,
    /// Collectives.
    gathers: u64,
}

impl<B: Backend, R: Recipe> Drop for GatherGroup<B, R> {
    /// The memory is lent to others next: after gathers that nobody used, too.
    fn drop(&mut self) {
        self.state.free(&self.backend);
    }
}

impl<B: Backend, R: Recipe> GatherGroup<B, R> {
    /// Plans the gathers of `params` and checks that all ranks planned the same. `reshard` is whether weights are freed after
    /// forward, or a [`Reshard`]. Collective. The shards
    /// are written and the full tensors read by work of `backend`; the gathers are work of the
    /// communicator's stream, between both.
    ///
    /// # Errors
    /// Shards for another world or rank than the communicator's, cuts off the recipe's quantum, or
    /// ranks that disagree ([`CommError::Mismatch`](lowp_comm::CommError::Mismatch) on every rank).
    pub fn new(
        backend: &B,
        comm: Arc<dyn Communicator<B>>,
        pool: &Arc<GatherPool<B>>,
        params: Vec<ShardedTensor<B, R>>,
        reshard: impl Into<Reshard<B>>,
    ) -> Result<Self, ShardError> {
        let (group, text) = Self::uncompared(backend, comm, pool, params, reshard)?;
        group.comm.control().all_equal(GATHER_PLAN, &text)?;
        Ok(group)
    }

    /// As [`GatherGroup::new`], with what ranks must have in common for the caller to compare
    /// ([`GATHER_PLAN`]): that of many groups takes one round.
    ///
    /// # Errors
    /// As [`GatherGroup::new`], but for ranks that disagree.
    pub fn uncompared(
        backend: &B,
        comm: Arc<dyn Communicator<B>>,
        pool: &Arc<GatherPool<B>>,
        params: Vec<ShardedTensor<B, R>>,
        reshard: impl Into<Reshard<B>>,
    ) -> Result<(Self, String), ShardError> {
        let reshard = or_abort(&*comm, reshard.into().among(&*comm))?;
        let policy = reshard.policy();
        let plans = or_abort(&*comm, plan_params(&params, &*comm, policy))?;
        // Of one device, or the ranks hear of it.
        or_abort(&*comm, ordered(backend, &*comm, || Ok(())))?;
        let parts = Parts::new(&reshard, pool, &plans, comm.backend());
        let parts = or_abort(&*comm, parts)?;
        let text = describe(&params, &plans, policy, pool.large);
        let among = parts.as_ref().map_or(&comm, |parts| &parts.group);
        let comms = [&comm, &comm, among, &comm];
        let group = Self {
            reused: Reused {
                views: Vec::new(),
                packed: None,
                compared: ByKind::default(),
            },
            plan: GroupPlan::new(plans.into(), policy, pool, comms),
            state: GatherState::new(params.len()),
            backend: backend.clone(),
            comm,
            pool: Arc::clone(pool),
            params,
            parts,
            watch: None,
            counts: Counts::default(),
        };
        Ok((group, text))
    }

    /// Has `watch` called for every gather from now on; one for backward that builds on that for forward is two. For those that a capture
    /// records it is called when they are recorded, not when they run.
    pub fn watch(&mut self, watch: GatherWatch<B>) {
        self.watch = Some(watch);
    }

    /// Makes the full tensors of all parameters ready for `phase`. Collective; does nothing if
    /// they are ready. What the group's stream is given afterwards follows the gather; the host does not wait where the
    /// communicator only enqueues. In a capture they are ready where the graph is launched.
    ///
    /// # Errors
    /// Shards without the usage that the phase needs, a gather in a capture that makes plans or memory
    /// ([`ShardError::FirstInCapture`]), a backend failure, or a failure of another rank.
    pub fn unshard(&mut self, phase: Phase) -> Result<(), ShardError> {
        if self.state.held == Some(phase) && !self.is_stale() {
            return Ok(());
        }
        let done = self.try_unshard(phase);
        or_abort(&*self.comm, done)
    }

    /// Starts what [`GatherGroup::unshard`] waits for: borrows memory, and has the communicator's stream gather after
    /// what the group's stream was given so far. Collective; does nothing if the tensors are ready or on their way.
    ///
    /// While the group holds the tensors of forward or they are on their way, as where forward runs again before backward, that for backward gathers what is not
    /// among them, and [`GatherGroup::reshard`] after forward leaves all to backward. It does nothing where the policy keeps tensors or parts, or while the
    /// group holds those of backward.
    ///
    /// # Errors
    /// As [`GatherGroup::unshard`].
    pub fn prefetch(&mut self, phase: Phase) -> Result<(), ShardError> {
        let there = self.state.phase().filter(|_| !self.is_stale());
        let done = match (there, phase) {
            (Some(Phase::Forward), Phase::Backward)
                if self.plan.has_rest() && self.state.rest.is_none() =>
            {
                self.start_rest()
            }
            (Some(Phase::Forward), Phase::Backward) => Ok(()),
            (Some(there), _) if there == phase || self.state.held.is_some() => Ok(()),
            _ => self.start(phase),
        };
        or_abort(&*self.comm, done)
    }

    /// Whether a parameter was written since it was gathered, or since its gather began.
    fn is_stale(&self) -> bool {
        let parts = self.parts.as_ref().is_some_and(|parts| parts.filled);
        let any = self.state.phase().is_some() || parts;
        any && self
            .state
            .writes_since(&self.params)
            .any(|writes| writes > 0)
    }

    /// Compares over the ranks what is stale. A rank that would gather alone, while the others use
    /// what they hold, fails here instead of gathering into another group's call.
    fn agree_on_stale(&self) -> Result<(), ShardError> {
        let text = format!(
            "group {}: casts since the gather, by parameter: {:?}",
            self.plan.number,
            self.state.writes_since(&self.params).collect::<Vec<_>>()
        );
        let control = self.comm.control();
        Ok(control.all_equal("which gathered tensors are stale", &text)?)
    }

    fn try_unshard(&mut self, phase: Phase) -> Result<(), ShardError> {
        if phase == Phase::Backward
            && !self.is_stale()
            && let Some(rest) = self.state.rest.take()
        {
            // The gather of the rest comes after that for forward.
            self.state.started = None;
            self.backend.wait(&rest)?;
            self.state.held = Some(phase);
            return Ok(());
        }
        if self.state.started_phase() != Some(phase) || self.is_stale() {
            self.start(phase)?;
        }
        if let Some(started) = self.state.started.take() {
            self.backend.wait(&started.arrived)?;
        }
        self.state.held = Some(phase);
        Ok(())
    }

    /// Starts the gather for `phase` on the communicator's stream.
    fn start(&mut self, phase: Phase) -> Result<(), ShardError> {
        self.check_phase(phase)?;
        // The backward plan of a group that keeps its tensors builds on the forward one.
        let builds = phase == Phase::Backward && self.plan.keeps();
        let held = self.state.phase();
        let mut forward_held = builds && held == Some(Phase::Forward);
        let filled = |parts: &Parts<B>| phase == Phase::Backward && parts.filled;
        let mut from_parts = self.parts.as_ref().is_some_and(filled);
        // Only where another rank might go on with what it holds.
        let has_rest = self.state.rest.is_some();
        if (forward_held || from_parts || has_rest || held == Some(phase)) && self.is_stale() {
            self.agree_on_stale()?;
            (forward_held, from_parts) = (false, false);
        }
        self.state.held = None;
        // One that was started and is not used after all writes where this one does.
        self.state.follow(&self.backend)?;
        if let Some(parts) = &mut self.parts {
            parts.filled = from_parts;
        }
        self.state.note_versions(&self.params);
        let kind = if from_parts {
            GatherKind::Parts
        } else {
            phase.into()
        };
        if self.state.lease.is_none() {
            let stream = self.comm_of(kind).backend().clone();
            let lease = self
                .pool
                .lease(&self.plan.geometry, [&self.backend, &stream]);
            let planned = lease.and_then(|lease| {
                self.plan_messages(&lease)?;
                Ok(lease)
            });
            let first_in_capture = |error| self.plan.first_in_capture(error, phase);
            self.state.lease = Some(planned.map_err(first_in_capture)?);
        }
        let arrived = self.gather_after(kind, builds && !forward_held)?;
        if let (Some(parts), Phase::Forward) = (&mut self.parts, phase) {
            parts.filled = true;
        }
        self.state.started = Some(StartedGather { phase, arrived });
        Ok(())
    }

    /// Checks that the shards of all parameters can serve `phase`.
    fn check_phase(&self, phase: Phase) -> Result<(), ShardError> {
        for (param, (plans, tensor)) in self.plan.params.iter().zip(&self.params).enumerate() {
            if plans.plan(phase).is_none() {
                let (shape, usage) = (tensor.spec().full(), tensor.spec().usage());
                return Err(ShardError::MissingPhase {
                    param,
                    shape,
                    usage,
                    phase,
                });
            }
        }
        Ok(())
    }

    /// Starts the gather of what backward needs beside what forward gathers, into the same memory.
    fn start_rest(&mut self) -> Result<(), ShardError> {
        self.state.rest = Some(self.gather_after(GatherKind::Rest, false)?);
        Ok(())
    }

    /// Has the communicator's stream gather after what the group's stream was given so far. Returns the point after the gather.
    fn gather_after(
        &mut self,
        kind: GatherKind,
        forward_first: bool,
    ) -> Result<B::Event, ShardError> {
        let stream = self.comm_of(kind).backend().clone();
        let after = self.backend.record()?;
        stream.wait(&after)?;
        let gathered = self.gather(kind, forward_first);
        // Also after a gather that failed halfway: what it reads and writes is lent to others next.
        let arrived = stream.record();
        if gathered.is_err() {
            self.backend.wait_for(&stream)?;
        }
        gathered?;
        let arrived = arrived?;
        self.comm_of(kind).expect(arrived.clone(), "a gather");
        Ok(arrived)
    }

    /// The full tensor of parameter `param`, with the buffers of the phase that was unsharded.
    ///
    /// # Errors
    /// It is not gathered, it was cast again since, or there is no such parameter.
    pub fn tensor(&self, param: usize) -> Result<&Full<B, R>, ShardError> {
        let len = self.params.len();
        if param >= len {
            return Err(ShardError::NoSuchParam { param, len });
        }
        let (Some(phase), Some(lease)) = (self.state.held, &self.state.lease) else {
            return Err(ShardError::NotGathered { param });
        };
        if self.params[param].version() != self.state.versions[param] {
            return Err(ShardError::Stale { param });
        }
        self.reused
            .views
            .iter()
            .find(|views| views.set == lease.set.id)
            .and_then(|views| views.phases[phase as usize][param].as_ref())
            .ok_or(ShardError::NotGathered { param })
    }

    /// Says that the phase is over: frees the full tensors, unless forward ends and the policy is
    /// to keep them or a part of them, or backward builds on them ([`GatherGroup::prefetch`]). Not collective.
    pub fn reshard(&mut self) {
        match (self.plan.policy, self.state.held) {
            (ReshardAfterForward::No, Some(Phase::Forward)) => {}
            (_, Some(Phase::Forward)) if self.state.rest.is_some() => {}
            // The parts are for backward.
            (ReshardAfterForward::Group(_), Some(Phase::Forward)) => {
                self.state.free(&self.backend);
            }
            _ => self.release(),
        }
    }

    /// Frees the full tensors and what is kept of them whatever the policy, for example after an evaluation without
    /// backward. Not collective, but every rank must do it at the same place.
    pub fn release(&mut self) {
        if let Some(parts) = &mut self.parts {
            parts.filled = false;
        }
        self.state.free(&self.backend);
    }

    /// The number of the pool's buffers that hold the full tensors, `None` while it holds none: plans over them can be kept by
    /// it and the phase.
    pub fn set(&self) -> Option<u64> {
        self.state.lease.as_ref().map(|lease| lease.set.id)
    }

    /// The phase whose tensors are ready; `None` before `unshard` and after tensors were freed.
    pub fn held(&self) -> Option<Phase> {
        self.state.held
    }

    /// This rank's shards, in the order in which they were given: their places are the numbers of parameters.
    pub fn params(&self) -> &[ShardedTensor<B, R>] {
        &self.params
    }

    /// The communicator that the group was made with: the ranks that share out the parameters.
    pub fn comm(&self) -> &Arc<dyn Communicator<B>> {
        &self.comm
    }

    /// The plan of one parameter and phase, if the shards can serve the phase.
    pub fn plan(&self, param: usize, phase: Phase) -> Option<&GatherPlan> {
        self.plan.params.get(param)?.plan(phase)
    }

    /// What becomes of the weights after forward.
    pub fn reshard_after_forward(&self) -> ReshardAfterForward {
        self.plan.policy
    }

    /// What the group sends and holds.
    pub fn account(&self) -> GatherAccount {
        let params = self.params.iter().zip(self.plan.params.iter());
        GatherAccount {
            params: params
                .map(|(tensor, plans)| {
                    let group = self.parts.as_ref().map(|parts| &*parts.group);
                    ParamAccount::new(tensor, plans, &*self.comm, group, self.plan.keeps())
                })
                .collect(),
            padding: Padding::of_step(
                &self.plan.padding,
                self.parts.is_some(),
                self.plan.keeps(),
                self.plan.has_rest(),
            ),
            counted_sent_bytes: self.counts.sent_bytes,
            gathers: self.counts.gathers,
        }
    }
}
